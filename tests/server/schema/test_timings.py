import pytest

from chairlift.outputs import Timing
from chairlift.server.usage import timing_metrics

NAMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


@pytest.mark.parametrize(
    ("timing", "tokens", "reported"),
    [
        (Timing(0.25, 0.5, 1.0, 3.0), 5, (1000.0, 2000.0, 250.0, 500.0, 2.0)),
        (Timing(0.0, 0.0, 0.25, 0.25), 1, (250.0, 0.0, 0.0, None, 4.0)),
        (Timing(0.5, 0.5, None, 0.5), 0, (None, None, 500.0, None, None)),  # it never ran
        (Timing(0.5, 0.5, 0.5, 0.5), 1, (500.0, 0.0, 500.0, None, None)),  # no time passed on that clock
    ],
)
def test_an_answers_timings(timing, tokens, reported):
    assert timing_metrics(timing, tokens) == dict(zip(NAMES, reported, strict=True))
