import pytest

from chairlift.bench.sweep import search


def tried(limit, start, steps):
    requested = []

    def meets(rate):
        requested.append(rate)
        return rate <= limit

    return search(meets, start, steps), requested


def test_it_doubles_and_then_looks_closer():
    found, requested = tried(5.0, 1.0, 2)
    assert requested == pytest.approx([1, 2, 4, 8, 32**0.5, (4 * 32**0.5) ** 0.5])
    assert found == pytest.approx((4 * 32**0.5) ** 0.5)


@pytest.mark.parametrize("limit", [0.3, 0.99, 1.0, 7.7, 1234.5])
def test_what_it_finds_is_as_near_as_the_steps_allow(limit):
    found, requested = tried(limit, 1.0, 5)
    assert found <= limit < found * 2 ** (1 / 32) * (1 + 1e-9)
    assert found in requested


def test_it_halves_where_it_begins_too_high():
    assert tried(0.3, 1.0, 0) == (0.25, [1.0, 0.5, 0.25])


def test_it_gives_up_where_nothing_is_little_enough_or_too_much():
    found, requested = tried(0.0, 1.0, 3)
    assert found is None
    assert len(requested) == 20
    found, requested = tried(1e9, 1.0, 3)
    assert found == requested[-1] == 2**19
