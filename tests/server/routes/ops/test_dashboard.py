import asyncio
import base64
import dataclasses
import hashlib
import io
import re
import struct
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console
from scripted_engine import CACHED, ScriptedEngine, ScriptedProcess
from server_here import serving, serving_models, timeline, wait_until

from chairlift.cli import top
from chairlift.engine.stats import COUNTERS, Stats
from chairlift.server.cache_miss import CacheMiss, MissReason
from chairlift.server.lifecycle import ModelState
from chairlift.server.model import ServedModel
from chairlift.server.observability import poller
from chairlift.server.observability.session_totals import MAX_ROWS, MAX_SESSIONS, SessionTotals
from chairlift.server.tiers import ServiceTiers, Tier

CHROMIUM = Path("/usr/bin/chromium")
ROW = {"slot": 1, "tag": 129, "tenant": "alice", "priority": 0, "tier": "flex", "state": "decode", "prompt_tokens": 5, "computed_tokens": 7}
ROW |= {"output_tokens": 3, "blocks": 2, "age_us": 1_500_000}
WAIT = {
    "tag": 257,
    "tenant": "bob",
    "priority": 0,
    "tier": "default",
    "state": "wait_blocks",
    "prompt_tokens": 9,
    "output_tokens": 0,
    "waited_us": 250_000,
}
STEP = {"planned_us": 4_000_000, "slots": " dp-", "tokens": 7, "waiting": 1, "admitted": [(2, 129)], "preempted": []}
CELLS = struct.pack("<8I", 0, 1, 2, 4, 4, 0, 0, 5)


def busy() -> ScriptedEngine:
    """An engine with something to see."""
    engine = ScriptedEngine()
    engine.snapshot = {"running": [ROW], "waiting": [WAIT], "waiting_by_tier": {}, "steps": [STEP], "kv_map": CELLS, "blocks_per_cell": 1}
    engine.snapshot |= {"now_us": 4_500_000, "names": [(129, "cmpl-abc"), (257, "cmpl-def")]}
    engine.looks = 0

    async def take_snapshot():
        engine.looks += 1
        steps = [{"step": engine.looks, **step} for step in engine.snapshot["steps"]]
        return {**engine.snapshot, "steps": steps, "stats": engine.stats().pack()}

    engine.one.take_snapshot = take_snapshot
    engine.counters = {"running": 1, "slots": 4, "waiting": 1, "total_blocks": 8, "free_blocks": 5, "waiting_by_state": {"wait_blocks": 1}}
    engine.counters |= {"steps": 10, "generated_tokens": 40, "tenants": {"bob": {}}, "prefix_queries": 4, "prefix_hits": 1}
    return engine


