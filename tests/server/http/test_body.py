"""Bodies of requests: the time that they may take, and the limit on their objects, arrays and fields."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fast_forward import FastForward
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.errors import ApiError
from chairlift.server.http import body as bodies
from chairlift.server.http.bodies import Bodies

TEXTS = st.text(st.sampled_from('"\\[{:,a\n'), max_size=6)
VALUES = st.recursive(st.none() | TEXTS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5))


def num_values(value: Any) -> int:
    """Objects, arrays and fields of a parsed value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_values, value.values()))
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 0


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=5))
def test_the_limit_counts_values_and_not_what_strings_contain(value):
    raw = bytearray(json.dumps(value).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_VALUES", num_values(value))
        assert bodies.parse(raw) == value
        patch.setattr(bodies, "MAX_VALUES", num_values(value) - 1)
        with pytest.raises(ApiError, match=f"more than {num_values(value) - 1} objects, arrays and fields"):
            bodies.parse(raw)


@pytest.mark.parametrize("inside", ["[" * 200_000, '":' * 200_000, "\\[" * 200_000, '\\":' * 200_000])
def test_a_long_string_counts_as_no_value(inside):
    assert bodies.parse(bytearray(json.dumps({"a": inside}).encode())) == {"a": inside}


def received(rate, size=25_000_000):
    """Reads a body of so many bytes that arrives at so many bytes a second; returns its length and the seconds that passed."""

    async def stream():
        for _ in range(0, size, 10 * rate):
            await asyncio.sleep(10)
            yield bytes(10 * rate)

    state = SimpleNamespace(ticket=SimpleNamespace(tenant=SimpleNamespace(group="alice")))
    app = SimpleNamespace(state=SimpleNamespace(bodies=Bodies(2 * size)))
    request = SimpleNamespace(headers={}, app=app, state=state, stream=stream)
    with asyncio.Runner(loop_factory=FastForward) as runner:
        try:
            return len(runner.run(bodies.read_raw(request, 2 * size))), runner.get_loop().time()
        except ApiError as error:
            return error.status, runner.get_loop().time()


def test_a_body_may_take_as_long_as_it_goes_on_arriving():
    assert received(40_000) == (25_200_000, 630)
    assert received(1) == (408, pytest.approx(20, abs=0.01))
    slow = received(30_000)
    assert slow[0] == 408
    assert slow[1] <= 25_000_000 / bodies.BODY_RATE
