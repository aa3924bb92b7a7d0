import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_connection import connected
from scripted_engine import ScriptedProcess
from server_here import serving, wait_until

from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.replica import Replica
from chairlift.engine.stats import Stats
from chairlift.outputs import Timing
from chairlift.scheduling import Scheduling
from chairlift.server.observability import engine_metrics
from chairlift.server.observability.engine_metrics import MAX_TENANTS, REJECTIONS
from chairlift.server.observability.latencies import MAX_TENANTS as MAX_TIMED
from chairlift.server.observability.logs import load_line
from chairlift.server.observability.metrics import Metrics, collect, render
from chairlift.server.tiers import Tier

LABELS = {"model_name": "org/fake-model", "engine": "0"}


def replica(stats, info=None, number=0):
    """An engine that reports these counters and limits."""
    engine_info = EngineInfo(model="m", **(info or {}))
    return Replica(number, SimpleNamespace(stats=lambda: Stats(**stats), info=engine_info, ready=True, stuck=None))


def scrape(http):
    """Sample values by name, of the samples without labels beside the common ones."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert all(family.name.startswith("chairlift_") and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert not [sample.name for sample in samples if sample.name.endswith("_created")]
    assert all(sample.labels.items() >= LABELS.items() for sample in samples)
    return {sample.name.removeprefix("chairlift_"): sample.value for sample in samples if sample.labels == LABELS}


def text_of(metrics):
    """The page of one model's metrics."""
    return render(collect([metrics])).decode()


def by(http_or_text, name, label):
    """Sample values of a family by the value of its own label."""
    text = http_or_text if isinstance(http_or_text, str) else http_or_text.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels[label]: sample.value for sample in samples if sample.name == f"chairlift_{name}"}


def use(computed_tokens=0, **others):
    """What the engine says that one tenant or class used."""
    names = (
        "waiting",
        "running",
        "requests",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "block_us",
        "compute_ns",
        "energy_uj",
        "preemptions",
        "queued_us",
        "held",
        "held_block_us",
    )
    return {**dict.fromkeys(names, 0), "computed_tokens": computed_tokens, **others}


def test_engine_counters_are_read_at_the_scrape(http, engine):
    assert scrape(http)["kv_cache_usage_perc"] == 0
    engine.counters = {"running": 3, "waiting": 2, "free_blocks": 25, "total_blocks": 100, "prefix_queries": 70, "prefix_hits": 30}
    engine.counters |= {"preemptions": 1, "prompt_tokens": 500, "generated_tokens": 60, "steps": 9}
    seen = scrape(http)
    expected = {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.75, "prefix_cache_queries_total": 70}
    expected |= {"prefix_cache_hits_total": 30, "num_preemptions_total": 1, "prompt_tokens_total": 500, "generation_tokens_total": 60}
    assert {name: seen[name] for name in expected} == expected


def test_requests_are_timed_and_counted(http, engine):
    engine.shown = {"queued": 0.001, "timing": Timing(0.001, 0.001, 0.002, 0.003)}
    http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 5})
    http.post("/v1/completions", json={"prompt": "boom", "max_tokens": 5})
    seen = scrape(http)
    assert seen["time_to_first_token_seconds_count"] == 3
    assert seen["inter_token_latency_seconds_count"] == 4 + 4 + 1
    assert seen["e2e_request_latency_seconds_count"] == 3
    assert seen["request_queue_time_seconds_count"] == 3, "with the first tokens, though one of the requests fails after"
    assert seen["request_queue_time_seconds_sum"] == pytest.approx(0.003)
    text = http.get("/metrics").text
    for reason, count in {"length": 2, "error": 1, "stop": 0, "abort": 0}.items():
        assert f'chairlift_request_success_total{{engine="0",finished_reason="{reason}",model_name="org/fake-model"}} {count}.0' in text


