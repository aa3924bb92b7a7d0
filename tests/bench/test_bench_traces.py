import gzip
import json

import pytest

from chairlift.bench import traces
from chairlift.bench.traces import TraceRequest, read
from chairlift.errors import InvalidTrace

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


def test_our_own(trace):
    requests = read(trace(OURS))
    assert requests == [TraceRequest(0.0, 396, 109), TraceRequest(1.25, 600, 44, (7, 8), "alice")]


def test_our_own_on_mooncakes_ticks_is_spread_but_a_burst_without_blocks_is_meant(trace):
    blocks = "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,5,5,1\n0,5,5,2\n3.001,5,5,3\n"
    assert [request.arrival for request in read(trace(blocks))] == [0.0, 1.5, 3.0]
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
        (OURS + "nan,3,3,,\n", "line 4: times must be finite, and lengths not negative"),
        (OURS + "2,-3,3,,\n", "line 4: times must be finite, and lengths not negative"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,0\n", "has no request with a prompt and an output"),
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


def test_estimated_tokens():
    assert [traces.estimated_tokens(text) for text in ("", "a", "abcd", "abcde")] == [0, 1, 1, 2]
