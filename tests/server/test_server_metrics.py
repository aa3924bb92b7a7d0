import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.server import status
from chairlift.server.metrics import MOST_TENANTS, Metrics

LABELS = {"model_name": "org/fake-model", "engine": "0"}


def scrape(http):
    """Sample values by name, of the samples without labels beside the common ones."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert all(family.name.startswith("chairlift_") and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    assert all(sample.labels.items() >= LABELS.items() for sample in samples)
    return {sample.name.removeprefix("chairlift_"): sample.value for sample in samples if sample.labels == LABELS}


def by(http_or_text, name, label):
    """Sample values of a family by the value of its own label."""
    text = http_or_text if isinstance(http_or_text, str) else http_or_text.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels[label]: sample.value for sample in samples if sample.name == f"chairlift_{name}"}


def use(computed_tokens=0, **others):
    """What the engine says that one tenant or class used."""
    names = ("waiting", "running", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "block_us", "preemptions", "queued_us")
    return {**dict.fromkeys(names, 0), "computed_tokens": computed_tokens, **others}


def test_engine_counters_are_read_at_the_scrape(http, engine):
    assert scrape(http)["kv_cache_usage_perc"] == 0
    engine.counters = {"running": 3, "waiting": 2, "free_blocks": 25, "total_blocks": 100, "prefix_queries": 70, "prefix_hits": 30}
    engine.counters |= {"preemptions": 1, "prompt_tokens": 500, "generated_tokens": 60, "steps": 9}
    seen = scrape(http)
    expected = {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.75, "prefix_cache_queries_total": 70}
    expected |= {"prefix_cache_hits_total": 30, "num_preemptions_total": 1, "prompt_tokens_total": 500, "generation_tokens_total": 60}
    assert {name: seen[name] for name in expected} == expected


def test_requests_are_timed_and_counted(http):
    http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 5})
    http.post("/v1/completions", json={"prompt": "boom", "max_tokens": 5})
    seen = scrape(http)
    assert seen["time_to_first_token_seconds_count"] == 3
    assert seen["inter_token_latency_seconds_count"] == 4 + 4 + 1
    assert seen["e2e_request_latency_seconds_count"] == 3
    assert seen["request_queue_time_seconds_count"] == 2
    assert seen["request_queue_time_seconds_sum"] == 0.002
    text = http.get("/metrics").text
    for reason, count in {"length": 2, "error": 1, "stop": 0, "abort": 0}.items():
        assert f'chairlift_request_success_total{{engine="0",finished_reason="{reason}",model_name="org/fake-model"}} {count}.0' in text


def test_what_the_scheduler_counts_is_shown(http, engine):
    engine.counters = {"running": 3, "rows": 4, "swapped": 2, "used_tokens": 60, "held_slots": 80, "host_blocks": 10, "free_host_blocks": 4}
    engine.counters |= {"computed_tokens": 90, "recomputed_tokens": 5, "swapped_blocks": 7, "rejected_queue_full": 6}
    engine.counters |= {"preemptions_recompute": 1, "preemptions_swap": 2, "predicted_wait_us": 2_500_000, "predicted_step_us": 1500}
    engine.counters |= {"waiting_by_cause": {"wait_blocks": 4, "wait_order": 1, "preempted": 2}}
    seen = scrape(http)
    expected = {"num_requests_swapped": 2, "row_usage_perc": 0.75, "kv_cache_fragmentation_perc": 0.25, "swap_usage_perc": 0.6}
    expected |= {"computed_tokens_total": 90, "recomputed_tokens_total": 5, "swapped_blocks_total": 7}
    expected |= {"predicted_wait_seconds": 2.5, "predicted_step_seconds": 0.0015}
    assert {name: seen[name] for name in expected} == pytest.approx(expected)
    assert by(http, "num_preemptions_by_kind_total", "kind") == {"recompute": 1, "swap": 2}
    assert by(http, "admission_rejections_total", "reason") == {"queue_full": 6}
    waiting = {
        "blocks": 4,
        "order": 1,
        "preempted": 2,
        "rows": 0,
        "tokens": 0,
        "share": 0,
        "batch": 0,
        "step": 0,
        "sibling": 0,
        "swapped": 0,
    }
    assert by(http, "num_requests_waiting_by_reason", "reason") == waiting


def test_use_is_counted_by_tenant_and_class(http, engine):
    alice = use(900, waiting=1, running=2, requests=3, prompt_tokens=500, cached_tokens=100, output_tokens=40)
    alice |= {"block_us": 2_500_000, "preemptions": 1, "queued_us": 750_000}
    engine.counters = {"tenants": {"alice": alice, "": use(5)}, "classes": {-10: use(3), -1: use(4, running=1), 0: use(5), 7: use(6)}}
    expected = {"num_requests_waiting": 1, "num_requests_running": 2, "requests_total": 3, "prompt_tokens_total": 500}
    expected |= {"prompt_tokens_cached_total": 100, "generation_tokens_total": 40, "computed_tokens_total": 900}
    expected |= {"kv_block_seconds_total": 2.5, "num_preemptions_total": 1, "request_queue_seconds_total": 0.75}
    for name, value in expected.items():
        whole, total, _ = name.partition("_total")
        assert by(http, f"{whole}_by_tenant{total}", "tenant") == {"alice": value, "none": 5 * (name == "computed_tokens_total")}
    assert by(http, "computed_tokens_by_class_total", "priority") == {"high": 7, "default": 5, "low": 6}
    assert by(http, "num_requests_running_by_class", "priority") == {"high": 1, "default": 0, "low": 0}


def test_few_tenants_have_labels_and_no_counter_goes_down():
    stats = {}
    metrics = Metrics("m", lambda: stats)

    def told(**computed):
        stats["tenants"] = {name: use(tokens) for name, tokens in computed.items()}
        return by(metrics.text().decode(), "computed_tokens_by_tenant_total", "tenant")

    large = {f"t{i}": 1000 + i for i in range(MOST_TENANTS - 1)}
    first = told(**large, a=20, b=10, c=5)
    assert len(first) == MOST_TENANTS + 1
    assert (first["a"], first["other"]) == (20, 15)
    # b overtakes a: what it used before stays among the others', and what a uses now goes there.
    second = told(**large, a=21, b=50, c=6)
    assert (second["b"], second["other"], "a" in second) == (40, 17, False)
    assert sum(second.values()) + first["a"] == sum(large.values()) + 21 + 50 + 6
    third = told(**large, a=60, b=50, c=6)
    assert (third["a"], third["other"]) == (20 + 39, 17)
    # The engine may forget a tenant, and begin anew when it comes back.
    assert "t0" not in told(a=60)
    assert told(a=60, t0=7)["t0"] == 1007
    assert told(a=60, t0=9)["t0"] == 1009
    assert told(a=60, t0=4)["t0"] == 1013


def test_first_tokens_are_timed_by_class(http):
    for fields in ({}, {"priority": 1}, {"service_tier": "priority"}, {"service_tier": "priority", "n": 3}):
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **fields})
    counts = by(http, "time_to_first_token_by_class_seconds_count", "priority")
    assert counts == {"high": 2, "default": 1, "low": 1}
    assert scrape(http)["time_to_first_token_seconds_count"] == 4


def test_every_answer_counts_and_those_that_never_came_in_do_not(http):
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "n": 2})
    http.post("/v1/completions", json={"prompt": "late", "n": 3})
    http.post("/v1/completions", json={"prompt": "full", "n": 4})
    reasons = {"length": 2, "deadline": 3, "error": 0, "stop": 0, "abort": 0}
    assert by(http, "request_success_total", "finished_reason") == reasons
    seen = scrape(http)
    assert seen["e2e_request_latency_seconds_count"] == 5
    assert seen["inter_token_latency_seconds_count"] == 2 * 2 + 3


def test_the_status_line_tells_of_swapping_and_preemption_with_a_remedy():
    before = {"running": 1, "preemptions": 4}
    now = {"running": 1, "swapped": 2, "preemptions": 7, "total_blocks": 8, "free_blocks": 8}
    assert status.line(before, now, 10) == (
        "running 1, waiting 0, swapped 2, KV cache 0.0%, prefix hits 0.0%, prompt 0.0 tokens/s, generation 0.0 tokens/s, "
        "preemptions 3 (the KV cache is too small: raise --kv-cache-memory-bytes or lower --max-num-seqs)"
    )
    assert status.line({}, {"swapped": 1}, 10) is not None


def test_the_status_line_tells_rates_and_is_silent_when_idle():
    quiet = {"prompt_tokens": 100, "generated_tokens": 50, "running": 0, "waiting": 0}
    assert status.line(quiet, quiet, 10) is None
    assert status.line({}, {}, 10) is None
    busy = {"prompt_tokens": 300, "generated_tokens": 100, "running": 2, "waiting": 1, "total_blocks": 8, "free_blocks": 6}
    assert status.line(quiet, busy | {"prefix_queries": 4, "prefix_hits": 1}, 10) == (
        "running 2, waiting 1, KV cache 25.0%, prefix hits 25.0%, prompt 20.0 tokens/s, generation 5.0 tokens/s"
    )
    assert status.line(busy, busy, 10) is not None  # something runs, though nothing moves
