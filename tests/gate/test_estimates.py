"""What the gate makes of bodies, of answers and of an upstream's own pages."""

import asyncio
import contextlib
import json
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from cpu_cost import cost
from starlette.requests import Request

from chairlift.gate import held_bodies, limits
from chairlift.gate.admission import Admitted
from chairlift.gate.answer import Answer, UpstreamUsage
from chairlift.gate.estimates import MIN_SHARE, SHORT, Estimates
from chairlift.gate.gate import Gate
from chairlift.gate.held_bodies import HeldBodies
from chairlift.gate.limits import Limits
from chairlift.gate.model_files import VOCABULARY
from chairlift.gate.prompt import DATA_TOKENS, read_prompt
from chairlift.gate.upstream import Upstream, _socket, passed_on
from chairlift.server.errors import ApiError

TURN = [{"role": "user", "content": "Where is the café?"}]
ANSWERED = [*TURN, {"role": "assistant", "content": "There."}, {"role": "user", "content": "Thanks"}]


def prompt_of(**body):
    return read_prompt(json.dumps(body).encode()).tokens


def test_the_next_turn_continues_the_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = prompt_of(model="m", messages=TURN, tools=tools, temperature=0.5)
    second = prompt_of(temperature=1.0, tools=tools, messages=ANSWERED, model="m")
    assert first.dtype == np.int32
    assert 0 <= first.min() <= first.max() < VOCABULARY
    assert np.array_equal(second[: len(first)], first)
    assert len(second) > len(first)


@pytest.mark.parametrize("change", [{"model": "n"}, {"tools": []}, {"messages": [{"role": "system", "content": "x"}, *ANSWERED]}])
def test_what_changes_the_prefix_changes_the_prompt(change):
    body = {"model": "m", "messages": ANSWERED}
    assert not np.array_equal(prompt_of(**(body | change))[:8], prompt_of(**body)[:8])


def test_an_image_counts_as_a_few_tokens_and_is_known_again():
    def with_image(letter):
        return prompt_of(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + letter * 10**6}}]}])

    assert DATA_TOKENS < len(with_image("a")) < DATA_TOKENS + 50
    assert np.array_equal(with_image("a"), with_image("a"))
    assert not np.array_equal(with_image("a"), with_image("b"))


@pytest.mark.parametrize("field", ["messages", "parts", "prompt", "prompts", "system"])
def test_a_text_without_spaces_counts_in_full(field):
    text = "\u4f60\u597d" * 40_000  # 240,000 bytes
    part = {"type": "text", "text": text}
    body = {
        "messages": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": [part]}]},
        "prompt": {"prompt": text},
        "prompts": {"prompt": [text]},
        "system": {"system": text, "messages": TURN},
    }
    assert len(prompt_of(**body[field])) > 60_000


def test_prompts_that_share_nothing_at_the_upstream_share_nothing_here():
    for field, values in {"cache_salt": ("a", "b"), "chat_template_kwargs": ({"x": 1}, {"x": 2}), "documents": ([], [{}])}.items():
        first, second = (prompt_of(messages=ANSWERED, **{field: value})[:8] for value in values)
        assert not np.array_equal(first, second), field


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"messages": TURN}, 1),
        ({"messages": TURN, "n": 3}, 3),
        ({"messages": [TURN, ANSWERED], "n": 3}, 6),
        ({"prompt": "a", "n": 2, "best_of": 4}, 4),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [], "n": "x", "best_of": True}, 1),
        ({"messages": TURN, "n": 10**9}, 128),
        ({"messages": TURN, "n": -1}, 1),
    ],
)
def test_the_answers_of_a_request_are_counted(body, answers):
    assert read_prompt(json.dumps(body).encode()).answers == answers


@pytest.mark.parametrize("raw", [b"", b"no JSON", b"[1]", b'{"messages": 3}', b'{"messages": null}', b'{"prompt": "\\ud800"}', b"\xff"])
def test_any_body_has_a_prompt(raw):
    assert read_prompt(raw).tokens.dtype == np.int32


def test_a_token_id_is_a_token():
    short, long = (prompt_of(prompt=[100_000 + one for one in range(count)]) for count in (1000, 2000))
    assert len(short) == 1000
    assert np.array_equal(long[:1000], short)
    assert len(prompt_of(prompt=[-1, True, 1 << 40])) > 3


