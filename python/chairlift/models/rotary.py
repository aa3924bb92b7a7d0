"""Rotary position embeddings: their frequencies, and the scalings for contexts longer than those of training. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Frequencies = np.ndarray[Any, np.dtype[np.float32]]
"""Radians per position for each pair of rotated numbers."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Divides all frequencies by `factor` (position interpolation: Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3: divides low frequencies by `factor`.

    Frequencies of fewer than `low` turns in `original` positions are divided, those of more than `high` are kept, and those between are
    interpolated.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., 2023): divides low frequencies by `factor`.

    Frequencies of fewer than `beta_slow` turns in `original` positions are divided, those of more than `beta_fast` are kept, and those
    between are interpolated. With `truncate` the ends of that range are whole pairs.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): a divisor for each frequency; `short` for up to `original` positions, `long` for more."""

    original: int
    short: tuple[float, ...]
    long: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Dynamic NTK: raises the base if sequences can be longer than `original` positions."""

    factor: float
    original: int


@dataclass(frozen=True, slots=True)
class Proportional:
    """Gemma 4: only the first `pairs` pairs of a head are rotated. All frequencies are divided by `factor`."""

    pairs: int
    factor: float = 1.0


Scaling = Linear | Llama3 | Yarn | LongRope | Dynamic | Proportional


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding of the first `dim` numbers of a head. Cosines and sines are multiplied by `scale`."""

    dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    scale: float = 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the longest sequence."""
        return isinstance(self.scaling, Dynamic) or (isinstance(self.scaling, LongRope) and self.scaling.short != self.scaling.long)

    def frequencies(self, longest: int) -> Frequencies:
        """Returns the frequencies of dim / 2 pairs, if no sequence has more than `longest` tokens.

        Cached keys stay rotated, so all sequences need the frequencies of the longest one, as in vLLM.
        """
        plain, scaling = _powers(self.dim, self.theta), self.scaling
        match scaling:
            case None:
                return plain
            case Linear():
                return plain / np.float32(scaling.factor)
            case Llama3():
                turns = plain * np.float32(scaling.original) / np.float32(2 * math.pi)
                kept = ((turns - np.float32(scaling.low)) / np.float32(scaling.high - scaling.low)).clip(0, 1)
                return _between(plain, kept, scaling.factor)
            case Yarn():
                return _between(plain, 1 - self._ramp(scaling), scaling.factor)
            case LongRope():
                divisors = scaling.long if longest > scaling.original else scaling.short
                return (plain / np.array(divisors, dtype=np.float32)).astype(np.float32)
            case Dynamic():
                stretch = scaling.factor * max(longest, scaling.original) / scaling.original - (scaling.factor - 1)
                return _powers(self.dim, self.theta * math.pow(stretch, self.dim / (self.dim - 2)))
            case Proportional():
                plain[scaling.pairs :] = 0
                return plain / np.float32(scaling.factor)

    def _ramp(self, scaling: Yarn) -> Frequencies:
        """How much of each frequency YaRN interpolates, from 0 to 1."""

        def pair_of(turns: float) -> float:
            return self.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        pairs = np.arange(self.dim // 2, dtype=np.float32)
        return ((pairs - np.float32(low)) / np.float32((high - low) or 0.001)).clip(0, 1)


def _powers(dim: int, theta: float) -> Frequencies:
    """theta ** (-2i / dim)."""
    # Rounded to fp32 at each step, as in transformers. The power alone is in fp64, because numpy's in fp32 depends on the processor.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)


def _between(plain: Frequencies, kept: Frequencies, factor: float) -> Frequencies:
    """The mean of frequencies and frequencies / factor, of which `kept` is the weight of the former."""
    return (plain * (kept + (1 - kept) / np.float32(factor))).astype(np.float32)
