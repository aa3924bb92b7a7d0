from prometheus_client.parser import text_string_to_metric_families

from chairlift.server import status

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


def test_the_status_line_tells_rates_and_is_silent_when_idle():
    quiet = {"prompt_tokens": 100, "generated_tokens": 50, "running": 0, "waiting": 0}
    assert status.line(quiet, quiet, 10) is None
    assert status.line({}, {}, 10) is None
    busy = {"prompt_tokens": 300, "generated_tokens": 100, "running": 2, "waiting": 1, "total_blocks": 8, "free_blocks": 6}
    assert status.line(quiet, busy | {"prefix_queries": 4, "prefix_hits": 1}, 10) == (
        "running 2, waiting 1, KV cache 25.0%, prefix hits 25.0%, prompt 20.0 tokens/s, generation 5.0 tokens/s"
    )
    assert status.line(busy, busy, 10) is not None  # something runs, though nothing moves
