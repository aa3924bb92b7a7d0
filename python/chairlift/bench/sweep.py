"""Where a server is full: the same load at several rates, and the largest that still meets the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.bench.figures import Figures
from chairlift.bench.record import Run

DOUBLINGS = 20
"""How often a search doubles or halves the rate at most."""

FEWEST = 32
"""Requests at a rate, at least: percentiles of fewer say little."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    load: float
    """Its rate in requests a second, or its concurrency."""
    run: Run
    figures: Figures
    meets: bool | None
    """Whether enough requests met the targets; None where there are no targets."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"load": self.load, "meets": self.meets, "notes": self.run.notes, **self.figures.to_json()}


def search(meets: Callable[[float], bool], start: float, steps: int, least: float = 0.0) -> float | None:
    """The largest rate that `meets` says yes to, between neighbours that differ by 2^(1 / 2^steps); None if none does.

    Doubles from `start` until it is too much (or halves until it is not, or below `least`: a server may be too slow for any), and then
    halves the interval `steps` times on the logarithm's scale.
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
    """What a reader has to know about the runs, each note with its load."""
    return [f"At {point.load:.3g}: {note}" for point in points for note in point.run.notes]


def knee(points: Sequence[Point]) -> Point | None:
    """The point of the largest load that meets the targets, if any does."""
    return max((point for point in points if point.meets), key=lambda point: point.load, default=None)
