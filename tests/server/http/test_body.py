"""Bodies of requests: the limit on their objects, arrays and fields."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.errors import ApiError
from chairlift.server.http import body as bodies

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