def test_what_the_scheduler_counts_is_shown(http, engine):
    engine.counters = {
        "running": 3,
        "slots": 4,
        "swapped": 2,
        "used_tokens": 60,
        "held_kv_slots": 80,
        "host_blocks": 10,
        "free_host_blocks": 4,
    }
    engine.counters |= {"computed_tokens": 90, "recomputed_tokens": 5, "swapped_blocks": 7, "rejected_queue_full": 6}
    engine.counters |= {
        "preemptions_for_priority": 3,
        "preemptions_recompute": 1,
        "preemptions_swap": 2,
        "predicted_wait_us": 2_500_000,
        "predicted_step_us": 1500,
    }
    engine.counters |= {"waiting_by_state": {"wait_blocks": 4, "wait_policy": 1, "preempted": 2}}
    engine.counters |= {"accepted_draft_tokens_by_position": [9, 4, 0]}
    seen = scrape(http)
    expected = {"num_requests_swapped": 2, "batch_slots_usage_perc": 0.75, "kv_cache_fragmentation_perc": 0.25, "swap_usage_perc": 0.6}
    expected |= {"computed_tokens_total": 90, "recomputed_tokens_total": 5, "swapped_blocks_total": 7}
    expected |= {"predicted_wait_seconds": 2.5, "predicted_step_seconds": 0.0015}
    assert {name: seen[name] for name in expected} == pytest.approx(expected)
    assert by(http, "num_preemptions_by_kind_total", "kind") == {"recompute": 1, "swap": 2}
    assert by(http, "num_preemptions_by_reason_total", "reason") == {"kv_blocks": 0, "priority": 3, "fairness": 0, "shortest": 0}
    assert by(http, "spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 9, "1": 4, "2": 0}
    assert by(http, "admission_rejections_total", "reason") == {**dict.fromkeys(REJECTIONS, 0), "queue_full": 6}
    waiting = {
        "blocks": 4,
        "policy": 1,
        "preempted": 2,
        "slots": 0,
        "budget": 0,
        "fairness": 0,
        "batch": 0,
        "step": 0,
        "fork": 0,
        "session": 0,
        "swapped": 0,
        "grammar": 0,
        "read_cache": 0,
    }
    assert by(http, "num_requests_waiting_by_reason", "reason") == waiting


@pytest.mark.slow
def test_use_is_counted_by_tenant_and_class(http, engine):
    alice = use(900, waiting=1, running=2, requests=3, prompt_tokens=500, cached_tokens=100, output_tokens=40)
    alice |= {
        "block_us": 2_500_000,
        "compute_ns": 250_000_000,
        "preemptions": 1,
        "queued_us": 750_000,
        "held": 4,
        "held_block_us": 1_500_000,
    }
    engine.counters = {"tenants": {"alice": alice, "": use(5)}, "classes": {-10: use(3), -1: use(4, running=1), 0: use(5), 7: use(6)}}
    expected = {"num_requests_waiting": 1, "num_requests_running": 2, "requests_total": 3, "prompt_tokens_total": 500}
    expected |= {"prompt_tokens_cached_total": 100, "generation_tokens_total": 40, "computed_tokens_total": 900}
    expected |= {
        "kv_block_seconds_total": 2.5,
        "compute_seconds_total": 0.25,
        "num_preemptions_total": 1,
        "request_queue_seconds_total": 0.75,
    }
    expected |= {"num_held_sequences": 4, "held_kv_block_seconds_total": 1.5}
    for name, value in expected.items():
        whole, total, _ = name.partition("_total")
        assert by(http, f"{whole}_by_tenant{total}", "tenant") == {"alice": value, "none": 5 * (name == "computed_tokens_total")}
    assert by(http, "computed_tokens_by_class_total", "priority") == {"high": 7, "default": 5, "low": 6}
    assert by(http, "num_requests_running_by_class", "priority") == {"high": 1, "default": 0, "low": 0}


def test_few_tenants_have_labels_and_no_counter_goes_down():
    stats = {}
    metrics = Metrics("m", lambda: [replica(stats)])

    def reported(**computed):
        stats["tenants"] = {name: use(tokens) for name, tokens in computed.items()}
        return by(text_of(metrics), "computed_tokens_by_tenant_total", "tenant")

    large = {f"t{i}": 1000 + i for i in range(MAX_TENANTS - 1)}
    first = reported(**large, a=20, b=10, c=5)
    assert len(first) == MAX_TENANTS + 1
    assert (first["a"], first["other"]) == (20, 15)
    # b overtakes a: what it used before stays among the others', and what a uses now goes there.
    second = reported(**large, a=21, b=50, c=6)
    assert (second["b"], second["other"], "a" in second) == (40, 17, False)
    assert sum(second.values()) + first["a"] == sum(large.values()) + 21 + 50 + 6
    third = reported(**large, a=60, b=50, c=6)
    assert (third["a"], third["other"]) == (20 + 39, 17)
    # The engine may forget a tenant, and begin anew when it comes back.
    assert "t0" not in reported(a=60)
    assert reported(a=60, t0=7)["t0"] == 1007
    assert reported(a=60, t0=9)["t0"] == 1009
    assert reported(a=60, t0=4)["t0"] == 1013


def test_names_that_were_made_up_are_forgotten(monkeypatch):
    monkeypatch.setattr(engine_metrics, "MAX_LABELS", 5)
    stats = {}
    metrics = engine_metrics.AllEngineMetrics({}, lambda: [replica(stats)], Counter())

    def reported(**tenants):
        stats["tenants"] = tenants
        [samples] = [family.samples for family in metrics.collect() if family.name == "chairlift_computed_tokens_by_tenant"]
        return {sample.labels["tenant"]: sample.value for sample in samples}

    for number in range(10):
        assert reported(**{"a": use(number), f"t{number}": use(1)}) == {"a": number, f"t{number}": 1}
    assert reported(t0=use(1)) == {"t0": 1}
    assert reported(t9=use(1)) == {"t9": 2}, "a recent name is remembered"


def test_first_tokens_are_timed_by_class_and_by_tier(http):
    for fields in ({}, {"priority": 1}, {"priority": -1, "service_tier": "flex"}, {"service_tier": "priority", "n": 3}):
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **fields})
    counts = by(http, "time_to_first_token_by_class_seconds_count", "priority")
    assert counts == {"high": 1, "default": 2, "low": 1}
    assert by(http, "time_to_first_token_by_tier_seconds_count", "tier") == {"priority": 1, "default": 2, "flex": 1}
    assert scrape(http)["time_to_first_token_seconds_count"] == 4


