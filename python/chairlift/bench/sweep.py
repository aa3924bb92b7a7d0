"""Finds the capacity of a server: the largest load that meets the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.bench.figures import Figures
from chairlift.bench.record import Run

DOUBLINGS = 20
"""The most times that a search doubles or halves the rate."""

MIN_REQUESTS = 32
"""The fewest requests at a rate for which percentiles are useful."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    load: float
    """Its rate in requests a second, or its concurrency."""
    run: Run
    figures: Figures
    meets: bool | None
    """Whether enough requests met the targets; None without targets."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {"load": self.load, "meets": self.meets, "notes": self.run.notes, **self.figures.to_json()}


def search(meets: Callable[[float], bool], start: float, steps: int, least: float = 0.0) -> float | None:
    """The largest rate for which `meets` is true, to a factor of 2^(1 / 2^steps); None if there is none.

    If `meets` is true for all rates that are tried, the highest of these.
    Doubles the rate from `start` until it is too high, or halves it until it is not or falls below `least`. Then bisects the interval
    `steps` times on a logarithmic scale.
    """
    low = high = None
    rate = start
    for _ in range(DOUBLINGS):
        if meets(rate):
            low = rate
            if high is not None:
                break
            rate *= 2
        else:
            high = rate
            if low is not None:
                break
            rate /= 2
            if rate < least:
                break
    if low is None or high is None:
        return low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def notes(points: Sequence[Point]) -> list[str]:
    """The notes on all runs, each with its load."""
    return [f"At {point.load:.3g}: {note}" for point in points for note in point.run.notes]


def knee(points: Sequence[Point]) -> Point | None:
    """The point of the largest load that meets the targets, if any."""
    return max((point for point in points if point.meets), key=lambda point: point.load, default=None)
