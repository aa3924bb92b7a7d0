"""How the next token of a request is chosen, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chairlift.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's way of sampling; the order is penalties, temperature, top-k, top-p, min-p.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means as many as the context
    leaves. `seed` makes the draws a function of (seed, position) alone, whatever else is in the batch. The
    generated text ends before the first of `stop`; a token of `stop_token_ids` ends it too.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and what it may be."""
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        # Smaller ones could make finite logits infinite.
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters", param="stop")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        if len(ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"stop_token_ids has {len(ids)} entries, at most {MAX_STOP_TOKENS} are allowed", param="stop_token_ids")
        for token in ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, got {value!r:.100}", param=name)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not ok or (above and value == low):
        span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {span}, got {value!r:.100}", param=name)
