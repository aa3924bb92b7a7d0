"""Results of a request: its text, tokens, timings and finish reason."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.svg import Svg


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request, in seconds from its arrival (the first byte that the server read); None if the event did not happen."""

    queued: float
    """Time in the engine's queue, which the request enters once it is received, tokenized and its grammar compiled."""
    started: float
    """When the scheduler planned its first chunk, or when it ended if none was planned."""
    first_token: float | None
    total: float

    def merge(self, other: Timing | None) -> Timing:
        """Combines the timings of two answers: from the first start to the last end."""
        if other is None:
            return self
        firsts = [first for first in (self.first_token, other.first_token) if first is not None]
        queued, started = min(self.queued, other.queued), min(self.started, other.started)
        return Timing(queued, started, min(firsts, default=None), max(self.total, other.total))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Records how long one sequence spent in each state in the engine. Times are seconds on the machine's monotonic clock.

    `states` has the seconds spent in each state of `chairlift.timeline.STATES`; they sum to the sequence's lifetime. States that took no
    time are left out.
    """

    tag: int
    """The engine's number for the sequence; `preempted_by` holds such numbers."""
    finish: str | None
    """`stop`, `length`, `error`, `deadline` or `abort`; None while the sequence runs."""
    arrived: float
    """When the server read the first byte of the request."""
    submitted: float
    """When it entered the engine's queue: received, tokenized and its grammar compiled."""
    started: float | None
    first_token: float | None
    ended: float | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix cache."""
    own_cached_tokens: int
    """Those of them that a request of the same tenant had computed or used before. A server tells a tenant of no others."""
    lost_hit_tokens: int
    """Further prompt tokens whose KV the same tenant had left in the prefix cache, but which were computed again because no recurrent state
    was saved after them."""
    output_tokens: int
    computed_tokens: int
    """Tokens that the model computed for it, including recomputed ones."""
    recomputed_tokens: int
    draft_tokens: int
    """Proposed tokens that the model computed."""
    accepted_draft_tokens: int
    """Proposed tokens that the answer contains. Each saved a step."""
    preemptions: int
    swaps: int
    block_seconds: float
    """KV blocks multiplied by the seconds that it held them, or that its session kept them for it since its previous request."""
    compute_seconds: float
    """Its parts of the times of its steps. Over all requests they sum to the engine's step time."""
    energy_joules: float | None
    """The energy that the meter measured for these parts; None without a meter."""
    tenant: str
    priority: int
    tier: str
    """`priority`, `default`, `flex`, or `background`."""
    limit: str | None
    """The limit that it waited for longest, if any."""
    preempted_by: tuple[int, ...]
    preempted_for: dict[str, int]
    """Number of preemptions by reason: `kv_blocks`, `priority`, `fairness`, `shortest`."""
    states: dict[str, float]
    queued_behind: dict[str, float] = field(default_factory=dict)
    """Seconds by tenant that other requests ran while this one waited for its first step; set only by `explain`."""
    served_before: dict[str, int] = field(default_factory=dict)
    """Number of requests that started while this one waited for its first step, by rule of `SERVING_RULES`; set only by `explain`."""
    served_first: tuple[tuple[int, str, str], ...] = ()
    """Tag, tenant and rule of the first 16 of them, in the order of their start."""
    evicted_for: dict[str, int] = field(default_factory=dict)
    """Tokens of KV that only the request's session had used and that were evicted before the request started, since the session's request
    before it, by whom the blocks were for: `same_session`, `same_tenant` (another session of it), `other_tenant`, and `no_session` (a
    request without a session, KV from storage, or another model)."""
    expected_wait_ms: int | None = None
    """While the request waits for its session's turn, how long it is expected to wait; set only by `explain`."""
    max_wait_ms: int | None = None
    """How long it waits at most: then it is served in any case; set only by `explain`."""

    def plot(self) -> Svg:
        """Draws the time in each state, as SVG."""
        from chairlift.timeline_plot import plot

        return plot([self.states])

    def _repr_svg_(self) -> str:
        """How a notebook shows it."""
        return self.plot()

    @classmethod
    def read(cls, core: _core.Timeline) -> Self:
        """Converts a timeline of the core, whose times are in microseconds."""
        fields: dict[str, Any] = {**core}
        for name in ("arrived", "submitted", "started", "first_token", "ended"):
            fields[name] = None if fields[name] is None else fields[name] / 1e6
        fields["block_seconds"] = fields.pop("block_us") / 1e6
        fields["compute_seconds"] = fields.pop("compute_ns") / 1e9
        energy = fields.pop("energy_uj")
        fields["energy_joules"] = None if energy is None else energy / 1e6
        fields["preempted_by"] = tuple(fields["preempted_by"])
        fields["queued_behind"] = {tenant: time / 1e6 for tenant, time in fields.get("queued_behind", ())}
        fields["served_first"] = tuple(tuple(one) for one in fields.get("served_first", ()))
        fields["states"] = {state: time / 1e6 for state, time in fields["states"].items()}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, at temperature 1 and before penalties, biases and masks; `top` holds the most likely tokens."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first, as many as the request asked for."""

    @classmethod
    def read(cls, lines: bytes, count: int) -> list[Self]:
        """Parses the engine's packed records, each with `count` top tokens: see `engine.frames`."""
        records = struct.iter_unpack(f"<ifi{count}i{count}f", lines)
        return [cls(token, logprob, rank, tuple(zip(top[:count], top[count:], strict=True))) for token, logprob, rank, *top in records]


