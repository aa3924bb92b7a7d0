"""The facts and counters of several engines of one model as those of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SUMMED_FACTS = ("num_kv_blocks", "num_bytes", "shared_bytes", "max_num_seqs")
_LEAST_FACTS = ("max_model_len", "max_text_len")


def merged_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums what the engines have, and takes the least of what a request may need. The rest is the first engine's."""
    merged = dict(facts[0])
    for name in _SUMMED_FACTS:
        if name in merged:
            merged[name] = sum(one[name] for one in facts)
    for name in _LEAST_FACTS:
        if merged.get(name) is not None:
            merged[name] = min(one[name] for one in facts)
    return merged


def merged_stats(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums counters and gauges. The saturation is the mean; of predictions, the shortest wait and the longest step count."""
    reported = [one for one in stats if one]
    if len(reported) <= 1:
        return dict(reported[0]) if reported else {}
    merged = _summed(reported)
    if "saturation" in merged:
        merged["saturation"] /= len(reported)
    for name, choose in (("predicted_wait_us", min), ("predicted_step_us", max)):
        if name in merged:
            merged[name] = choose(one.get(name, 0) for one in reported)
    return merged


def _summed(all_stats: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Adds numbers, lists by position and dicts by key. Of anything else, the first that is not None."""
    merged: dict[Any, Any] = {}
    for stats in all_stats:
        for name, value in stats.items():
            known = merged.get(name)
            if known is None or isinstance(value, str):
                merged[name] = value if known is None else known
            elif isinstance(value, Mapping):
                merged[name] = _summed([known, value])
            elif isinstance(value, Sequence):
                longest = max(len(known), len(value))
                merged[name] = [sum(one[at] for one in (known, value) if at < len(one)) for at in range(longest)]
            elif value is not None:
                merged[name] = known + value
    return merged
