import json

import pytest

from chairlift.bench.client import StreamReader
from chairlift.bench.figures import Figures, Goodput, concurrency, mean_over_time, over_time
from chairlift.bench.http import Response
from chairlift.bench.measure import notes
from chairlift.bench.record import Record
from chairlift.bench.text_report import block
from chairlift.errors import InvalidSetting


def record(due, sent, times, tokens=None, failure="", **more):
    more.setdefault("end", times[-1] if times else sent)
    more.setdefault("requested_tokens", tokens or len(times))
    return Record(due, due, sent, times, prompt_tokens=10, output_tokens=len(times) if tokens is None else tokens, failure=failure, **more)


def answered(events, *, chat=False, status=200, began=100.0):
    """The record of a stream whose events come at 101, 102, ... by the clock, of a run that began at 100."""
    response, one = Response(), Record(0.0)
    response.status = status
    answer = StreamReader(one, chat=chat, started=began)
    for number, event in enumerate(events, 1):
        data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
        answer.feed(response, data, began + number)
    answer.finish(response)
    return one


def text(text, ended=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": ended}]}


def delta(delta, ended=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": ended}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
DONE = b"data: [DONE]\n\n"


def test_pieces_of_a_completion_and_what_the_server_counted():
    # A piece without text is a token of a character that is not whole; the last has an end and nothing else.
    one = answered([text("a"), text(""), text("bc"), text("", "length"), USAGE, DONE])
    assert one.times == [1.0, 2.0, 3.0]
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens, one.counted, one.ok) == (7, 9, 4, True, True)
    assert one.ttft == 1.0
    assert one.e2el == 3.0
    assert one.tpot == 2.0 / 8  # nine tokens in three pieces
    assert one.itls == [1.0, 1.0]


def test_a_chat_begins_with_its_first_token_not_with_its_role():
    one = answered(
        [delta({"role": "assistant", "content": ""}), delta({"content": "a"}), delta({"reasoning_content": "b"}), delta({}, "stop")],
        chat=True,
    )
    assert one.times == [2.0, 3.0]
    assert (one.output_tokens, one.counted) == (2, False)


def test_several_events_in_one_piece_come_at_once():
    both = b"".join(b"data: " + json.dumps(text(word)).encode() + b"\n\n" for word in "ab")
    assert answered([both, text("c", "stop")]).times == [1.0, 1.0, 2.0]


def test_failures_have_a_kind_and_the_servers_words():
    assert answered([b'{"error": {"message": "the queue is full"}}'], status=429).failure == "HTTP 429"
    assert answered([b'{"error": {"message": "the queue is full"}}'], status=429).detail == "the queue is full"
    assert answered([b'{"error": "no"}'], status=500).detail == "no"
    assert answered([b"<html>"], status=502).detail == "<html>"
    assert answered([text("a")]).failure == "cut off"
    assert answered([text("", "stop"), DONE]).failure == "no tokens"
    broken = answered([text("a"), {"error": {"message": "the engine has stopped", "code": 500}}, DONE])
    assert (broken.failure, broken.detail) == ("error in the stream", "the engine has stopped")


def test_latencies_count_from_when_a_request_was_due():
    late = record(due=1.0, sent=3.0, times=[4.0, 5.0])
    assert (late.ttft, late.e2el, late.lag) == (3.0, 4.0, 2.0)
    late.admitted = 2.5  # it waited for a free connection until then, which is not the client's slowness
    assert (late.ttft, late.lag) == (3.0, 0.5)
    found = Figures([late]).latencies
    assert found["ttft"].values == (3.0,)
    assert (found["lag"].values, found["wait"].values) == ((0.5,), (1.5,))


RUN = [
    record(0.0, 0.0, [0.1, 0.2, 0.4]),
    record(0.5, 0.5, [0.7, 0.9, 1.1, 1.3], tokens=7),
    record(1.0, 1.0, [1.3]),
    record(1.5, 1.5, [], failure="HTTP 429"),
    record(1.5, 1.6, [1.9], failure="connection lost", end=2.0),
]


def test_figures_to_the_digit():
    found = Figures(RUN, Goodput.parse(["ttft:200", "tpot:120"]))
    assert (found.requests, found.completed, found.failed) == (5, 3, 2)
    assert found.failures == {"HTTP 429": 1, "connection lost": 1}
    assert found.duration == 2.0
    assert (found.input_tokens, found.output_tokens) == (30, 11)
    assert found.latencies["ttft"].values == pytest.approx((0.1, 0.2, 0.3))
    assert found.latencies["ttft"].mean == pytest.approx(0.2)
    assert found.latencies["ttft"].std == pytest.approx((0.02 / 3) ** 0.5)
    assert found.latencies["ttft"].percentile(99) == pytest.approx(0.298)
    assert found.latencies["tpot"].values == pytest.approx((0.1, 0.15))  # a single token has none; seven tokens in 0.6 s
    assert found.latencies["itl"].values == pytest.approx((0.1, 0.2, 0.2, 0.2, 0.2))
    assert found.latencies["e2el"].values == pytest.approx((0.3, 0.4, 0.8))
    assert found.rate(found.completed) == 1.5
    assert found.peak_concurrency == 2
    assert found.peak_output_rate == pytest.approx(3 + 2 * 7 / 4)


def test_the_peak_is_of_a_second_as_in_vllm():
    one_by_one = [record(0.3 + at / 10, 0.3 + at / 10, [0.35 + at / 10]) for at in range(10)]
    long = record(0.9, 0.9, [1.0, 3.4])
    assert Figures(one_by_one).peak_concurrency == 10
    assert Figures([*one_by_one, long]).peak_concurrency == 11
    assert Figures([long, record(2.95, 2.95, [3.0])]).peak_concurrency == 2


def test_goodput_is_of_all_requests():
    # The first is good; the second's tokens are slow; the third's only token is late; two failed.
    found = Figures(RUN, Goodput.parse(["ttft:201", "tpot:99"]))
    assert (found.good, found.attainment) == (0, 0.0)
    found = Figures(RUN, Goodput.parse(["ttft:201", "tpot:151"]))
    assert (found.good, found.attainment, found.rate(found.good)) == (2, 0.4, 1.0)
    assert Figures(RUN, Goodput.parse(["tpot:151"])).good == 3  # one token has no time per token to miss
    assert Figures(RUN).good is None


@pytest.mark.parametrize("bad", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "latency:5", "ttft:x"])
def test_goodput_refuses(bad):
    with pytest.raises(InvalidSetting, match="expected pairs like ttft:500"):
        Goodput.parse([bad])


