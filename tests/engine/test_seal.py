"""A seal notices whatever is done to what passes between two machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.frames import BadFrame
from chairlift.engine.seal import TAG_BYTES, Seal

KEY = b"k" * 32
PARTS = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def sealed(parts):
    seal = Seal(KEY)
    return [seal.close(part) for part in parts]


def opened(parts, key=KEY):
    seal = Seal(key)
    return [seal.open(part) for part in parts]


@given(PARTS)
def test_what_was_sent_is_received(parts):
    assert opened(sealed(parts)) == parts
    assert {len(one) - len(part) for one, part in zip(sealed(parts), parts, strict=True)} == {TAG_BYTES}


@given(PARTS, st.data())
def test_a_flipped_bit_is_noticed(parts, data):
    sent = sealed(parts)
    at = data.draw(st.integers(0, len(sent) - 1))
    bit = data.draw(st.integers(0, 8 * len(sent[at]) - 1))
    sent[at] = (int.from_bytes(sent[at]) ^ 1 << bit).to_bytes(len(sent[at]))
    with pytest.raises(BadFrame, match="changed on its way"):
        opened(sent)


@given(PARTS, st.data())
def test_a_part_that_is_repeated_left_out_moved_or_cut_is_noticed(parts, data):
    sent = sealed([*parts, b"the last"])
    at = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.sampled_from([one for one in range(len(sent)) if one != at]))
    moved = [*sent]
    moved[at], moved[other] = sent[other], sent[at]
    for changed in ([*sent[: at + 1], *sent[at:]], [*sent[:at], *sent[at + 1 :]], moved, [*sent[:at], sent[at][:-1], *sent[at + 1 :]]):
        with pytest.raises(BadFrame):
            opened(changed)


def test_another_direction_has_another_key():
    with pytest.raises(BadFrame):
        opened(sealed([b"part"]), b"l" * 32)


def test_nothing_is_no_part():
    with pytest.raises(BadFrame):
        Seal(KEY).open(b"")