@pytest.mark.parametrize("element", ["[]", '{"a":1}', '""'])
def test_a_body_of_many_values_costs_little_and_is_a_prompt_as_it_stands(element):
    raw = f'{{"messages":[{",".join([element] * (1_900_000 // (len(element) + 1)))}]}}'.encode()
    assert cost(lambda: read_prompt(raw)) < 100
    prompt = read_prompt(raw)
    assert len(raw) // 5 < len(prompt.tokens) <= len(raw) // 4 + 1


def answer_with(*chunks, streamed=True):
    answer = Answer("text/event-stream" if streamed else "application/json", sent=time.monotonic())
    for chunk in chunks:
        answer.feed(chunk)
    return answer


def test_usage_of_each_api():
    usage = b'"usage":{"prompt_tokens":30,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":16}}'
    openai = answer_with(b'data: {"choices":[]}\n\n' * 5000, b'data: {"choices":[],' + usage + b"}\n\ndata: [DONE]\n\n")
    assert openai.usage == UpstreamUsage(30, 16, 4)
    start = b'data: {"type":"message_start","message":{"usage":{"input_tokens":5,"cache_read_input_tokens":20,"output_tokens":1}}}\n\n'
    anthropic = answer_with(start, b"data: {}\n\n" * 5000, b'data: {"type":"message_delta","usage":{"output_tokens":9}}\n\n')
    assert anthropic.usage == UpstreamUsage(25, 20, 9)
    ollama = answer_with(b'{"done":false}\n{"done":true,"prompt_eval_count":26,"eval_count":8}\n', streamed=False)
    assert ollama.usage == UpstreamUsage(26, None, 8)
    assert answer_with(b'{"usage":null,"text":"\\"usage\\": {"}', streamed=False).usage == UpstreamUsage()
    assert answer_with(b'data: {"usage":{"prompt_tokens":"x"}}\n\n' * 2).num_tokens == 2


@pytest.mark.parametrize("prompt", ["-1", "1e400", "true", "null", '"7"', "9" * 400, "9" * 5000, "[" * 10_000, '{"a":' * 3000])
def test_usage_that_cannot_be_is_none(prompt):
    assert answer_with(f'{{"usage":{{"completion_tokens":3,"prompt_tokens":{prompt}'.encode(), streamed=False).usage.prompt is None
    assert answer_with(f'{{"usage":{{"completion_tokens":3,"prompt_tokens":{prompt}}}}}'.encode(), streamed=False).usage.prompt is None


def test_more_cached_tokens_than_the_prompt_has_are_none():
    for cached, expected in ((7, 7), (8, None), (-1, None)):
        usage = f'{{"usage":{{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}'
        assert answer_with(usage.encode(), streamed=False).usage == UpstreamUsage(7, expected, 3)


def test_an_answer_that_calls_tools_is_known():
    assert answer_with(b'data: {"choices":[{"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n').calls_tools
    assert answer_with(b'data: {"delta":{"stop_reason":"tool_use"}}\n\n').calls_tools
    assert not answer_with(b'{"choices":[{"finish_reason":"stop","message":{"tool_calls":[]}}]}', streamed=False).calls_tools
    assert answer_with(b'{"message":{"tool_calls":[{"function":{"name":"f"}}]},"done_reason":"stop"}', streamed=False).calls_tools
    for kind in (b"function_call", b"custom_tool_call"):
        response = b'{"output":[{"type":"%s","name":"f"}],"tools":["%s"]}' % (kind, b"t" * (1 << 17))
        assert answer_with(*(response[at : at + 1000] for at in range(0, len(response), 1000)), streamed=False).calls_tools
    assert not answer_with(
        b'{"output":[{"text":"{\\"type\\":\\"function_call\\"}"}],"tools":[{"type":"function"}]}', streamed=False
    ).calls_tools


@pytest.mark.parametrize(
    "before",
    [
        b'event: response.created\ndata: {"type":"response.created","tools":"%s"}\n\n' % (b"t" * 500)
        + b"event: response.in_progress\ndata: {}\n\n",
        b'event: message_start\r\ndata: {"usage":{"input_tokens":5}}\r\n\r\nevent: ping\r\ndata: {}\r\n\r\n: waits\r\n\r\n',
    ],
)
def test_events_before_the_prompt_is_computed_are_not_the_first_token(before):
    for size in (1, 100, len(before)):
        answer = answer_with(*(before[at : at + size] for at in range(0, len(before), size)))
        assert (answer.ttft, answer.events) == (None, 0), size
        answer.feed(b"event: x\ndata: {}\n\n")
        assert answer.ttft is not None
        assert answer.events == 1
    assert answer_with(before + b"event: x\ndata: {}\n\n").ttft is not None