def test_the_answers_of_a_tier_are_counted_by_whether_they_met_its_targets():
    metrics = Metrics("m", list)
    tier = Tier(1, None, ttft_ms=500, itl_ms=100)
    metrics.observe_targets("flex", tier, Timing(queued=0, started=0, first_token=0.5, total=1.0), 5)
    metrics.observe_targets("flex", tier, Timing(queued=0, started=0, first_token=0.6, total=1.0), 5)
    metrics.observe_targets("flex", tier, Timing(queued=0, started=0, first_token=0.6, total=0.6), 1)
    metrics.observe_targets("default", Tier(1), Timing(queued=0, started=0, first_token=0.6, total=1.0), 5)
    samples = [sample for family in text_string_to_metric_families(text_of(metrics)) for sample in family.samples]
    counts = {
        tuple(map(one.labels.get, ("tier", "target", "met"))): one.value
        for one in samples
        if one.name == "chairlift_service_tier_targets_total"
    }
    assert counts == {("flex", "ttft", "true"): 1, ("flex", "ttft", "false"): 2, ("flex", "itl", "true"): 1, ("flex", "itl", "false"): 1}


def test_latencies_are_told_by_class_and_by_tenant(http):
    for tenant, fields in (("alice", {"n": 2}), ("bob", {"priority": 3}), (None, {})):
        headers = {} if tenant is None else {"x-tenant-id": tenant}
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, **fields}, headers=headers)
    for stem, per_answer in (("inter_token_latency", 2), ("request_time_per_output_token", 1), ("e2e_request_latency", 1)):
        counts = by(http, f"{stem}_by_tenant_seconds_count", "tenant")
        assert counts == {"alice": 2 * per_answer, "bob": per_answer, "none": per_answer}
        assert by(http, f"{stem}_by_class_seconds_count", "priority") == {"high": 0, "default": 3 * per_answer, "low": per_answer}
        assert scrape(http)[f"{stem}_seconds_count"] == 4 * per_answer


