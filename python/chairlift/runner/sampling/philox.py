"""Philox4x32-10: stateless random numbers from a key and a counter (Salmon et al., 2011)."""

from __future__ import annotations

import numpy as np

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Four random words [n, 4] (uint64 below 2**32) for uint64 keys [n] and counters [n]; the counter's upper two words are 0."""
    k0, k1 = key & _WORD, key >> _HALF
    c0, c1 = counter & _WORD, counter >> _HALF
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _WORD, (p0 >> _HALF) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return np.stack((c0, c1, c2, c3), -1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One fp64 number in [0, 1) per uint64 seed and non-negative position."""
    words = philox(seeds, positions.astype(np.uint64))
    bits: np.ndarray = (words[:, 0] << _HALF | words[:, 1]) >> np.uint64(11)
    return bits * 2.0**-53