def test_each_line_of_an_ollama_stream_is_an_event():
    answer = Answer("application/x-ndjson", sent=time.monotonic())
    for _ in range(3):
        answer.feed(b'{"done":false}\n{"done":')
        answer.feed(b"false}\n")
    assert answer.ttft is not None
    assert answer.events == 6
    assert answer.between_tokens is not None


def test_an_upstream_that_finds_less_than_expected_counts_for_less():
    estimates = Estimates(16_000, 16, 4_000)
    assert estimates.frame().blocks == 1000
    bad = answer_with(b'{"usage":{"prompt_tokens":1000,"prompt_tokens_details":{"cached_tokens":0}}}', streamed=False)
    for _ in range(200):
        estimates.observe(bad, 1000, 900)
    assert estimates.frame().blocks == int(1000 * MIN_SHARE)
    good = answer_with(b'{"usage":{"prompt_tokens":1000,"prompt_tokens_details":{"cached_tokens":900}}}', streamed=False)
    for _ in range(400):
        estimates.observe(good, 1000, 900)
    assert estimates.frame().blocks == 1000


def test_tokens_are_counted_as_the_upstream_counts_them():
    estimates = Estimates(16_000, 16, 4_000)
    for _ in range(100):
        estimates.observe(answer_with(b'{"usage":{"prompt_tokens":500}}', streamed=False), 1000, 0)
    assert estimates.frame().blocks == pytest.approx(2000, rel=0.01)


def test_many_short_prompts_that_are_counted_wrongly_do_not_change_what_the_long_ones_need():
    estimates = Estimates(16_000, 16, 4_000)
    long, short = (answer_with(b'{"usage":{"prompt_tokens":%d}}' % tokens, streamed=False) for tokens in (4000, 10))
    for _ in range(100):
        estimates.observe(long, 4000, 0)
        for _ in range(20):
            estimates.observe(short, 15_000, 0)  # fields that the upstream ignores
    assert 1000 <= estimates.frame().blocks < 1200


def test_the_count_of_tokens_follows_what_is_sent_now():
    estimates = Estimates(16_000, 16, 4_000)
    answer = answer_with(b'{"usage":{"prompt_tokens":4000}}', streamed=False)
    for _ in range(1000):
        estimates.observe(answer, 4000, 0)
    for _ in range(200):
        estimates.observe(answer, 8000, 0)
    assert estimates.ratio > 1.9


def test_the_first_answer_replaces_what_was_assumed():
    estimates = Estimates(16_000, 16, 4_000)
    estimates.observe(answer_with(b'{"usage":{"prompt_tokens":500}}', streamed=False), 1000, 0)
    assert estimates.frame().blocks == 2000


def test_prompts_that_wait_for_each_other_at_the_upstream_are_not_taken_for_slow():
    alone, together = Estimates(16_000, 16, 4_000), Estimates(16_000, 16, 4_000)
    for number in range(1, 9):  # 4 ms a token
        alone.observe_first(100.0 * number, 100.0 * number + 4, 1000)
        together.observe_first(100.0, 100.0 + 4 * number, 1000)
    assert alone.frame().token_ns == pytest.approx(4_000_000, rel=1e-3)
    assert together.frame().token_ns == pytest.approx(4_000_000, rel=1e-3)


def test_prompts_that_are_computed_in_one_batch_share_its_time():
    estimates = Estimates(16_000, 16, 4_000)
    for number in range(100):
        for _ in range(2):
            estimates.observe_first(100.0 * number, 100.0 * number + 8, 1000)
    assert estimates.frame().token_ns == pytest.approx(4_000_000, rel=0.1)


def test_a_short_prompt_says_nothing_of_their_speed_but_ends_the_wait_of_the_next():
    estimates = Estimates(16_000, 16, 4_000)
    estimates.observe_first(100.0, 200.0, SHORT)
    assert estimates.frame() == Estimates(16_000, 16, 4_000).frame()
    estimates.observe_first(100.0, 204.0, 1000)
    assert estimates.frame().token_ns == pytest.approx(4_000_000, rel=1e-3)