def test_latencies_have_labels_for_so_many_tenants_and_no_more():
    metrics = Metrics("m", list)
    for number in range(MAX_TIMED + 5):
        metrics.latencies(Scheduling(tenant=f"tenant{number}")).first_token.observe(0.02)
    metrics.latencies(Scheduling(tenant="tenant0")).first_token.observe(1000)
    samples = [sample for family in text_string_to_metric_families(text_of(metrics)) for sample in family.samples]
    counts = {one.labels["tenant"]: one.value for one in samples if one.name == "chairlift_time_to_first_token_by_tenant_seconds_count"}
    assert len(counts) == MAX_TIMED + 2
    assert (counts["tenant0"], counts["tenant1"], counts["other"], counts["none"]) == (2, 1, 5, 0)
    buckets = [one.value for one in samples if one.name == "chairlift_time_to_first_token_seconds_bucket"]
    bounds = [one.labels["le"] for one in samples if one.name == "chairlift_time_to_first_token_seconds_bucket"]
    # A bucket's upper bound belongs to it.
    assert dict(zip(bounds, buckets, strict=True))["0.02"] == MAX_TIMED + 5
    assert buckets == sorted(buckets)
    assert (bounds[-1], buckets[-1]) == ("+Inf", MAX_TIMED + 6)
    [total] = [one.value for one in samples if one.name == "chairlift_time_to_first_token_seconds_sum"]
    assert total == pytest.approx(1000 + 0.02 * (MAX_TIMED + 5))


def test_a_tenant_is_not_told_of_others(engine):
    engine.counters = {
        "running": 3,
        "waiting": 2,
        "saturation": 0.69,
        "tenants": {name: use(9, cached_tokens=5) for name in ("alice", "bob", "")},
    }
    with serving(engine, "alice=KEY-A,bob=KEY-B,KEY-C", operator_key="KEY-D") as (base, _), httpx.Client(base_url=base) as http:

        def read(key):
            text = http.get("/metrics", headers={"authorization": f"Bearer {key}"}).text
            return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

        for key in ("KEY-A", "KEY-B", "KEY-C"):
            body = {"prompt": "a", "max_tokens": 2}
            http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        for key, label in (("KEY-A", "alice"), ("KEY-B", "bob"), ("KEY-C", "none")):
            samples = read(key)
            assert {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels} == {label}
            assert {"chairlift_prompt_tokens_cached_by_tenant_total", "chairlift_e2e_request_latency_by_tenant_seconds_sum"} <= {
                sample.name for sample in samples
            }
            # Computed tokens would tell which of its prompts others have sent before.
            assert "chairlift_computed_tokens_by_tenant_total" not in {sample.name for sample in samples}
            shared = {sample.name: sample.value for sample in samples if "tenant" not in sample.labels}
            assert shared.pop("chairlift_cache_config_info", 1) == 1
            assert shared == {"chairlift_engine_restarts_total": 0, "chairlift_saturation": 0.5}
        everything = read("KEY-D")
        assert {sample.labels["tenant"] for sample in everything if "tenant" in sample.labels} == {"alice", "bob", "none"}
        assert {("chairlift_num_requests_running", 3), ("chairlift_saturation", 0.69)} <= {(one.name, one.value) for one in everything}


