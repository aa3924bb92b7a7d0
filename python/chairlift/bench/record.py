"""What is known of one request after it: when it was due, when pieces of its answer came, or how it failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Record:
    """One request and what came of it; all times are seconds since the run began.

    Whoever serves it may be a server, this process, or a simulation.
    """

    due: float
    """When it was to be sent: latencies count from here, so that a client that is late makes no server look quick."""
    seated: float = 0.0
    """When the concurrency cap let it go; `due` where there is none."""
    sent: float = 0.0
    """When the client began to send it, and to connect where it had no open connection."""
    times: list[float] = field(default_factory=list)
    """When each piece of the answer came: a token, or several where a server sends them together."""
    end: float = 0.0
    """When the answer was over, or failed."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that the server found in its cache, where it tells."""
    wanted_tokens: int = 0
    """The length of the answer that was asked for."""
    counted: bool = True
    """Whether the server told how many tokens there were; where not, pieces are counted."""
    failure: str = ""
    """The kind of failure, "" for none; see `client.py` for the kinds."""
    detail: str = ""
    """What the server or the system said to a failure."""

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return not self.failure

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to the first token."""
        return self.times[0] - self.due

    @property
    def e2el(self) -> float:
        """Seconds from when it was due to the last token."""
        return self.times[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds of an output token after the first; None where there is only one."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between pieces of the answer."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def lag(self) -> float:
        """Seconds by which the client sent it late, for reasons of its own: not those that it waited for a seat."""
        return self.sent - max(self.due, self.seated)

    def to_json(self) -> dict[str, Any]:
        """Plain values, times to the microsecond."""
        plain = asdict(self)
        for name in ("due", "seated", "sent", "end"):
            plain[name] = round(plain[name], 6)
        return plain | {"times": [round(time, 6) for time in self.times]}


@dataclass
class Run:
    """What came of a load: a run of a server, of this process, or of a simulation."""

    records: list[Record]
    """By the time they were due."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the reader has to know of how it was made: names and values."""
    cpu_share: float | None = None
    """The part of a core that the busiest process of the client used, where there was one."""
    notes: list[str] = field(default_factory=list)
    """What the reader has to know about the numbers."""
    interrupted: bool = False
    """Whether somebody ended it early; what had not ended by then is not among the records."""
