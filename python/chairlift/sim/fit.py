"""Steps that were timed, turned into what a step takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import InvalidSetting
from chairlift.sim.steps import Load, StepTime

ENOUGH = 32
"""Steps without which nothing can be said."""

_PER_KNOT = 12
"""Steps that a piece of the curve needs."""

_ROUNDS = 4
"""Fits, each without the steps that the one before could not explain."""


_STOOD_STILL = 4.0
"""So many times what a step should take says nothing of how long steps take."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What steps take, and the part by which a step differs from that at p50 and p90; `dropped` steps were held up by something else."""

    step: StepTime
    error_p50: float
    error_p90: float
    steps: int
    dropped: int


def fit(load: Load, took: NDArray[np.float64]) -> Fit:
    """Finds the steps' times by least squares of their relative errors, with no part below zero and a curve that never falls.

    Steps that took more than four of the usual deviations longer than told say nothing of what is dear in a step, and are left out, a few
    times over: something else held them up. In the end all parts are made so much larger that the steps' sum is right.
    Raises InvalidSetting for fewer than `ENOUGH` steps.
    """
    if len(took) < ENOUGH:
        raise InvalidSetting(f"{len(took)} steps were timed, and at least {ENOUGH} are needed: run for longer")
    load = Load(*(np.asarray(part, float) for part in load))
    tokens = load.prefill_tokens + load.decode_seqs
    knots = _knots(tokens)
    pieces = [
        np.clip(tokens - low, 0, None if high is None else high - low) for low, high in zip(knots, [*knots[1:-1], None], strict=False)
    ]
    attention = [load.decode_seqs, load.context_tokens, load.prefill_pairs]
    features = np.stack([np.ones_like(tokens), *pieces, *attention], axis=1)
    kept = np.ones(len(took), bool)
    for _ in range(_ROUNDS):
        weights = _least_squares(features[kept] / took[kept, None], np.ones(kept.sum()))
        over = took / np.maximum(features @ weights, 1e-9) - 1
        usual = 1.4826 * np.median(np.abs(over - np.median(over)))
        kept = over <= np.median(over) + max(4 * usual, 0.05)
    told = features @ weights
    # Latencies are sums of steps, so what held some of them up belongs to the mean of all; one that stood still does not.
    weights *= np.minimum(took, _STOOD_STILL * told).sum() / told.sum()
    slopes = weights[1 : 1 + len(pieces)]
    heights = weights[0] + np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    curve = tuple((float(knot), float(height)) for knot, height in zip(knots, heights, strict=True))
    step = StepTime(curve, *(float(weight) for weight in weights[1 + len(pieces) :]))
    errors = np.abs(step(load) / took - 1)
    return Fit(step, float(np.percentile(errors, 50)), float(np.percentile(errors, 90)), len(took), int((~kept).sum()))


def _knots(tokens: NDArray[np.float64]) -> list[float]:
    """Where the curve may bend: at powers of two, as long as there are steps enough between two."""
    knots, most = [1.0], float(tokens.max())
    at = 2.0
    while at < most:
        if ((tokens > knots[-1]) & (tokens <= at)).sum() >= _PER_KNOT and (tokens > at).sum() >= _PER_KNOT:
            knots.append(at)
        at *= 2
    return [*knots, max(most, knots[-1] + 1)]


def _least_squares(features: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights that are not negative, by an active set (Lawson and Hanson, 1974)."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    features = features / scale
    weights = np.zeros(features.shape[1])
    active = np.zeros(features.shape[1], bool)
    for _ in range(3 * features.shape[1]):
        gain = features.T @ (wanted - features @ weights)
        gain[active] = -np.inf
        best = int(np.argmax(gain))
        if gain[best] <= 1e-9 * len(wanted):
            break
        active[best] = True
        while True:
            found = np.zeros_like(weights)
            found[active] = np.linalg.lstsq(features[:, active], wanted, rcond=None)[0]
            if found[active].min() > 0:
                weights = found
                break
            low = active & (found <= 0)
            ratio = np.min(weights[low] / np.maximum(weights[low] - found[low], 1e-300))
            weights = weights + ratio * (found - weights)
            active &= weights > 1e-12
            weights[~active] = 0.0
            if not active.any():
                break
    result: NDArray[np.float64] = weights / scale
    return result
