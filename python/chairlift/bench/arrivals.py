"""When requests come: arrival processes, the same for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` times in seconds at `rate` requests a second on average, the first at 0.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even, infinity is
    a metronome. The times are stretched to end where they should on average, so that two seeds offer the same load (as in vLLM).
    """
    gaps = _gaps(itertools.repeat(rate, count), burstiness, seed)
    times = list(itertools.accumulate(gaps))
    whole = times[-1] or 1.0  # very bursty gaps may all be too short for a number
    return [(time - times[0]) / whole * (count / rate) for time in times]


def gaps_in_words(burstiness: float) -> str:
    """How the gaps between arrivals are spread, in words."""
    return "Poisson" if burstiness == 1 else f"gamma, burstiness {burstiness:g}"


def ramp(count: int, start: float, end: float, *, exponential: bool = False, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` times in seconds, the first at 0, while the rate goes from `start` to `end` requests a second, request by request."""
    last = max(count - 1, 1)

    def rate(index: int) -> float:
        return start * (end / start) ** (index / last) if exponential else start + (end - start) * index / last

    times = list(itertools.accumulate(_gaps(map(rate, range(count)), burstiness, seed)))
    return [time - times[0] for time in times]


def _gaps(rates: Iterable[float], burstiness: float, seed: int) -> list[float]:
    draw = random.Random(f"arrivals {seed}")
    if math.isinf(burstiness):
        return [1 / rate for rate in rates]
    return [draw.gammavariate(burstiness, 1 / (rate * burstiness)) for rate in rates]