def test_every_answer_counts_and_those_that_never_came_in_do_not(http):
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "n": 2})
    http.post("/v1/completions", json={"prompt": "late", "n": 3})
    http.post("/v1/completions", json={"prompt": "full", "n": 4})
    reasons = {"length": 2, "deadline": 3, "error": 0, "stop": 0, "abort": 0}
    assert by(http, "request_success_total", "finished_reason") == reasons
    seen = scrape(http)
    assert seen["e2e_request_latency_seconds_count"] == 5
    assert seen["inter_token_latency_seconds_count"] == 2 * 2 + 1  # the late one's forks begin a step later, and have one token each


def test_what_answers_took_and_asked_is_shown(http, engine):
    engine.shown = {"queued": 0.001, "timing": Timing(0.001, 0.001, 0.002, 0.003)}
    http.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 5, "n": 2})
    seen = scrape(http)
    expected = {"request_prompt_tokens": (2, 10), "request_generation_tokens": (2, 10), "request_prefill_kv_computed_tokens": (2, 5 + 1)}
    expected |= {"request_params_n": (1, 2), "request_params_max_tokens": (1, 5), "request_max_num_generation_tokens": (1, 5)}
    expected |= {"request_inference_time_seconds": (2, 0.004), "request_prefill_time_seconds": (2, 0.002)}
    expected |= {"request_decode_time_seconds": (2, 0.002), "request_time_per_output_token_seconds": (2, 0.0005)}
    expected |= {"request_num_preemptions": (2, 0), "request_queue_time_seconds": (1, 0.001)}
    assert {name: (seen[f"{name}_count"], seen[f"{name}_sum"]) for name in expected} == {
        name: pytest.approx(pair) for name, pair in expected.items()
    }


def test_the_lengths_of_an_aborted_request_count(http):
    body = {"prompt": "slow ab", "max_tokens": 500, "n": 2, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: by(http, "request_success_total", "finished_reason")["abort"] == 2)
    http.post("/v1/completions", json={"prompt": "full", "n": 4})
    seen = scrape(http)
    assert (seen["request_prompt_tokens_count"], seen["request_prompt_tokens_sum"]) == (2, 2 * len("slow ab"))
    assert seen["request_generation_tokens_count"] == 2
    assert 1 <= seen["request_generation_tokens_sum"] < 1000


def test_counters_go_on_where_an_engine_is_started_again():
    stats = {}
    metrics = Metrics("m", lambda: [replica(stats)])

    def total():
        text = text_of(metrics)
        return by(text, "generation_tokens_total", "engine")["0"], by(text, "admission_rejections_total", "reason")["queue_full"]

    def restart():
        with metrics.new_counters(replica(stats)):
            stats.clear()

    restart()  # the first start
    stats |= {"generated_tokens": 100, "rejected_queue_full": 2, "tenants": {"alice": use(5)}}
    assert total() == (100, 2)
    restart()
    assert total() == (100, 2)  # it loads its model
    stats |= {"generated_tokens": 7, "rejected_queue_full": 1}
    assert total() == (107, 3)
    stats["generated_tokens"] = 9
    restart()
    stats |= {"generated_tokens": 7, "tenants": {"alice": use(5)}}
    assert total() == (116, 3), "neither what was counted after the last scrape nor an equal count is lost"
    assert by(text_of(metrics), "computed_tokens_by_tenant_total", "tenant") == {"alice": 10}


def test_counters_of_an_engine_that_left_go_on_with_the_next_one_of_its_number(engine):
    metrics = Metrics("m", lambda: engine.replicas)
    engine.new_counters = metrics.new_counters

    def totals():
        text = text_of(metrics)
        return [by(text, f"{name}_total", "engine")["1"] for name in ("generation_tokens", "engine_restarts")]

    for expected in ([50, 1], [100, 2]):
        joined = engine.add(ScriptedProcess(engine))
        joined.engine.stats = lambda: Stats(generated_tokens=50)
        joined.restarts += 1
        assert totals() == expected
        engine.remove(joined)
        assert totals() == expected