def test_streams_that_wait_for_their_first_event_share_the_tokens_of_the_others(monkeypatch):
    clock = SimpleNamespace(now=50.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("chairlift.gate.estimates.time", clock)
    estimates = Estimates(16_000, 16, 4_000)
    streams = [Admitted(0, 1000, 0, on_first_token=lambda: None) for _ in range(4)]

    def paced(seconds):
        """The seconds between two tokens as the engine is told them, rounded."""
        clock.now += seconds
        return round(estimates.frame().step_us / 1e6, 3)

    with contextlib.ExitStack() as ended, contextlib.ExitStack() as running:
        assert paced(100) == 0.02, "nothing has run"
        for held in streams:
            (ended if held is streams[0] else running).enter_context(estimates.running(held))
        assert paced(1) == 1.0, "no event at all"
        streams[0].answer = answer_with(*[b"data: x\n\n"] * 50, streamed=True)
        assert paced(1) == pytest.approx((1 + 4 / 50) / 2)
        streams[0].answer.feed(b"data: x\n\n" * 50)
        clock.now += 1
        ended.close()
        clock.now += 1  # three of them run on
        assert paced(0) == pytest.approx((1 + 4 / 50 + 7 / 50) / 3, abs=1e-3)
        running.close()
        assert paced(100) == pytest.approx((1 + 4 / 50 + 7 / 50) / 3, abs=1e-3), "nothing runs"


def test_a_first_measurement_counts_fully_whatever_came_before():
    estimates = Estimates(16_000, 16, 4_000)
    for _ in range(50):  # answers without usage
        estimates.observe(answer_with(b"{}", streamed=False), 1000, 900)
    estimates.observe(
        answer_with(b'{"usage":{"prompt_tokens":500,"prompt_tokens_details":{"cached_tokens":0}}}', streamed=False), 1000, 900
    )
    assert estimates.ratio == 2.0
    assert estimates.share == 1.0


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n', Limits(1600)),
        (
            'chairlift_cache_config_info{block_size="32",num_gpu_blocks="10",max_model_len="99",max_num_seqs="7"} 1.0\n',
            Limits(320, 99, 7),
        ),
        ("sglang:max_total_num_tokens 5000.0\n", Limits(5000)),
        (
            "".join(
                f'chairlift_cache_config_info{{engine="{engine}",model_name="{model}",block_size="16",num_gpu_blocks="100",'
                f'max_model_len="99",max_num_seqs="8"}} 1.0\n'
                for model in "ab"
                for engine in range(4)
            ),
            Limits(6400, 99, 32),
        ),
        ('vllm:cache_config_info{block_size="None",num_gpu_blocks="-1"} 1.0\n', Limits()),
        ("<html>", Limits()),
    ],
)
def test_limits_are_read_from_metrics(page, expected):
    assert limits.of_metrics(page) == expected


def test_limits_are_read_from_the_pages_of_llama_cpp_and_sglang():
    assert limits.of_llama_cpp({"default_generation_settings": {"n_ctx": 2048}, "total_slots": 8}) == Limits(16384, 2048, 8)
    # Without --parallel there are four slots that share their KV.
    assert limits.of_llama_cpp({"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4}) == Limits(8192, 8192, 4)
    sglang = {"max_total_num_tokens": 9, "context_length": 8, "max_running_requests": 7}
    assert limits.of_sglang(sglang) == Limits(9, 8, 7)
    for odd in (None, [], {"data": [3]}, {"default_generation_settings": 3, "total_slots": "x"}, 7):
        assert limits.of_llama_cpp(odd) == limits.of_sglang(odd) == limits.of_models(odd) == Limits()


def test_headers_of_the_connection_stay_behind():
    headers = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"te", b"trailers"), (b"accept", b"*/*"), (b"host", b"h")]
    assert passed_on(headers) == [(b"accept", b"*/*")]


METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'


