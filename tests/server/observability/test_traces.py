"""Traces, as an OTLP receiver gets them."""

import asyncio
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
from local_server import Handler, local_server
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, timeline, wait_until

from chairlift.errors import EngineDead
from chairlift.server.config import ServerConfig
from chairlift.server.observability import traces
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.observability.traces import Traces, check_installed
from chairlift.timeline import STATES

received = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs pip install 'chairlift[otel]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextmanager
def receiver():
    """Yields the URL for traces, and the spans that came."""
    spans = []

    class Take(Handler):
        def do_POST(self):
            for resource in received.ExportTraceServiceRequest.FromString(self.body()).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.reply()

    with local_server(Take) as url:
        yield f"{url}/v1/traces", spans


def values(span):
    """A span's attributes as plain values."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def sent(*timelines, about=None):
    """The spans of these timelines, as they arrive."""

    async def send(url):
        sender = Traces(url)
        for one in timelines:
            sender.send(one, MODEL, "cmpl-1", about)
        await sender.close()

    with receiver() as (url, spans):
        asyncio.run(send(url))
    return spans


def test_a_timeline_is_a_span_with_a_child_for_each_state_end_to_end():
    now = time.monotonic()
    states = {"decode": 0.25, "wait_blocks": 1.5, "swapped": 0.5, "prefill": 0.25}
    times = {"arrived": now - 2.5, "submitted": now - 2.5, "started": now - 1, "first_token": now - 0.75, "ended": now}
    spans = sent(timeline(states=states, tenant="alice", priority=-3, preemptions=1, swaps=1, **times), about=RequestContext("mine"))
    *children, span = sorted(spans, key=lambda one: (one.name == "llm_request", one.start_time_unix_nano))
    assert [child.name for child in children] == ["wait_blocks", "prefill", "swapped", "decode"]
    lengths = [(child.end_time_unix_nano - child.start_time_unix_nano) / 1e9 for child in children]
    assert lengths == pytest.approx([1.5, 0.25, 0.5, 0.25], abs=1e-6)
    assert all(child.parent_span_id == span.span_id and child.trace_id == span.trace_id for child in children)
    assert [one.end_time_unix_nano for one in children[:-1]] == [one.start_time_unix_nano for one in children[1:]]
    assert children[0].start_time_unix_nano == span.start_time_unix_nano
    assert abs(span.end_time_unix_nano - children[-1].end_time_unix_nano) < 2000
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 60
    [event] = span.events
    assert (event.name, round((event.time_unix_nano - span.start_time_unix_nano) / 1e9, 3)) == ("first_token", 1.75)
    reported = values(span)
    expected = {"gen_ai.request.model": MODEL, "gen_ai.response.id": "cmpl-1", "gen_ai.response.finish_reasons": ["length"]}
    expected |= {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 3, "chairlift.request_id": "mine"}
    expected |= {
        "chairlift.tenant": "alice",
        "chairlift.priority": -3,
        "chairlift.preemptions": 1,
        "chairlift.block_seconds": 0.5,
        "chairlift.compute_seconds": 0.25,
    }
    assert {name: reported[name] for name in expected} == expected
    assert reported["gen_ai.latency.time_in_queue"] == pytest.approx(1.5)
    assert reported["gen_ai.latency.time_to_first_token"] == pytest.approx(1.75)
    assert reported["gen_ai.latency.e2e"] == pytest.approx(2.5)


def test_every_state_has_its_place():
    spans = sent(timeline(states=dict.fromkeys(STATES, 0.01)))
    assert sorted(span.name for span in spans) == sorted([*STATES, "llm_request"])


def test_a_request_that_never_ran_and_one_that_goes_on():
    waits = {"started": None, "first_token": None, "states": {"wait_slots": 2.0}}
    spans = sent(timeline(finish="abort", **waits), timeline(finish=None, ended=None, **waits))
    whole = [span for span in spans if span.name == "llm_request"]
    assert [values(span)["gen_ai.response.finish_reasons"] for span in whole] == [["abort"], ["unknown"]]
    assert [len(span.events) for span in whole] == [0, 0]
    assert [round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 6) for span in whole] == [2, 2]


def test_requests_are_traced_under_their_callers_trace_however_they_end(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds between two exports
    with receiver() as (url, spans), serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base) as http:
        service.traces = Traces(url)

        def traced():
            return [span for span in spans if span.name == "llm_request"]

        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2, "n": 2}, headers=headers)
        wait_until(lambda: len(traced()) == 4)
        assert {span.trace_id.hex() for span in traced()} == {PARENT.split("-")[1]}
        assert {span.parent_span_id.hex() for span in traced()} == {PARENT.split("-")[2]}
        assert {values(span)["chairlift.request_id"] for span in traced()} == {"mine"}
        http.post("/v1/completions", json={"prompt": "boom", "max_tokens": 5})
        with http.stream("POST", "/v1/completions", json={"prompt": "paused", "max_tokens": 9, "stream": True}) as stream:
            next(stream.iter_raw())
        wait_until(lambda: len(traced()) == 6)
        alone = [span for span in traced() if not span.parent_span_id]
        assert len({span.trace_id for span in alone}) == 2
        # A caller who does not want this trace kept is heard.
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"traceparent": PARENT[:-1] + "0"})
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"traceparent": "nonsense"})
        wait_until(lambda: len(traced()) == 7)


def test_an_engine_that_has_ended_costs_the_trace_alone():
    class Ended(ScriptedEngine):
        async def explain(self, request_id):
            raise EngineDead("it ended")

    async def trace_request(url):
        follower = Traces(url)
        follower.trace_request(Ended(), MODEL, "cmpl-1", None)
        await follower.close()

    with receiver() as (url, spans):
        asyncio.run(trace_request(url))
    assert spans == []


def test_a_receiver_that_is_not_there_does_not_hold_up_the_servers_end(monkeypatch, caplog):
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT", 0.2)

    async def end():
        lost = Traces("http://127.0.0.1:1/v1/traces")
        lost.send(timeline(), MODEL, "cmpl-1", None)
        await asyncio.wait_for(lost.close(), 20)

    asyncio.run(end())
    assert "span" in caplog.text


def test_what_is_missing_or_wrong_is_said():
    with pytest.raises(ValueError, match="expected a URL like"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
    check_installed()
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from chairlift.errors import InvalidSetting\nfrom chairlift.server.observability.traces import check_installed\n"
        "try: check_installed()\nexcept InvalidSetting as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "--otlp-traces-endpoint needs OpenTelemetry: pip install 'chairlift[otel]'\n"
