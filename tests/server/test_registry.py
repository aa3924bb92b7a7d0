"""What the server keeps of recent requests."""

import tracemalloc

import pytest

from chairlift.server.registry import MAX_REFUSALS, Refusal, RequestRegistry


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600"])
def test_a_refused_request_keeps_less_than_a_kilobyte(letter):
    registry = RequestRegistry()
    tracemalloc.start()
    try:
        for number in range(2 * MAX_REFUSALS):
            error = {"message": letter + "x" * 100_000, "type": "invalid_request_error", "param": "y" * 100_000, "code": "unsupported"}
            registry.add_refusal("t" * 64, f"{number:0128}", Refusal.of(400, error))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * MAX_REFUSALS * 1024


def test_an_explanation_has_the_beginning_of_a_long_message():
    short = Refusal.of(429, {"message": "wait for one to end", "code": None}).explanation("id")
    assert short["summary"] == "Refused with status 429: wait for one to end"
    long = Refusal.of(400, {"message": "é" * 1000, "code": "unsupported"}).explanation("id")
    assert long["refused"] == {"status": 400, "code": "unsupported", "message": "é" * 300}
    assert Refusal.of(400, {"message": "\ud800"}).explanation("id")["refused"]["message"] == "?"
