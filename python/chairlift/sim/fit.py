"""Fits a model of step times to measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import InvalidSetting
from chairlift.sim.steps import Load, StepTime

MIN_STEPS = 32
"""The fewest steps that can be fitted."""

_STEPS_PER_KNOT = 12
"""The fewest steps for a segment of the curve."""

_ROUNDS = 4
"""Rounds of fitting, each without the outliers of the round before."""

_STALL_FACTOR = 4.0
"""The measured time of a step counts up to this multiple of its predicted time."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A model of step times, the relative error of its predictions at p50 and p90, and the number of outliers among the steps."""

    step: StepTime
    error_p50: float
    error_p90: float
    steps: int
    outliers: int


def fit(load: Load, measured: NDArray[np.float64]) -> Fit:
    """Fits step times by least squares of relative errors, with non-negative parts and a curve that never falls.

    Outliers, steps that measured more than four deviations longer than predicted, are left out of the next round of the fit. At the end all
    parts are scaled so that the predicted total is the measured one. Raises InvalidSetting for fewer than `MIN_STEPS` steps.
    """
    if len(measured) < MIN_STEPS:
        raise InvalidSetting(f"only {len(measured)} steps were measured, at least {MIN_STEPS} are needed: run for longer")
    load = Load(*(np.asarray(part, float) for part in load))
    tokens = load.prefill_tokens + load.decode_seqs
    knots = _knots(tokens)
    pieces = [
        np.clip(tokens - low, 0, None if high is None else high - low) for low, high in zip(knots, [*knots[1:-1], None], strict=False)
    ]
    attention = [load.decode_seqs, load.context_tokens, load.prefill_pairs]
    features = np.stack([np.ones_like(tokens), *pieces, *attention], axis=1)
    used = np.ones(len(measured), bool)
    for _ in range(_ROUNDS):
        weights = _least_squares(features[used] / measured[used, None], np.ones(used.sum()))
        excess = measured / np.maximum(features @ weights, 1e-9) - 1
        deviation = 1.4826 * np.median(np.abs(excess - np.median(excess)))
        used = excess <= np.median(excess) + max(4 * deviation, 0.05)
    predicted = features @ weights
    # Latencies are sums of steps, so ordinary delays belong to the mean. A machine that was suspended does not: it is capped.
    weights *= np.minimum(measured, _STALL_FACTOR * predicted).sum() / predicted.sum()
    slopes = weights[1 : 1 + len(pieces)]
    heights = weights[0] + np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    curve = tuple((float(knot), float(height)) for knot, height in zip(knots, heights, strict=True))
    step = StepTime(curve, *(float(weight) for weight in weights[1 + len(pieces) :]))
    errors = np.abs(step(load) / measured - 1)
    return Fit(step, float(np.percentile(errors, 50)), float(np.percentile(errors, 90)), len(measured), int((~used).sum()))


def _knots(tokens: NDArray[np.float64]) -> list[float]:
    """The knots of the curve: powers of two, with enough steps between them."""
    knots, largest = [1.0], float(tokens.max())
    at = 2.0
    while at < largest:
        if ((tokens > knots[-1]) & (tokens <= at)).sum() >= _STEPS_PER_KNOT and (tokens > at).sum() >= _STEPS_PER_KNOT:
            knots.append(at)
        at *= 2
    return [*knots, max(largest, knots[-1] + 1)]


def _least_squares(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares by an active set (Lawson and Hanson, 1974)."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    features = features / scale
    weights = np.zeros(features.shape[1])
    active = np.zeros(features.shape[1], bool)
    for _ in range(3 * features.shape[1]):
        gain = features.T @ (target - features @ weights)
        gain[active] = -np.inf
        best = int(np.argmax(gain))
        if gain[best] <= 1e-9 * len(target):
            break
        active[best] = True
        while True:
            solution = np.zeros_like(weights)
            solution[active] = np.linalg.lstsq(features[:, active], target, rcond=None)[0]
            if solution[active].min() > 0:
                weights = solution
                break
            low = active & (solution <= 0)
            ratio = np.min(weights[low] / np.maximum(weights[low] - solution[low], 1e-300))
            weights = weights + ratio * (solution - weights)
            active &= weights > 1e-12
            weights[~active] = 0.0
            if not active.any():
                break
    result: NDArray[np.float64] = weights / scale
    return result
