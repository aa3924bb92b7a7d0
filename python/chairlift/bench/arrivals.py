"""Arrival processes, reproducible by seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` times in seconds at `rate` requests a second on average, the first at 0.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even, and infinity is
    constant. As in vLLM, the times are scaled to end at their mean, so that two seeds have the same load.
    """
    gaps = _gaps(itertools.repeat(rate, count), burstiness, seed)
    times = list(itertools.accumulate(gaps))
    total = times[-1] or 1.0  # very bursty gaps can all underflow to 0
    return [(time - times[0]) / total * (count / rate) for time in times]


def describe_gaps(burstiness: float) -> str:
    """The distribution of the gaps between arrivals, as text."""
    return "Poisson" if burstiness == 1 else f"gamma, burstiness {burstiness:g}"


def ramp(count: int, start: float, end: float, *, exponential: bool = False, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` times in seconds, the first at 0, while the rate goes from `start` to `end` requests a second, request by request."""
    last = max(count - 1, 1)

    def rate(index: int) -> float:
        return start * (end / start) ** (index / last) if exponential else start + (end - start) * index / last

    times = list(itertools.accumulate(_gaps(map(rate, range(count)), burstiness, seed)))
    return [time - times[0] for time in times]


def _gaps(rates: Iterable[float], burstiness: float, seed: int) -> list[float]:
    generator = random.Random(f"arrivals {seed}")
    if math.isinf(burstiness):
        return [1 / rate for rate in rates]
    return [generator.gammavariate(burstiness, 1 / (rate * burstiness)) for rate in rates]
