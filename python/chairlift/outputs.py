"""What a caller gets back: a request's text, its tokens and why it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to one request, in seconds from its arrival at the engine; None if they did not."""

    queued: float
    """Until its first chunk was planned."""
    first_token: float | None
    total: float


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
    """`stop` (end of sequence, a stop string or token) or `length`; None while it runs; `error` for one of `LLM`'s that failed alone."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end of sequence."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    preemptions: int = 0
    timing: Timing | None = None
    """Set with `finish_reason`."""