@dataclass(slots=True)
class ToolCall:
    """A tool call of the model. `arguments` should be the text of a JSON object, but is what the model wrote."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False
    """Whether `arguments` are the free text of a custom tool's input."""


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, whole or as an increment of a stream.

    `LLM.generate` returns one whole output for each prompt; with `n` answers it is the first of them, and `outputs` has all.
    `AsyncEngine.generate` yields increments: `text` and `token_ids` hold only new output, and the last increment of each answer has a
    `finish_reason`.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: Sequence[int]
    finish_reason: str | None = None
    """`stop` (end of sequence, a stop string or a stop token) or `length`; None while the request runs.

    `LLM` also reports `error`, if this request alone failed, and `deadline`, if it was dropped with the output it had.
    """
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the output; None for the model's own end of sequence."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    own_cached_tokens: int = 0
    """Those of them that a request of the same tenant had computed or used before."""
    preemptions: int = 0
    timing: Timing | None = None
    """Set with `finish_reason`."""
    queued: float | None = None
    """Seconds in the engine's queue; set once the engine has started the request."""
    index: int = 0
    """Which of the request's `n` answers this is."""
    timeline: Timeline | None = None
    """Set with `finish_reason`, unless a stop string ended the request: stop strings are found outside the engine."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids`, if the request asked for log-probabilities."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each prompt token, None for the first; on the first output of each answer, if the request asked for them."""
    text_offsets: list[int] | None = None
    """With `logprobs`: the offset in characters of each of `token_ids` in the answer's text, including text that is held back."""
    embedding: array[float] | None = None
    """The prompt's embedding, 32-bit numbers, if the request asked for it instead of a text."""
    reasoning: str | None = None
    """In answers of a chat, the model's reasoning, which its `text` is without; None if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In answers of a chat, its tool calls, set with `finish_reason`. Arguments can be invalid JSON: validate them."""
    prompt: str | None = None
    """The prompt, if `LLM.generate` was given it as text."""
    others: tuple[RequestOutput, ...] = ()
    """The answers after the first, in a whole output of a request with `n` of them."""

    @property
    def outputs(self) -> list[RequestOutput]:
        """All answers to the prompt, in the order of their `index`, or of their rank with `best_of`."""
        return [self, *self.others]