def test_rejections_are_counted_by_reason_and_failures_are_none(engine):
    with serving(engine, "sk-1") as (base, service), httpx.Client(base_url=base) as http:

        def ask(prompt="a", key="sk-1", **fields):
            return http.post("/v1/completions", json={"prompt": prompt, **fields}, headers={"authorization": f"Bearer {key}"}).status_code

        assert [ask(key="sk-2"), ask(key="sk-3"), ask(n=-1), ask("full"), ask("late"), ask("boom")] == [401, 401, 400, 503, 504, 500]
        assert http.post("/v1/completions", headers={f"x-{i}": "1" for i in range(200)}).status_code == 431
        service.default.lifecycle.start_failed()
        assert ask() == 503
        service.default.lifecycle.drain()
        assert ask() == 503
        assert http.get("/ready", headers={"authorization": "Bearer sk-1"}).status_code == 503
        seen = by(text_of(service.default.metrics), "admission_rejections_total", "reason")
        # The full queue was the engine's: it counts that itself, as this one does not.
        assert seen == {
            "unauthorized": 2,
            "invalid": 1,
            "too_large": 1,
            "draining": 1,
            "not_ready": 1,
            "queue_full": 0,
            "tenant_limit": 0,
            "session_wait": 0,
            "upstream": 0,
        }
        with pytest.raises(KeyError):
            service.default.metrics.count_rejected("a reason that somebody made up")


@pytest.mark.parametrize(
    ("stats", "full"),
    [
        ({}, 0),
        ({"running": 4, "slots": 4, "total_blocks": 10, "free_blocks": 0, "saturation": 0.25}, 0.25),
        ({"running": 1, "slots": 4, "saturation": 1.5}, 1.5),
    ],
)
def test_saturation_is_the_engines(stats, full):
    assert by(text_of(Metrics("m", lambda: [replica(stats)])), "saturation", "engine") == {"0": full}


def test_the_caches_size_is_told(http, engine):
    engine.describe(num_kv_blocks=512, block_size=16)
    samples = [sample for family in text_string_to_metric_families(http.get("/metrics").text) for sample in family.samples]
    [info] = [sample for sample in samples if sample.name == "chairlift_cache_config_info"]
    assert (info.value, info.labels["num_gpu_blocks"], info.labels["block_size"]) == (1, "512", "16")


def test_vllms_names_have_the_same_values():
    metrics = Metrics("m", lambda: [replica({"running": 3, "generated_tokens": 40}, {"block_size": 16})], alias=True)
    metrics.latencies(Scheduling()).first_token.observe(0.3)
    metrics.count_rejected("draining")
    samples = [sample for family in text_string_to_metric_families(text_of(metrics)) for sample in family.samples]
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
    theirs = {key: value for key, value in values.items() if key[0].startswith("vllm:")}
    for (name, *labels), value in theirs.items():
        engine = [("engine", "0")] if "admission" in name else []
        assert values[name.replace("vllm:", "chairlift_"), *sorted([*labels, *engine])] == value
    common = ("engine", "0"), ("model_name", "m")
    assert theirs["vllm:num_requests_running", *common] == 3
    assert theirs["vllm:generation_tokens_total", *common] == 40
    assert theirs["vllm:time_to_first_token_seconds_bucket", common[0], ("le", "0.5"), common[1]] == 1
    assert theirs["vllm:admission_rejections_total", common[1], ("reason", "draining")] == 1
    assert "vllm:" not in text_of(Metrics("m", list))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_promtool_has_nothing_to_complain_of(http, engine):
    engine.describe(num_kv_blocks=512, block_size=16)
    engine.counters = {"tenants": {"alice": use(5)}, "classes": {0: use(5)}}
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    checked = subprocess.run(["promtool", "check", "metrics"], input=http.get("/metrics").content, capture_output=True, timeout=30)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def line_of(before, now):
    """The line about one engine's load in ten seconds."""
    return load_line({0: replace(before, slots=4)}, {0: replace(now, slots=4)}, 10)