def limits_of(unavailable):
    """What the gate finds out about a server that answers 503 where `unavailable(path, asked)`, and the number of requests for it."""
    asked = 0

    async def answer(reader, writer):
        nonlocal asked
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        asked += 1
        status, body = (b"503 Service Unavailable", b'{"error":{"code":503}}') if unavailable(path, asked) else (b"200 OK", METRICS)
        writer.write(b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    async def ask():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                return await upstream.limits_when_ready()
            finally:
                await upstream.close()

    return asyncio.run(ask()), asked


def test_the_gate_waits_while_an_upstream_loads_its_model(monkeypatch):
    monkeypatch.setattr("chairlift.gate.upstream.PROBE_SECONDS", 0)
    found, asked = limits_of(lambda path, asked: asked <= 2)
    assert found == Limits(1600)
    assert asked > 2


@pytest.mark.parametrize(("missing", "expected"), [(b"/props", Limits(1600)), (b"/metrics", Limits())])
def test_a_page_that_is_unavailable_for_good_is_not_waited_for(missing, expected):
    assert limits_of(lambda path, asked: path == missing)[0] == expected


def test_an_upstream_may_be_silent_but_not_gone():
    with _socket((socket.AF_INET, socket.SOCK_STREAM, 0)) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_keep_alive_works_with_the_names_that_macos_has(monkeypatch):
    idle = socket.TCP_KEEPIDLE
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", idle, raising=False)
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    with _socket((socket.AF_INET, socket.SOCK_STREAM, 0)) as made:
        assert made.getsockopt(socket.IPPROTO_TCP, idle) == 60


def test_the_engine_is_told_once_when_a_streamed_answer_begins():
    def calls(content_type):
        """The number of calls after each part of an answer."""
        called, counts = [], []

        parts = AsyncMock(side_effect=(b": keep-alive\n\n", b"data: 1\n\n", b"data: 2\n\n", b""))

        @asynccontextmanager
        async def request(*_):
            content = SimpleNamespace(readany=parts)
            yield SimpleNamespace(content_type=content_type, status=200, raw_headers=(), headers={}, connection=None, content=content)

        async def send(_):
            counts.append(len(called))

        gate = Gate(None, [SimpleNamespace(request=request)], [], keyed=False)
        state = {"raw_send": send, "context": SimpleNamespace(request_id="r")}
        scope = {"type": "http", "method": "POST", "raw_path": b"/v1", "query_string": b"", "headers": [], "state": state}
        held = Admitted(0, 10, 0, on_first_token=lambda: called.append(1))
        asyncio.run(gate._pass(Request(scope), bytearray(), send, 0, held))  # noqa: SLF001
        return counts

    assert calls("text/event-stream") == [0, 0, 1, 1, 1], "a comment comes before the prompt is computed"
    assert calls("application/json") == [0, 0, 0, 0, 0]


def test_bodies_that_wait_leave_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(held_bodies, "MAX_HELD_BYTES", 100)
    held, sent = HeldBodies(), bytearray(20)
    with held.holding("a", sent), held.holding("a", bytearray(20)):
        with held.holding("b", bytearray(30)), pytest.raises(ApiError, match="waiting"), held.holding("a", bytearray(1)):
            pass
        with pytest.raises(ApiError), held.holding("a", bytearray(21)):
            pass
        sent.clear()
        with held.holding("a", bytearray(60)):
            pass
    with held.holding("a", bytearray(100)):
        pass


def test_a_body_is_dropped_when_the_upstream_answers():
    @asynccontextmanager
    async def request(*_):
        yield SimpleNamespace(
            content_type="application/json",
            status=200,
            raw_headers=(),
            headers={},
            connection=None,
            content=SimpleNamespace(readany=AsyncMock(side_effect=(b"{}", b""))),
        )

    async def send(_):
        seen.append(len(raw))

    seen, raw = [], bytearray(b"a long body")
    gate = Gate(None, [SimpleNamespace(request=request)], [], keyed=False)
    state = {"raw_send": send, "context": SimpleNamespace(request_id="r")}
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1", "query_string": b"", "headers": [], "state": state}
    asyncio.run(gate._pass(Request(scope), raw, send, 0, None))  # noqa: SLF001
    assert seen == [0, 0, 0]


def test_a_new_engine_is_told_what_was_learned(monkeypatch):
    told = []
    replica = SimpleNamespace(number=0, restarts=0, engine=SimpleNamespace(ready=True, tell=told.append))
    gate = Gate(SimpleNamespace(engine=SimpleNamespace(replicas=[replica])), [], [Estimates(1000, 16, 100)], keyed=False)
    monkeypatch.setattr("chairlift.gate.gate.TELL_SECONDS", 0)

    async def restart():
        telling = asyncio.create_task(gate.tell())
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(told) == 1
        replica.restarts += 1
        for _ in range(5):
            await asyncio.sleep(0)
        telling.cancel()

    asyncio.run(restart())
    assert len(told) == 2
