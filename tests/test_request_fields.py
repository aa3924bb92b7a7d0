"""What a request may ask for: each field within its bounds, and refused by its name beyond them."""

import math

import msgpack
import pytest

from chairlift.engine.engine_request import EngineRequest
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
        ("cache_salt", (None, "a", "a" * 256), ("", "a" * 257, b"a", "\ud800")),
        ("predicted_tokens", (None, 1, 2**31 - 1), (0, -1, 2**31, 1.5)),
        ("session", (None, "a", "a" * 256), ("", "a" * 257, 5, "\ud800")),
        ("parent_session", (None, "a", "a" * 256), ("", "a" * 257, 5, "\ud800")),
        ("user_turn_end", (None, 0, 9), (-1, 2**31, 1.5, "1", True)),
    ],
)
def test_scheduling(field, good, bad):
    for value in good:
        assert getattr(Scheduling(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(InvalidRequest, match=field) as caught:
            Scheduling(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("min_tokens", (0, 16), (-1, 17, 1.5, True)),
        (
            "logit_bias",
            (None, {}, {0: -100.0, 5: 100}),
            ({-1: 0.0}, {"1": 0.0}, {1: 101.0}, {1: math.nan}, dict.fromkeys(range(1025), 1)),
        ),
        ("allowed_token_ids", (None, (0, 5)), ((), (-1,), (1.0,), ("a",), tuple(range(1025)))),
        (
            "bad_words",
            ((), ("a",) * 128, ("a" * 1024,) * 4, ((1, 2),) * 256, ((1,), "a")),
            (("a" * 1024,) * 5, ((1,) * 5000,) * 9, ("",), ("a",) * 129, ((),), (5,), ((-1,),), ("a\ud800",)),
        ),
        ("stop", ((), ("a",) * 16), (("",), ("a",) * 17, (5,), ("\udfff",))),
        ("logprobs", (None, 0, 20), (-1, 21, True, 1.5)),
        ("prompt_logprobs", (None, 0, 20), (-1, 21, True)),
    ],
)
def test_sampling(field, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


def test_what_comes_back_from_the_wire_is_what_went_out():
    params = SamplingParams(logit_bias={5: 1.0}, allowed_token_ids=(1, 2), bad_words=((1, 2), "a"), stop=("a",), logprobs=3)
    wire = msgpack.loads(msgpack.dumps(EngineRequest.of(1, [5], params).pack()), strict_map_key=False)
    assert EngineRequest.unpack(wire).sampling == params


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
