"""Figures of groups of requests: by tenant, session and tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

STOP, LENGTH, ERROR, DEADLINE, ABORT = 1, 2, 3, 4, 5
"""Values of the column `finish`."""

GROUPS = ("tenant", "session", "tier")
"""What requests can be grouped by."""

PROMPT_TOKEN, OUTPUT_TOKEN = 1, 2
"""The service of a computed prompt token and of an output token, as in VTC (Sheng et al., OSDI'24)."""


def figures(requests: NDArray[Any]) -> dict[str, float | None]:
    """The figures of some requests, with times in seconds. None is unknown.

    `requests` has the columns finish, arrived, first_token, ended (in microseconds), prompt_tokens, cached_tokens, output_tokens and
    preemptions. `completion_s` is from the first arrival to the last end.
    """
    started = requests[requests["first_token"] >= 0]
    prompt = int(started["prompt_tokens"].sum())
    cached = int(started["cached_tokens"].sum())
    return {
        "requests": len(requests),
        "finished": len(finished(requests)),
        **percentiles("ttft", ttft(requests), 50, 99),
        **percentiles("time_per_output_token", tpot(requests), 50, 99),
        **percentiles("end_to_end", e2e(requests), 50, 99),
        "completion_s": float(requests["ended"].max() - requests["arrived"].min()) / 1e6 if len(requests) else None,
        "output_tokens": int(requests["output_tokens"].sum()),
        "service": PROMPT_TOKEN * (prompt - cached) + OUTPUT_TOKEN * int(requests["output_tokens"].sum()),
        "cached_share": cached / prompt if prompt else None,
        "preemptions": int(requests["preemptions"].sum()),
    }


def finished(requests: NDArray[Any]) -> NDArray[Any]:
    """The requests that finished by a stop condition or their length."""
    return requests[np.isin(requests["finish"], (STOP, LENGTH))]


def ttft(requests: NDArray[Any]) -> NDArray[np.float64]:
    """Seconds to the first token, for each request that got one."""
    answered = requests[requests["first_token"] >= 0]
    return np.asarray((answered["first_token"] - answered["arrived"]) / 1e6)


def tpot(requests: NDArray[Any]) -> NDArray[np.float64]:
    """Mean seconds between two tokens, for each request that finished with more than one."""
    done = finished(requests)
    several = done[done["output_tokens"] > 1]
    return np.asarray((several["ended"] - several["first_token"]) / (several["output_tokens"] - 1) / 1e6)


def e2e(requests: NDArray[Any]) -> NDArray[np.float64]:
    """Seconds from arrival to end, for each request that finished."""
    done = finished(requests)
    return np.asarray((done["ended"] - done["arrived"]) / 1e6)


def grouped(requests: NDArray[Any], labels: NDArray[Any]) -> dict[str, dict[str, float | None]]:
    """The figures of the requests of each label, sorted by label. Requests with an empty one are one group."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    parts = np.split(requests[order], starts)[1:]
    return {str(name): figures(part) for name, part in zip(names, parts, strict=True)}


def jain(amounts: Sequence[float]) -> float | None:
    """Jain's index of fairness: 1 if all amounts are equal, 1/n if one has all. None without amounts."""
    squares = len(amounts) * sum(amount**2 for amount in amounts)
    return sum(amounts) ** 2 / squares if squares else None


def service_gap(
    service: Mapping[str, NDArray[np.int64]], window: float, tenants: NDArray[Any], requests: NDArray[Any], weights: Mapping[str, float]
) -> float:
    """The largest difference of two tenants' service, divided by their weights, in any interval in which both have waiting requests.

    The intervals consist of windows of `window` seconds. VTC bounds this by twice the larger of the longest prompt and the service of a
    full batch of outputs (Sheng et al., OSDI'24, theorem 4.4).
    """
    size = max((len(values) for values in service.values()), default=0)
    # Before the first window nobody waits, so that every interval has a window before it.
    served, waits = np.zeros((len(service), 1 + size)), np.zeros((len(service), 1 + size), bool)
    for row, (name, values) in enumerate(service.items()):
        served[row, 1 : 1 + len(values)] = values / weights.get(name, 1)
        waits[row, 1:] = _waits(requests[tenants == name], window, size)
    largest = 0.0
    for row in range(len(service) - 1):
        both = waits[row] & waits[row + 1 :]
        ahead = np.append(np.cumsum(both * (served[row] - served[row + 1 :]), axis=1), 0.0)
        edges = np.flatnonzero(np.diff(both.ravel(), append=False))
        edges[1::2] += 1
        if len(edges):
            gaps = np.maximum.reduceat(ahead, edges)[::2] - np.minimum.reduceat(ahead, edges)[::2]
            largest = max(largest, float(gaps.max()))
    return largest


def _waits(requests: NDArray[Any], window: float, size: int) -> NDArray[np.bool_]:
    """In which windows some request waited from the beginning to the end."""
    started = np.where(requests["started"] < 0, requests["ended"], requests["started"]) / 1e6
    first = np.ceil(requests["arrived"] / 1e6 / window).astype(int)
    last = np.floor(started / window).astype(int)
    changes = np.zeros(size + 1, int)
    whole = last > first
    np.add.at(changes, np.minimum(first[whole], size), 1)
    np.add.at(changes, np.minimum(last[whole], size), -1)
    waits: NDArray[np.bool_] = np.cumsum(changes)[:size] > 0
    return waits


def percentiles(name: str, values: NDArray[Any], *percents: int) -> dict[str, float | None]:
    """Percentiles by nearest rank, named like `ttft_p50_s`; None without values."""
    if not len(values):
        return {f"{name}_p{percent}_s": None for percent in percents}
    return {f"{name}_p{percent}_s": float(np.percentile(values, percent, method="inverted_cdf")) for percent in percents}
