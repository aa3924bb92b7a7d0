"""What a caller gets back: a request's text, its tokens and why it ended."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to one request, in seconds from its arrival: the first byte of it that a server read; None if they did not."""

    queued: float
    """How long it was in the engine's queue, which begins when it is received, tokenized and its grammar compiled."""
    started: float
    """When its first chunk was planned, or its end if none was."""
    first_token: float | None
    total: float

    def beside(self, other: Timing | None) -> Timing:
        """Both as one: from the first to begin until the last to end."""
        if other is None:
            return self
        firsts = [first for first in (self.first_token, other.first_token) if first is not None]
        queued, started = min(self.queued, other.queued), min(self.started, other.started)
        return Timing(queued, started, min(firsts, default=None), max(self.total, other.total))


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of one sequence's time in the engine; times are seconds on the machine's monotonic clock.

    `states` says what it waited for and worked on, in seconds that sum to its life: `chairlift.timeline.STATES` has them. Those that
    took no time are left out.
    """

    tag: int
    """The engine's number for the sequence; `preempted_by` speaks of others by theirs."""
    finish: str | None
    """`stop`, `length`, `error`, `deadline` or `abort`; None while it lives."""
    arrived: float
    """When its first byte was read."""
    submitted: float
    """When it came into the engine's queue: received, tokenized, its grammar compiled."""
    started: float | None
    first_token: float | None
    ended: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    computed_tokens: int
    """Tokens that went through the model for it, again where its blocks were lost meanwhile."""
    recomputed_tokens: int
    preemptions: int
    swaps: int
    block_seconds: float
    """How many KV blocks it held, times how long."""
    tenant: str
    priority: int
    limit: str | None
    """The limit that it waited for longest, if any."""
    preempted_by: tuple[int, ...]
    preempted_for: dict[str, int]
    """How often it lost its blocks for each reason: `kv_blocks`, `priority`, `fairness`, `shortest`."""
    states: dict[str, float]
    queued_behind: dict[str, float] = field(default_factory=dict)
    """Tenants whose requests ran while this one waited for its first step, with their seconds: only from `explain`."""

    @classmethod
    def read(cls, ledger: Mapping[str, Any]) -> Self:
        """Makes one of the core's, whose times are microseconds."""
        plain = dict(ledger)
        for name in ("arrived", "submitted", "started", "first_token", "ended"):
            plain[name] = None if plain[name] is None else plain[name] / 1e6
        plain["block_seconds"] = plain.pop("block_us") / 1e6
        plain["preempted_by"] = tuple(plain["preempted_by"])
        plain["queued_behind"] = {tenant: time / 1e6 for tenant, time in plain.get("queued_behind", ())}
        plain["states"] = {cause: time / 1e6 for cause, time in plain["states"].items()}
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was, at temperature 1 and before penalties, biases and masks; `top` are the likeliest, the best first."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), as many as were asked for."""

    @classmethod
    def read(cls, lines: bytes, count: int) -> list[Self]:
        """Makes those of the engine's lines, which have `count` likeliest tokens each: see `protocol.Step`."""
        found = struct.iter_unpack(f"<ifi{count}i{count}f", lines)
        return [cls(token, logprob, rank, tuple(zip(top[:count], top[count:], strict=True))) for token, logprob, rank, *top in found]


@dataclass(slots=True)
class RequestOutput:
    """One finished or streaming request.

    From `LLM.generate` it holds everything; from `AsyncEngine.generate` each one holds only what is new
    (`text`, `token_ids`), and the last one has `finish_reason`.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str | None = None
    """`stop` (end of sequence, a stop string or token) or `length`; None while it runs.

    One of `LLM`'s may also be `error`, which failed alone, or `deadline`, which was dropped with what it had.
    """
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end of sequence."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    preemptions: int = 0
    timing: Timing | None = None
    """Set with `finish_reason`."""
    queued: float | None = None
    """Seconds that it was in the engine's queue; set once the engine has begun it."""
    index: int = 0
    """Which of the request's `n` answers it belongs to."""
    ledger: Timeline | None = None
    """Set with `finish_reason`, unless a stop string ended the request: that is found outside the engine."""
    logprobs: list[TokenLogprobs] | None = None
    """One a token of `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One a token of the prompt, None for the first; on the first output of each answer, if asked for."""
    text_offsets: list[int] | None = None
    """With `logprobs`: where in the answer's text each token of `token_ids` begins, in characters; held-back text counts."""