def test_the_load_line_tells_of_swapping_and_preemption_with_a_remedy():
    before = Stats(running=1, preemptions=4)
    now = Stats(running=1, swapped=2, preemptions=7, preemptions_for_kv_blocks=3, total_blocks=8, free_blocks=8)
    assert line_of(before, now) == (
        "running 1, waiting 0, swapped 2, KV cache 0.0%, prefix hits 0.0%, prompt 0.0 tokens/s, generation 0.0 tokens/s, "
        "preemptions 3 (3 for KV blocks: raise --kv-cache-memory-bytes or lower --max-num-seqs)"
    )
    policy = Stats(running=1, preemptions=7, preemptions_for_priority=2, preemptions_for_fairness=1)
    reported = line_of(before, policy)
    assert reported is not None
    assert reported.endswith("preemptions 3 (2 for a higher priority, 1 for a tenant that has used less of its share)")
    assert line_of(Stats(), Stats(swapped=1)) is not None


def test_the_load_line_tells_rates_and_is_silent_when_idle():
    quiet = Stats(computed_prompt_tokens=100, generated_tokens=50)
    assert line_of(quiet, quiet) is None
    assert line_of(Stats(), Stats()) is None
    busy = replace(quiet, computed_prompt_tokens=300, generated_tokens=100, running=2, waiting=1, total_blocks=8, free_blocks=6)
    assert line_of(quiet, replace(busy, prefix_queries=4, prefix_hits=1)) == (
        "running 2, waiting 1, KV cache 25.0%, prefix hits 25.0%, prompt 20.0 tokens/s, generation 5.0 tokens/s"
    )
    assert "prefix hits 0.0%, cached without a state 48 tokens, prompt" in line_of(quiet, replace(busy, lost_hit_tokens=48))
    disk = replace(busy, disk_blocks_read=3, disk_blocks_written=20, disk_blocks_evicted=1)
    assert line_of(busy, disk).endswith("generation 0.0 tokens/s, KV blocks on disk: 3 read, 20 written, 1 evicted")
    assert "disk" not in line_of(disk, disk)
    assert line_of(busy, busy) is not None  # something runs, though nothing moves
    again = Stats(computed_prompt_tokens=20, generated_tokens=10, running=1)  # an engine that was started again
    assert "prompt 2.0 tokens/s, generation 1.0 tokens/s" in line_of(busy, again)
    other = replace(busy, slots=4), replace(busy, slots=4, generated_tokens=150)
    line = load_line({0: busy, 1: other[0]}, {0: replace(again, slots=4), 1: other[1]}, 10)
    assert "prompt 2.0 tokens/s, generation 6.0 tokens/s" in line, "the other engine is not counted from 0"


@pytest.mark.parametrize("body", ["in one piece", "in two pieces"])
def test_a_requests_clocks_start_at_its_first_byte(engine, body):
    content = b'{"prompt": "abc", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    message = head % len(content) + content
    cut = 10 if body == "in one piece" else len(message) - 5
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        with connected(base) as sock:
            took = []
            for _ in range(2):  # the second on a connection that has been idle, which is not the request's time
                began = time.monotonic()
                sock.sendall(message[:cut])
                time.sleep(0.2)
                sock.sendall(message[cut:])
                answer = b""
                while b'"usage"' not in answer:
                    answer += (part := sock.recv(65536))
                    assert part, answer
                took.append(time.monotonic() - began)
                time.sleep(0.4)
        seen = scrape(http)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert seen[f"{name}_sum"] > 0.2, name  # twice 0.2 s, less what a busy machine takes to read the first byte
    for spent, whole in zip(engine.spent, took, strict=True):
        assert spent.keys() == {"receive", "tokenize"}
        assert 0.1 < spent["receive"] <= sum(spent.values()) <= whole
