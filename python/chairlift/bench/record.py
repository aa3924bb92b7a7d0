"""The record of a request: its times and tokens, or its failure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Record:
    """A request and its result. Times are seconds since the start of the run."""

    due: float
    """When it was due. Latencies count from here, so that a late client does not make the server look faster."""
    admitted: float = 0.0
    """When the concurrency limit admitted it; `due` without a limit."""
    sent: float = 0.0
    """When the client started to send it, or to connect first."""
    times: list[float] = field(default_factory=list)
    """When each event with output arrived. An event has one token or several."""
    end: float = 0.0
    """When the response ended or failed."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache, if reported."""
    energy_joules: float | None = None
    """The energy that the server's meter measured for it, if reported."""
    requested_tokens: int = 0
    """`max_tokens` of the request."""
    counted: bool = True
    """Whether the server reported token counts. If not, events are counted."""
    failure: str = ""
    """The kind of failure (see `client.py`), or ""."""
    detail: str = ""
    """The failure's message."""

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return not self.failure

    @property
    def ttft(self) -> float:
        """Seconds from the due time to the first token."""
        return self.times[0] - self.due

    @property
    def e2el(self) -> float:
        """Seconds from the due time to the last token."""
        return self.times[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds of an output token after the first; None for a single token."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between events with output."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def lag(self) -> float:
        """Seconds by which the client sent it late, without the wait for the concurrency limit."""
        return self.sent - max(self.due, self.admitted)

    def to_json(self) -> dict[str, object]:
        """Plain data, with times in microsecond precision."""
        plain = asdict(self)
        for name in ("due", "admitted", "sent", "end"):
            plain[name] = round(plain[name], 6)
        return plain | {"times": [round(time, 6) for time in self.times]}


@dataclass
class Run:
    """The records of one run."""

    records: list[Record]
    """Ordered by due time."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the run, for reports."""
    cpu_share: float | None = None
    """The share of a core that the busiest client process used, if any."""
    notes: list[str] = field(default_factory=list)
    """Notes on the validity of the figures."""
    interrupted: bool = False
    """Whether the run was interrupted. Records then lack the unfinished requests."""
