"""What a request may ask for: each field within its bounds, and refused by its name beyond them."""

import math

import pytest

from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("priority", (-(2**31), 2**31 - 1), (-(2**31) - 1, 2**31, 1.0, True, "1", None)),
        ("tenant", ("", "a" * 128, "ä"), ("a" * 129, 5, None)),
        ("deadline_ms", (None, 1, 0.5, 1e10), (0, -1, 1e11, math.inf, math.nan, "5", True)),
        ("ttft_deadline_ms", (None, 1, 0.5), (0, -1, math.nan)),
        ("cache_salt", (None, "a", "a" * 256), ("", "a" * 257, b"a")),
        ("predicted_tokens", (None, 1, 2**31 - 1), (0, -1, 2**31, 1.5)),
    ],
)
def test_scheduling(field, good, bad):
    for value in good:
        assert getattr(Scheduling(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(InvalidRequest, match=field) as caught:
            Scheduling(**{field: value})
        assert caught.value.param == field


def test_as_many_answers_as_are_asked_for_and_no_fewer_are_drawn():
    assert (SamplingParams().num_sequences, SamplingParams().ranked) == (1, False)
    assert (SamplingParams(n=3).num_sequences, SamplingParams(n=3).ranked) == (3, False)
    assert (SamplingParams(n=3, best_of=3).num_sequences, SamplingParams(n=3, best_of=3).ranked) == (3, False)
    assert (SamplingParams(n=3, best_of=128).num_sequences, SamplingParams(n=3, best_of=128).ranked) == (128, True)
    for wrong in ({"n": 0}, {"n": 129}, {"n": 1.0}, {"n": True}):
        with pytest.raises(InvalidRequest, match="n must be an integer from 1 to 128"):
            SamplingParams(**wrong)
    for wrong in ({"n": 3, "best_of": 2}, {"n": 3, "best_of": 129}):
        with pytest.raises(InvalidRequest, match="best_of must be an integer from 3 to 128") as caught:
            SamplingParams(**wrong)
        assert caught.value.param == "best_of"
