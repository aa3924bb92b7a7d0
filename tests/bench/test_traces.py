import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.bench import traces
from chairlift.bench.traces import TraceRequest, read
from chairlift.bench.workload import trace_jobs
from chairlift.errors import InvalidTrace
from chairlift.sim.run import ready, run
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

LIMITS = {"num_blocks": 101, "block_size": 16, "max_tokens": 512, "max_seqs": 16, "max_model_len": 1024}
"""Of a machine that refuses what is too long for it."""

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.500000+00:00,10,2
2024-05-12 00:00:02+00:00,20,3
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
5,GPT-4,100,0,100,API log
5,ChatGPT,12,7,19,Conversation log
45.0,ChatGPT,1087,230,1317,Conversation log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.5,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440111.0,d5983bf9,2,ChatGPT,36,29,65,Conversation log
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [46, 47, 48]},
    {"timestamp": 0, "input_length": 512, "output_length": 6, "hash_ids": [46]},
    {"timestamp": 0, "input_length": 700, "output_length": 7, "hash_ids": [46, 49]},
    {"timestamp": 5999, "input_length": 9, "output_length": 8, "hash_ids": [50]},
]
OURS = """\
arrival_s,prompt_tokens,output_tokens,hash_ids,client
1.5,600,44,7|8,alice
0.25,396,109,,
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "12345"}, {"from": "gpt", "value": "1234"}, {"from": "human", "value": "x"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "é"}, {"from": "gpt", "value": "123456789"}]},
]


@pytest.fixture
def trace(tmp_path):
    def write(text):
        path = tmp_path / "a_trace"
        path.write_text(text)
        return path

    return write


def lengths(requests):
    return [(request.arrival, request.prompt_tokens, request.output_tokens) for request in requests]


def test_azure(trace):
    first, second = read(trace(AZURE_2023))
    assert lengths([first]) == [(0.0, 4808, 10)]
    assert second.arrival == pytest.approx(0.052, abs=2e-6)
    assert lengths(read(trace(AZURE_2024))) == [(0.0, 10, 2), (1.5, 20, 3)]


def test_burstgpt_without_failures_and_with_its_seconds_spread(trace):
    assert lengths(read(trace(BURSTGPT))) == [(0.0, 472, 18), (0.5, 12, 7), (40.0, 1087, 230)]


def test_burstgpt_with_sessions_and_times_between_seconds(trace):
    requests = read(trace(BURSTGPT_3))
    assert lengths(requests) == [(0.0, 906, 446), (0.5, 36, 29)]
    assert [request.client for request in requests] == ["1722ac82", "d5983bf9"]


def test_mooncake_with_its_ticks_spread(trace):
    requests = read(trace("\n".join(map(json.dumps, MOONCAKE)) + "\n\n"))
    assert lengths(requests) == [(0.0, 1030, 5), (1.0, 512, 6), (2.0, 700, 7), (6.0, 9, 8)]
    assert requests[0] == TraceRequest(0.0, 1030, 5, (46, 47, 48))
    assert requests[0].hash_block == 512


def test_mooncake_with_times_on_no_ticks(trace):
    rows = [{"timestamp": at, "input_length": 5, "output_length": 5} for at in (1000, 1250, 3000)]
    requests = read(trace("\n".join(map(json.dumps, rows))))
    assert lengths(requests) == [(0.0, 5, 5), (0.25, 5, 5), (2.0, 5, 5)]
    assert requests[0].hash_ids is None


def test_a_burst_at_one_time_is_not_spread(trace):
    rows = [{"timestamp": 0, "input_length": 5, "output_length": 5}] * 3
    assert [request.arrival for request in read(trace("\n".join(map(json.dumps, rows))))] == [0.0, 0.0, 0.0]


def test_our_own(trace):
    requests = read(trace(OURS))
    assert requests == [TraceRequest(0.0, 396, 109), TraceRequest(1.25, 600, 44, (7, 8), "alice")]


def test_bursts_of_our_own_are_meant(trace):
    blocks = "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,5,5,1\n0,5,5,2\n3.001,5,5,3\n"
    assert [request.arrival for request in read(trace(blocks))] == [0.0, 0.0, 3.001]
    burst = "arrival_s,prompt_tokens,output_tokens\n0,5,5\n0,5,5\n3,5,5\n"
    assert [request.arrival for request in read(trace(burst))] == [0.0, 0.0, 3.0]


def test_sharegpt(trace):
    requests = read(trace(json.dumps(SHAREGPT, ensure_ascii=False)))
    assert [(request.prompt, request.prompt_tokens, request.output_tokens) for request in requests] == [("12345", 2, 1), ("é", 1, 3)]
    assert [request.prompt_tokens for request in read(trace(json.dumps(SHAREGPT)), tokens=len)] == [5, 1]


def test_gzip_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(("\ufeff" + OURS).encode()))
    assert lengths(read(path)) == [(0.0, 396, 109), (1.25, 600, 44)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "line 1: has the columns 'a,b'; expected a CSV file with the columns of Azure"),
        ("", "expected a CSV file"),
        (AZURE_2023 + "yesterday,1,2\n", "line 4: TIMESTAMP is 'yesterday', expected a time"),
        (BURSTGPT + "50,GPT-4\n", "line 6: Request tokens is missing"),
        (OURS + "2,many,3,,\n", "line 4: prompt_tokens is 'many', expected a whole number"),
        (OURS + "2,3,3,1|b,\n", "line 4: hash_ids is '1|b', expected numbers with | between them"),
        (OURS + "nan,3,3,,\n", "line 4: times must be finite, and at most 1e+09 s from the first, got nan s"),
        (OURS.replace("1.5", "inf"), "line 2: times must be finite"),
        (OURS + "1e30,3,3,,\n", "line 4: times must be finite, and at most 1e+09 s from the first, got 1e+30 s"),
        (OURS + "2,-3,3,,\n", "line 4: lengths must be from 0 to 10,000,000 tokens"),
        (OURS + "2,3,99999999999999999999,,\n", "line 4: lengths must be from 0 to 10,000,000 tokens"),
        (OURS + "2,3,3,-1,\n", "line 4: hash ids must be from 0 to 2**62"),
        ('arrival_s,"prompt', "line 1: is no CSV"),
        ('{"timestamp": Infinity, "input_length": 3, "output_length": 1}', "line 1: times must be finite"),
        ('{"timestamp": 1, "input_length": Infinity, "output_length": 1}', "line 1: input_length is inf, expected a whole number"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 1}', "line 1: input_length is 2.5, expected a whole number"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": "12"}', "line 1: hash_ids is '12', expected a list"),
        ('{"a":' * 100_000, "line 1: is JSON nested too deeply"),
        ("[" * 100_000, "is JSON nested too deeply"),
        ('[{"conversations": [{"value": null}, {"value": "a"}]}]', "conversation 1: expected `conversations`"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,0\n", "no request has a prompt and an output"),
        (json.dumps(MOONCAKE[0]) + "\n{'a': 1}\n", "line 2: is no JSON: Expecting property name enclosed in double quotes at column 2"),
        (json.dumps(MOONCAKE[0]) + "\n[1]\n", "line 2: expected a JSON object"),
        (json.dumps(MOONCAKE[0]) + '\n{"timestamp": 1, "input_length": 3}\n', "line 2: output_length is missing"),
        ('[\n{"id": 1},\n', "line 3: is no JSON"),
        ('[{"id": 1}]', "conversation 1: expected `conversations`, a list of turns with a `value`"),
    ],
)
def test_what_cannot_be_read_is_named(trace, text, says):
    with pytest.raises(InvalidTrace) as caught:
        read(trace(text))
    assert says in str(caught.value)
    assert "a_trace" in str(caught.value)


def test_a_missing_and_a_broken_file(tmp_path):
    with pytest.raises(InvalidTrace, match="No such file"):
        read(tmp_path / "none.csv")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress((OURS + "2,3,3,,\n" * 1000).encode())[:-12])
    with pytest.raises(InvalidTrace, match="cannot be read"):
        read(cut)
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(InvalidTrace, match="is not text"):
        read(tmp_path / "binary")


def test_times_may_be_negative_and_in_any_order(trace):
    assert lengths(read(trace("arrival_s,prompt_tokens,output_tokens\n2,1,1\n-3,2,2\n0,3,3\n"))) == [(0.0, 2, 2), (3.0, 3, 3), (5.0, 1, 1)]


PIECES = [
    *',\n\r"|{}[]:\0\ufeff',
    "\n",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 30,
    "2.5",
    "é",
    "\ud800",
    "null",
    "true",
    '"timestamp"',
    '"hash_ids"',
]
WHOLE = [AZURE_2023, BURSTGPT, BURSTGPT_3, "\n".join(map(json.dumps, MOONCAKE)), OURS, json.dumps(SHAREGPT)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(WHOLE), st.data(), st.booleans())
@pytest.mark.slow
def test_whatever_is_in_a_file_it_is_read_or_refused(tmp_path, whole, data, packed):
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        gone = data.draw(st.sampled_from([0, 1, 5, len(whole)]))
        whole = whole[:at] + data.draw(st.sampled_from(["", *PIECES]) | st.text(max_size=5)) + whole[at + gone :]
    content = whole.encode("utf-8", "surrogatepass")
    if packed:
        content = gzip.compress(content)[: data.draw(st.integers(1, 400))]
    (tmp_path / "a_trace").write_bytes(content)
    try:
        requests, reported = read(tmp_path / "a_trace"), ""
    except InvalidTrace as error:
        requests, reported = [], str(error)
    if reported:
        assert "a_trace" in reported
        assert "\n" not in reported
        return
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    workload = ready(Workload.of(requests), 2.0, 50)
    assert run(workload, LIMITS, StepTime.constant(10)).figures()["requests"] == 50
    for job in trace_jobs(requests):
        if job.text is None and job.prompt_tokens < 10_000:
            assert len(job.prompt().split()) == job.prompt_tokens


def test_estimated_tokens():
    assert [traces.estimated_tokens(text) for text in ("", "a", "abcd", "abcde")] == [0, 1, 1, 2]