def seen_by(http, key):
    """What the page shows to the owner of a key."""
    return http.get("/dashboard/data", headers={"authorization": f"Bearer {key}"}).json()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(poller, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(poller, "SAMPLE_SECONDS", 0.02)


def test_what_there_is_is_told_with_the_names_of_requests(quick):
    with serving(busy()) as (base, _), httpx.Client(base_url=base) as http:
        http.post("/v1/completions", json={"prompt": "secret words", "max_tokens": 3})
        wait_until(lambda: http.get("/dashboard/data").json()["samples"])
        answer = http.get("/dashboard/data")
        state = answer.json()
        assert answer.headers["cache-control"] == "no-store"
        assert state["running"] == [{**ROW, "request": "cmpl-abc"}]
        assert state["waiting"] == [{**WAIT, "request": "cmpl-def"}]
        assert base64.b64decode(state["kv_map"]) == CELLS
        assert state["stats"]["waiting_by_state"] == {"wait_blocks": 1}
        assert (state["load"]["slots"], state["load"]["kv_cache"], state["load"]["saturation"]) == (0.25, 0.375, 0.0)
        assert {"tenants", "classes"}.isdisjoint(state["stats"])
        step = state["steps"][-1]
        assert (step["slots"], step["tokens"], step["waiting"], step["admitted"]) == (" dp-", 7, 1, [[2, 129]])
        assert abs(time.time() - 0.5 - step["time"]) < 30
        # The first token is timed once; the others lie between tokens.
        assert (state["latency"]["ttft"]["count"], state["latency"]["itl"]["count"]) == (1, 2)
        assert state["latency"]["window"] is None
        assert "secret" not in answer.text


def test_every_number_is_that_of_metrics_and_of_top(quick):
    engine = busy()
    numbers = {field.name: 1000 + at for at, field in enumerate(dataclasses.fields(Stats)) if field.type == "int"}
    sizes = {
        "running": 1,
        "slots": 4,
        "waiting": 1,
        "swapped": 0,
        "total_blocks": 8,
        "free_blocks": 5,
        "used_tokens": 30,
        "held_kv_slots": 48,
    }
    engine.counters = (
        numbers | sizes | {"host_blocks": 10, "free_host_blocks": 4, "saturation": 0.5, "waiting_by_state": {"wait_blocks": 1}}
    )
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        wait_until(lambda: http.get("/dashboard/data").json()["samples"])
        state, metrics = http.get("/dashboard/data").json(), http.get("/metrics").text
    found = dict(re.findall(r"^chairlift_(\w+){[^}]*model_name[^}]*} (\S+)$", metrics, re.MULTILINE))
    for metric, name, _ in COUNTERS:
        assert float(found[f"{metric}_total"]) == state["stats"][name] >= 1000, name
    shares = {"slots": "batch_slots", "kv_cache": "kv_cache", "swap": "swap", "fragmentation": "kv_cache_fragmentation"}
    for name, metric in shares.items():
        assert float(found[f"{metric}_usage_perc" if name != "fragmentation" else f"{metric}_perc"]) == state["load"][name] > 0
    assert float(found["saturation"]) == state["load"]["saturation"] == 0.5
    assert float(found["num_requests_running"]) == state["stats"]["running"] == len(state["running"])
    assert float(found["num_requests_waiting"]) == state["stats"]["waiting"] == len(state["waiting"])
    assert float(found["time_to_first_token_seconds_count"]) == state["latency"]["ttft"]["count"] == 1
    console = Console(file=io.StringIO(), width=160)
    console.print(top.frame(state, console))
    text = console.file.getvalue()
    assert "1 of 4 running, 1 waiting" in text
    for name, share in (("slots", 25), ("KV", 38), ("load", 50)):
        assert re.search(rf"^{name} .* {share}%  ", text, re.MULTILINE), text
    assert re.search(r"^wait_blocks +1 |  wait_blocks +1 ", text, re.MULTILINE)


def test_the_numbers_of_the_page_are_those_of_one_moment(quick, monkeypatch):
    """The engine counts on between two looks, and the page's counters would disagree with its requests."""
    engine = busy()
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        wait_until(lambda: http.get("/dashboard/data").json()["samples"])
        monkeypatch.setattr(poller, "POLL_SECONDS", 60.0)
        wait_until(lambda: (looks := engine.looks) and (time.sleep(0.05) or looks == engine.looks))
        engine.counters = {**engine.counters, "running": 0, "free_blocks": 8, "generated_tokens": 50}
        state = http.get("/dashboard/data").json()
        assert (state["stats"]["running"], state["load"]["kv_cache"], len(state["running"])) == (1, 0.375, 1)
        monkeypatch.setattr(poller, "IDLE_SECONDS", 0.0)


def test_a_tier_has_its_requests_its_latencies_and_its_targets(quick):
    engine = busy()
    engine.snapshot["waiting_by_tier"] = {"default": 70}
    del engine.counters["tenants"]
    with serving(engine, "alice=sk-1", operator_key="sk-2") as (base, service), httpx.Client(base_url=base) as http:
        service.tiers = ServiceTiers({**ServiceTiers().tiers, "flex": Tier(1, ttft_ms=1e6, itl_ms=1e-6)})

        def read(key):
            return http.get("/dashboard/data", headers={"authorization": f"Bearer {key}"})

        for tier in ("flex", "flex", "default"):
            body = {"prompt": "abc", "max_tokens": 3, "service_tier": tier}
            http.post("/v1/completions", json=body, headers={"authorization": "Bearer sk-1"})
        wait_until(lambda: read("sk-2").json()["latency"].get("ttft", {}).get("count") == 3)
        state = read("sk-2").json()
        default, flex = state["tiers"]
        metrics = http.get("/metrics", headers={"authorization": "Bearer sk-2"}).text
        assert read("sk-1").json()["tiers"] == []
    assert [(one["tier"], one["running"], one["waiting"]) for one in (default, flex)] == [("default", 0, 70), ("flex", 1, 0)]
    assert [one["latency"]["ttft"]["count"] for one in (default, flex)] == [1, 2]
    assert flex["targets"] == {"ttft": {"true": 2, "false": 0}, "itl": {"true": 0, "false": 2}}
    counted = re.findall(r'^chairlift_service_tier_targets_total{.*met="(\w+)".*target="(\w+)".*tier="(\w+)"} 2.0$', metrics, re.MULTILINE)
    assert sorted(counted) == [("false", "itl", "flex"), ("true", "ttft", "flex")]
    found = dict(re.findall(r'^chairlift_time_to_first_token_by_tier_seconds_count{.*tier="(\w+)"} (\S+)$', metrics, re.MULTILINE))
    assert [float(found[one["tier"]]) for one in (default, flex)] == [1, 2]
    console = Console(file=io.StringIO(), width=160)
    console.print(top.frame(state, console))
    assert re.search(r"^default +0 +70 +\S+ ms ", console.file.getvalue(), re.MULTILINE)


def test_the_numbers_of_a_session_are_those_of_usage_explanations_and_metrics(quick):
    engine = ScriptedEngine()
    times = {"states": timeline().states, "compute_seconds": timeline().compute_seconds}
    engine.shown = CACHED | {"timeline": times | {"draft_tokens": 5, "accepted_draft_tokens": 2}}
    with serving(engine, "alice=sk-1,bob=sk-2", operator_key="sk-3") as (base, _), httpx.Client(base_url=base) as http:
        usages, timelines = [], []
        for key, name, n in (("sk-1", "a", 1), ("sk-1", "a", 2), ("sk-2", "a", 1), ("sk-1", None, 1)):
            headers = {"authorization": f"Bearer {key}"} | ({} if name is None else {"x-session-id": name})
            made = http.post("/v1/completions", json={"prompt": "drafted words", "max_tokens": 3, "n": n}, headers=headers).json()
            if (key, name) == ("sk-1", "a"):
                usages.append(made["usage"])
                engine.timelines[made["id"]] = [timeline(tenant="alice")] * n
                timelines.append(http.get(f"/v1/requests/{made['id']}/explain", headers=headers).json()["sequences"])
        state = seen_by(http, "sk-3")
        own = seen_by(http, "sk-1")
        metrics = http.get("/metrics", headers={"authorization": "Bearer sk-3"}).text
    bob, alice = state["sessions"]
    assert [(one["session"], one["tenant"], one["turns"]) for one in (alice, bob)] == [("a", "alice", 2), ("a", "bob", 1)]
    assert [one["tenant"] for one in own["sessions"]] == ["alice"]
    assert alice["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert alice["output_tokens"] == sum(usage["completion_tokens"] for usage in usages) == 9
    assert alice["cached_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) == 2
    assert alice["waited_s"] == sum(max(one["states"]["wait_blocks"] for one in sequences) for sequences in timelines) == 3.0
    assert alice["compute_s"] == sum(one["compute_seconds"] for sequences in timelines for one in sequences) == 0.75
    # The metrics have each prompt once for each answer, and the request without a session too.
    generated = float(re.search(r"^chairlift_request_generation_tokens_sum{.*} (\S+)$", metrics, re.MULTILINE)[1])
    assert generated == alice["output_tokens"] + bob["output_tokens"] + 3
    console = Console(file=io.StringIO(), width=160)
    console.print(top.frame(state, console))
    assert re.search(r"^a +alice +2 +26 +8% +9 +3.00 s +0.0 ms +750.0 ms ", console.file.getvalue(), re.MULTILINE)


def test_cache_misses_are_told_by_reason_and_by_session(quick):
    misses = [CacheMiss(MissReason.HISTORY, 200, 500), CacheMiss(MissReason.TOOLS, 300, 500), CacheMiss(MissReason.HISTORY, 250, 500)]
    with serving(ScriptedEngine(), "alice=sk-1,bob=sk-2", operator_key="sk-3") as (base, service), httpx.Client(base_url=base) as http:
        counts = service.default.metrics
        read = partial(seen_by, http)
        assert read("sk-3")["cache_misses"] == []
        for miss in misses:
            counts.count_cache_miss(miss, "alice", "a")
        counts.count_cache_miss(CacheMiss(MissReason.EVICTED, 7, 500), "bob", None)
        headers = {"authorization": "Bearer sk-1", "x-session-id": "a"}
        http.post("/v1/completions", json={"prompt": "drafted words", "max_tokens": 3}, headers=headers)
        operator, alice, bob = map(read, ("sk-3", "sk-1", "sk-2"))
        metrics = http.get("/metrics", headers={"authorization": "Bearer sk-3"}).text
    rows = [(one["reason"], one["turns"], one["tokens"]) for one in operator["cache_misses"]]
    assert rows == [("history_edited", 2, 450), ("tools_changed", 1, 300), ("evicted", 1, 7)]
    assert operator["cache_misses"][0]["what"] == "an earlier message has changed"
    assert operator["cache_misses"][0]["advice"].startswith("return earlier messages")
    assert dict(re.findall(r'^chairlift_prompt_cache_missed_tokens_total{.*reason="(\w+)"} (\S+)$', metrics, re.MULTILINE)) == {
        reason: f"{tokens}.0" for reason, _, tokens in rows
    }
    [session] = alice["sessions"]
    assert (session["turns"], session["missed_for"]) == (1, {"history_edited": 450, "tools_changed": 300})
    assert (alice["cache_misses"], bob["cache_misses"], bob["sessions"]) == ([], [], [])
    console = Console(file=io.StringIO(), width=160)
    console.print(top.frame(operator, console))
    shown = console.file.getvalue()
    assert re.search(r"^history_edited +2 +450 +an earlier message has changed", shown, re.MULTILINE)
    assert re.search(r"^a +alice .* 750 history_edited *$", shown, re.MULTILINE)


def test_sessions_are_bounded_and_a_tenant_displaces_its_own():
    totals = SessionTotals()
    totals.add("bob", "b", 1, 0, 1, [])
    for number in range(3 * MAX_SESSIONS):
        totals.add("alice", str(number), 1, 0, 1, [])
    assert [row["session"] for row in totals.rows("bob")] == ["b"]
    assert [row["session"] for row in totals.rows(None)][:2] == [str(3 * MAX_SESSIONS - 1), str(3 * MAX_SESSIONS - 2)]
    assert len(totals.rows(None)) == MAX_ROWS
    totals.add("alice", str(MAX_SESSIONS * 3 - MAX_SESSIONS + 1), 1, 0, 1, [])
    assert totals.rows("alice")[0]["turns"] == 2, "the latest are kept"
    totals.add("alice", "0", 1, 0, 1, [])
    assert totals.rows("alice")[0]["turns"] == 1, "it was forgotten"


def test_only_news_is_told_of_steps_and_samples(quick):
    with serving(busy()) as (base, _), httpx.Client(base_url=base) as http:
        first = http.get("/dashboard/data").json()
        wait_until(lambda: http.get("/dashboard/data").json()["steps"][-1]["id"] > 5)
        newer = http.get("/dashboard/data", params={"step": 3, "sample": time.time() + 60}).json()
        assert [step["id"] for step in newer["steps"]][:2] == [4, 5]
        assert newer["samples"] == []
        assert first["steps"][0]["id"] == 1


def test_rates_are_those_of_the_counters_and_never_below_zero(quick, monkeypatch):
    engine = busy()
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        wait_until(lambda: http.get("/dashboard/data").json()["samples"])
        engine.counters = {**engine.counters, "generated_tokens": 1_000_040}
        wait_until(lambda: any(one["generation"] > 1000 for one in http.get("/dashboard/data").json()["samples"]))
        engine.counters = {**engine.counters, "generated_tokens": 3}  # it was started again
        after = http.get("/dashboard/data").json()["samples"][-1]["time"]
        set_back = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
        monkeypatch.setattr(poller, "time", set_back)  # the samples go on all the same
        wait_until(lambda: http.get("/dashboard/data", params={"sample": after}).json()["samples"])
        assert all(one["generation"] >= 0 for one in http.get("/dashboard/data").json()["samples"])


def test_the_engine_is_looked_at_only_while_somebody_watches(quick, monkeypatch):
    monkeypatch.setattr(poller, "IDLE_SECONDS", 0.05)
    engine = busy()
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        http.get("/live")
        assert engine.looks == 0
        wait_until(lambda: http.get("/dashboard/data").is_success and engine.looks > 1)
        seen = http.get("/dashboard/data").json()["steps"][-1]["id"]
        looking = [-1]

        def quiet():
            looking.append(engine.looks)
            time.sleep(0.2)
            return looking[-1] == engine.looks

        wait_until(quiet)
        # It goes on where it was when somebody comes back.
        assert http.get("/dashboard/data").json()["steps"][-1]["id"] > seen


def test_a_server_whose_engine_is_not_there_says_so_at_once():
    engine = busy()
    with serving(engine) as (base, _), httpx.Client(base_url=base) as http:
        engine.stop()
        state = http.get("/dashboard/data").json()
    assert (state["ready"], state["running"], engine.looks) == (False, [], 0)


def test_an_old_snapshot_is_not_shown_as_the_present(quick, monkeypatch):
    model = ServedModel("chat", engine := busy())

    async def main():
        await engine.start()
        snapshots = poller.SnapshotPoller(model, engine.replicas[0])
        assert len((await snapshots.state())["running"]) == 1
        monkeypatch.setattr(poller, "IDLE_SECONDS", 0.0)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await engine.one.close()
        assert (await snapshots.state())["running"] == []

    asyncio.run(main())


@pytest.mark.parametrize("query", ["step=x", "sample=y", "step=1.5"])
def test_a_question_that_makes_no_sense(query):
    with serving(busy()) as (base, _):
        assert httpx.get(f"{base}/dashboard/data?{query}").status_code == 400


def test_a_tenant_sees_its_own_requests_and_no_trace_of_others(quick):
    with serving(busy(), "alice=sk-1,bob=sk-2,sk-3", operator_key="sk-4") as (base, _), httpx.Client(base_url=base) as http:
        read = partial(seen_by, http)
        wait_until(lambda: read("sk-4")["samples"])
        operator, alice, bob, unnamed = map(read, ("sk-4", "sk-1", "sk-2", "sk-3"))
    assert (operator["running"][0]["request"], operator["waiting"][0]["request"]) == ("cmpl-abc", "cmpl-def")
    assert operator["steps"]
    assert (alice["running"], alice["waiting"]) == ([{**ROW, "request": "cmpl-abc"}], [])
    assert ROW["computed_tokens"] == ROW["prompt_tokens"] + ROW["output_tokens"] - 1
    assert (bob["running"], bob["waiting"]) == ([], [{**WAIT, "request": "cmpl-def"}])
    assert (alice["load"]["slots"], alice["load"]["kv_cache"], bob["load"]["slots"], bob["load"]["kv_cache"]) == (0.25, 0.25, 0, 0)
    assert bob["stats"]["waiting_by_state"] == {"wait_blocks": 1}
    for own in (alice, bob, unnamed):
        assert own.keys() == operator.keys(), "the page reads the same fields"
        assert (own["steps"], own["samples"], own["kv_map"], own["latency"]) == ([], [], "", {"window": None})
        assert (own["tiers"], own["replicas"]) == ([], [{"number": 0, "state": "ready"}])
        assert own["stats"].keys() == {"running", "waiting", "slots", "total_blocks", "free_blocks", "waiting_by_state"}
    # Except for the time, the unnamed key sees what it would see on an idle server.
    idle = {
        "running": [],
        "waiting": [],
        "stats": {**unnamed["stats"], "running": 0, "waiting": 0, "free_blocks": 8, "waiting_by_state": {}},
    }
    assert {name: unnamed[name] for name in idle} == idle
    assert [model["requests"] for model in unnamed["models"]] == [0]


def test_a_tenant_does_not_see_where_the_cached_part_of_its_prompt_ends():
    engine = busy()
    engine.snapshot["running"] = [ROW | {"output_tokens": 0, "computed_tokens": 4, "state": "prefill"}]
    with serving(engine, "alice=sk-1", operator_key="sk-4") as (base, _):
        rows = [
            httpx.get(f"{base}/dashboard/data", headers={"authorization": f"Bearer {key}"}).json()["running"] for key in ("sk-1", "sk-4")
        ]
    assert [[row["computed_tokens"] for row in seen] for seen in rows] == [[0], [4]]


def test_load_is_told_to_tenants_in_halves():
    engine = busy()
    engine.counters["saturation"] = 0.69
    with serving(engine, "alice=sk-1", operator_key="sk-4") as (base, _):
        load = [httpx.get(f"{base}/dashboard/data", headers={"authorization": f"Bearer {key}"}).json()["load"] for key in ("sk-1", "sk-4")]
    assert [one["saturation"] for one in load] == [0.5, 0.69]


def test_a_browser_may_send_the_key_as_a_password_and_to_these_pages_only():
    with serving(busy(), "sk-3") as (base, _):
        for path in ("/dashboard", "/dashboard/data"):
            refused = httpx.get(base + path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            assert httpx.get(base + path, auth=("anybody", "sk-4")).status_code == 401
            assert httpx.get(base + path, headers={"authorization": "Basic ###"}).status_code == 401
            assert httpx.get(base + path, auth=("anybody", "sk-3")).status_code == 200
            assert httpx.get(base + path, headers={"authorization": "Bearer sk-3"}).status_code == 200
        elsewhere = httpx.get(base + "/v1/models", auth=("anybody", "sk-3"))
        assert (elsewhere.status_code, elsewhere.headers["www-authenticate"]) == (401, "Bearer")


def test_the_page_needs_nothing_else_and_lets_nothing_else_run(http):
    answer = http.get("/dashboard")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        [body] = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
    assert not re.search(r"https?://|//[a-z]+\.|\bsrc=|@import|innerHTML|eval\(|\bstyle=", answer.text)


def test_the_page_has_words_for_all_states_of_a_model(http):
    [table] = re.findall(r"const SERVER_STATES = {(.*?)};", http.get("/dashboard").text, re.DOTALL)
    assert set(re.findall(r"(\w+): \"", table)) == {state.value for state in ModelState}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield running
        running.close()


# `wait_until` and not Playwright's own wait_for_function: that evaluates text within the page, whose policy forbids it.
COLOURS = """id => {
  const canvas = document.getElementById(id), pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] === 255) seen.add(pixels.slice(at, at + 3).join());
  return seen.size;
}"""


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_draws_the_page(browser, quick, scheme):
    engine = busy()
    with serving(engine, "sk-3") as (base, _):
        context = browser.new_context(color_scheme=scheme, http_credentials={"username": "any", "password": "sk-3"})
        page = context.new_page()
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{base}/dashboard")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_text("for KV blocks").first.wait_for()
        page.get_by_text("1 request; the longest has waited for 250 ms").wait_for()
        wait_until(lambda: page.evaluate("known.samples.length > 2 && known.steps.length > 20"))
        page.get_by_role("cell", name="def", exact=True).wait_for()
        page.get_by_role("cell", name="abc", exact=True).wait_for()
        assert page.get_by_text("25%").count()
        # Decodes, prompts, those held back, the ground, the steps and the queue below; and five kinds of blocks.
        assert page.evaluate(COLOURS, "batch") >= 6
        assert page.evaluate(COLOURS, "kv") >= 5
        box = page.locator("#batch").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 1.5 * page.evaluate("batch.tall"))
        wait_until(lambda: page.evaluate("document.getElementById('tip').textContent.includes('slot 1: decode')"))
        page.locator("#kv").scroll_into_view_if_needed()
        box = page.locator("#kv").bounding_box()
        page.mouse.move(box["x"] + 3.5 * page.evaluate("blocks.size"), box["y"] + 3)
        wait_until(lambda: page.evaluate("document.getElementById('tip').textContent.startsWith('block 4: held by slot 1\\ncmpl-abc')"))
        engine.counters = {**engine.counters, "waiting": 0, "waiting_by_state": {}}
        page.get_by_text("no request is waiting").wait_for()
        assert not page.get_by_text("Drafted tokens").count()
        engine.counters |= {"drafts": 100, "draft_tokens": 400, "accepted_draft_tokens": 150}
        page.get_by_text("400, 150 accepted (38%)").wait_for()
        page.get_by_text("2.50", exact=True).wait_for()
        assert all(url.startswith((base, "data:")) for url in requested)
        assert complaints == []
        context.close()


def test_models_engines_and_tiers_have_a_table_each_where_there_are_several(browser, quick):
    engine = busy()
    engine.snapshot["waiting_by_tier"] = {"default": 1}
    engine.add(ScriptedProcess(engine)).engine.stats = lambda: Stats(running=3, slots=4)
    with serving_models([ServedModel("chat", engine), ServedModel("other", ScriptedEngine())]) as (base, _):
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(f"{base}/dashboard")
        page.get_by_role("cell", name="flex").first.wait_for()

        def cells(table):
            rows = page.locator(f"#{table} tr").all()
            return [row.locator("td").all_inner_texts() for row in rows][1:]

        models = [(name, state, running, waiting) for name, state, _, running, waiting, _ in cells("models")]
        assert models == [("chat", "loaded", "1", "1"), ("other", "loaded", "0", "0")]
        assert cells("replicas") == [
            ["0", "ready", "this one", "1", "1", "25%", "38%", "0%", "0"],
            ["1", "ready", "this one", "3", "0", "75%", "0%", "0%", "0"],
        ]
        assert [row[:3] for row in cells("tiers")] == [["default", "0", "1"], ["flex", "1", "0"]]
        page.get_by_role("link", name="1", exact=True).click()
        page.get_by_text("3 of 4").wait_for()
        assert page.locator("#replicas b").inner_text() == "1"
        page.get_by_role("link", name="other").click()
        wait_until(lambda: page.locator("#models b").all_inner_texts() == ["other"])
        assert not page.get_by_role("heading", name="Engines").is_visible()
        page.close()


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_nothing_is_cut_off_at_any_width(browser, quick, width):
    with serving(busy()) as (base, _):
        body = {"prompt": "drafted words", "max_tokens": 3}
        for number in range(5):
            httpx.post(f"{base}/v1/completions", json=body, headers={"x-session-id": f"{number}<b>{'long-' * 40}"})
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(f"{base}/dashboard")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("heading", name="Sessions").wait_for()
        assert page.locator("#sessions tr").count() == 6
        assert page.locator("#sessions td").first.text_content().startswith("4<b>long-long")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # A table may be wider than its panel, which scrolls.
        outside = "[...document.querySelectorAll('section')].filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
        assert page.evaluate(outside) == []
        page.close()


def test_the_key_may_be_in_the_address(browser, quick):
    with serving(busy(), "sk-3") as (base, _):
        page = browser.new_page()
        page.goto(f"{base.replace('http://', 'http://any:sk-3@')}/dashboard")
        page.get_by_text("live", exact=True).wait_for()
        page.close()


def test_the_page_says_when_the_server_is_gone_and_when_it_is_back(browser, quick, monkeypatch):
    engine = busy()
    with serving(engine) as (base, _):
        page = browser.new_page()
        page.goto(f"{base}/dashboard")
        page.get_by_text("live", exact=True).wait_for()
        page.route("**/dashboard/data*", lambda route: route.abort())
        page.get_by_text("no connection: trying again").wait_for()
        page.unroute("**/dashboard/data*")
        page.get_by_text("live", exact=True).wait_for()
        monkeypatch.setattr(ScriptedProcess, "stuck", ("run", 12.0))
        page.get_by_text("the engine has been stuck for 12.0 s at stage run").wait_for()
        engine.stop()
        page.get_by_text("the engine is restarting").wait_for()
        page.close()
