"""The requests of a simulation, as flat arrays of lengths and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.traces import HASH_BLOCK, TraceRequest
from chairlift.errors import InvalidTrace
from chairlift.scheduling import TIERS

COLUMNS = (
    *("arrival_us", "prompt", "output", "most", "tenant", "priority", "deadline_us", "ttft_deadline_us", "predicted", "names", "model"),
    "tier",
)
"""The columns of a request, as `_core.simulate` takes them."""

DRAFT_COLUMNS = ("request", "position", "tokens", "accepted", "source")
"""The columns of a draft: the index of its request, the tokens of prompt and output before it, its tokens, how many of them were accepted,
and where it came from as in a journal."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests ordered by arrival: int64 [N, len(COLUMNS)], -1 for no deadline or prediction.

    A request generates `output` tokens and may generate `most`. `tenant` is an index into `tenants`, pairs of name and weight. `names` has
    the names of all prompt blocks of `name_block` tokens, one request after the other; the column `names` has their number. Equal names
    mean equal tokens up to the end of the block. `model` is an index into `models`, names that are "" for requests without one, and
    `tier` one into `TIERS`. `drafts` has recorded drafts, int64 [M, len(DRAFT_COLUMNS)], ordered by request and position.
    """

    requests: NDArray[np.int64]
    tenants: Sequence[tuple[str, int]] = (("", 1),)
    names: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    name_block: int = HASH_BLOCK
    drafts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, len(DRAFT_COLUMNS)), np.int64))
    models: Sequence[str] = ("",)
    lacks_sessions: bool = False
    """Whether the requests were recorded with sessions, which are left out."""

    @classmethod
    def of(cls, lines: Sequence[TraceRequest], weights: Mapping[str, int] | None = None) -> Workload:
        """The requests of a trace, with its clients as tenants. Raises InvalidTrace if its hash ids are of blocks of several sizes."""
        sizes = {line.hash_block for line in lines if line.hash_ids} or {HASH_BLOCK}
        if len(sizes) > 1:
            raise InvalidTrace(f"hash ids of blocks of {' and '.join(map(str, sorted(sizes)))} tokens: expected one size")
        clients = {line.client or "" for line in lines} or {""}
        numbers = {client: number for number, client in enumerate(sorted(clients))}
        models = {name: number for number, name in enumerate(sorted({line.model or "" for line in lines} or {""}))}
        rows = [
            (
                round(line.arrival * 1e6),
                line.prompt_tokens,
                line.output_tokens,
                line.output_tokens,
                numbers[line.client or ""],
                0,
                -1,
                -1,
                -1,
                len(line.hash_ids or ()),
                models[line.model or ""],
                TIERS.index("default"),
            )
            for line in lines
        ]
        named = [np.asarray(line.hash_ids, np.int64) for line in lines if line.hash_ids]
        return cls(
            np.array(rows, np.int64).reshape(-1, len(COLUMNS)),
            tuple((client, (weights or {}).get(client, 1)) for client in numbers),
            np.concatenate(named) if named else np.zeros(0, np.int64),
            sizes.pop(),
            models=tuple(models),
        )

    def __len__(self) -> int:
        return len(self.requests)

    def column(self, name: str) -> NDArray[np.int64]:
        """One column, int64 [N]."""
        column: NDArray[np.int64] = self.requests[:, COLUMNS.index(name)]
        return column

    def with_(self, **columns: int | NDArray[np.int64]) -> Workload:
        """The same requests with some columns replaced. They must stay ordered by arrival."""
        requests = self.requests.copy()
        for name, numbers in columns.items():
            requests[:, COLUMNS.index(name)] = numbers
        return replace(self, requests=requests)

    def faster(self, scale: float) -> Workload:
        """The same requests, arriving at `scale` times the rate."""
        return self.with_(arrival_us=np.rint(self.column("arrival_us") / scale).astype(np.int64))

    def first(self, count: int) -> Workload:
        """The first `count` requests."""
        requests = self.requests[:count].copy()
        names = self.names[: int(requests[:, COLUMNS.index("names")].sum())]
        return replace(self, requests=requests, names=names, drafts=self.drafts[self.drafts[:, 0] < count])

    def repeated(self, count: int) -> Workload:
        """The requests repeated up to `count`. Each repetition has its own block names."""
        times = -(-count // max(1, len(self)))
        arrivals = self.column("arrival_us")
        span = int(arrivals[-1] + arrivals[-1] // max(1, len(self) - 1) + 1)
        requests = np.tile(self.requests, (times, 1))
        requests[:, 0] += np.repeat(np.arange(times) * span, len(self))
        known, indices = np.unique(self.names, return_inverse=True)
        names = np.tile(indices, times) + np.repeat(np.arange(times) * len(known), len(indices))
        drafts = np.tile(self.drafts, (times, 1))
        drafts[:, 0] += np.repeat(np.arange(times) * len(self), len(self.drafts))
        return replace(self, requests=requests, names=names, drafts=drafts).first(count)
