"""A snapshot of an engine: its requests, its KV blocks and its latest steps, as dicts of plain data. Times are in microseconds."""

from __future__ import annotations

from typing import Any, TypedDict


class _Sequence(TypedDict):
    tag: int
    tenant: str
    priority: int
    tier: str
    state: str
    prompt_tokens: int
    output_tokens: int


class RunningSequence(_Sequence):
    """A sequence with a batch slot."""

    slot: int
    computed_tokens: int
    blocks: int
    age_us: int


class WaitingSequence(_Sequence):
    """A sequence that waits."""

    waited_us: int


class PlannedStep(TypedDict):
    """A step. `step` is its number."""

    step: int
    planned_us: int
    slots: str
    """One character per batch slot: d for decode, p for prefill, r for recomputation, - for no token, a space for a free slot."""
    tokens: int
    waiting: int
    admitted: list[tuple[int, int]]
    """Slots and tags."""
    preempted: list[int]
    """Tags."""


class CoreSnapshot(TypedDict):
    """What the scheduler knows."""

    running: list[RunningSequence]
    waiting: list[WaitingSequence]
    waiting_by_tier: dict[str, int]
    """The number of all waiting sequences."""
    kv_map: bytes
    """A little-endian uint32 per cell of `blocks_per_cell` blocks: 0 free, 1 cached, 2 shared, 3 + batch slot of its single owner."""
    blocks_per_cell: int
    steps: list[PlannedStep]
    """The steps since the last snapshot. They are recorded for three seconds after one."""


class EngineSnapshot(CoreSnapshot):
    """A snapshot of an engine."""

    now_us: int
    stats: dict[str, Any]
    """`Stats.counters` at the same time."""
    names: list[tuple[int, str | None]]
    """Tags and ids of its requests, which the client adds."""