def test_a_run_of_failures_has_figures():
    found = Figures(RUN[3:], Goodput.parse(["ttft:1"]))
    assert (found.completed, found.good, found.latencies["ttft"].mean, found.peak_concurrency) == (0, 0, 0.0, 0)
    json.dumps(found.to_json())


def test_concurrency_over_time():
    assert concurrency([(0, 2), (1, 3), (2, 4), (5, 5)]) == ([0, 1, 2, 3, 4], [1, 2, 2, 1, 0])
    assert mean_over_time([(0.0, 1.0), (0.5, 2.0)], 1.0) == ([0.5, 1.5], [1.5, 1.0])
    assert mean_over_time([], 1.0) == ([], [])
    assert over_time([(0.1, 1.0), (0.9, 3.0), (2.5, 5.0)], 1.0, 50) == ([0.5, 2.5], [2.0, 5.0])


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     3         
Failed requests:                         2         
Maximum request concurrency:             4         
Request rate configured (RPS):           2.00      
Benchmark duration (s):                  2.00      
Total input tokens:                      30        
Total generated tokens:                  11        
Request throughput (req/s):              1.50      
Request goodput (req/s):                 1.00      
Output token throughput (tok/s):         5.50      
Peak output token throughput (tok/s):    6.50      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          20.50     
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00    
Median TTFT (ms):                        200.00    
P99 TTFT (ms):                           298.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          125.00    
Median TPOT (ms):                        125.00    
P99 TPOT (ms):                           149.50    
---------------Inter-token Latency----------------
Mean ITL (ms):                           180.00    
Median ITL (ms):                         200.00    
P99 ITL (ms):                            200.00    
"""


def test_the_block_is_vllms_line_for_line():
    shown = block(
        Figures(RUN, Goodput.parse(["ttft:201", "tpot:151"])), rate=2, max_concurrency=4, names=["ttft", "tpot", "itl"], percentiles=[99.0]
    )
    assert shown.startswith(BLOCK)
    assert shown.endswith("=" * 50)
    assert "Failed, HTTP 429:                        1" in shown
    assert "P99 lateness of sends (ms):              96.00" in shown


def test_the_block_shows_what_is_asked_for():
    shown = block(Figures(RUN), rate=None, max_concurrency=None, names=["e2el"], percentiles=[50.0, 99.9])
    assert "End-to-end Latency" in shown
    assert "P99.9 E2EL (ms):" in shown
    for absent in ("TTFT", "goodput", "Maximum request concurrency", "Request rate configured"):
        assert absent not in shown


def test_notes_say_what_disturbed_the_numbers():
    assert notes([record(0.0, 0.0, [1.0, 2.0])], 0.5) == []
    reported = " ".join(notes([record(0.0, 0.5, [1.0, 2.0], tokens=4, requested_tokens=8, cached_tokens=9, counted=False)], 0.95))
    for word in ("95% of a core", "500 ms", "usage", "2.0 tokens", "1 of 1 outputs are shorter", "90% of the prompt"):
        assert word in reported


def test_the_commonest_failure_is_told():
    refused = [record(0.0, 0.0, [], failure="HTTP 429", detail=f"try in {number} s") for number in (1, 2, 2)]
    (reported,) = notes(
        [*refused, record(0.0, 0.0, [], failure="timed out", detail="no end after\n2 s"), record(0.0, 0.0, [1.0, 2.0])], 0.5
    )
    assert reported == "4 of 5 requests failed, most often with HTTP 429: try in 2 s (see --save-detailed)."


def test_a_record_goes_through_json():
    assert Record(**json.loads(json.dumps(RUN[1].to_json()))) == RUN[1]
