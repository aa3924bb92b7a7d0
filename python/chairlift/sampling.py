"""How the next token of a request is chosen, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.checks import integer, number
from chairlift.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 64
MAX_SEQUENCES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's way of sampling; the order is penalties, temperature, top-k, top-p, min-p.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means as many as the context
    leaves. `seed` makes the draws a function of (seed, position) alone, whatever else is in the batch. The
    generated text ends before the first of `stop`; a token of `stop_token_ids` ends it too. `n` answers are drawn;
    with `best_of` above it that many are, and the `n` with the highest mean log-probability of their tokens are kept.
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
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and what it may be."""
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        number("temperature", self.temperature, 0.0, 100.0)
        integer("top_k", self.top_k, 0, 2**31 - 1)
        number("top_p", self.top_p, 0.0, 1.0, above=True)
        number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        # Smaller ones could make finite logits infinite.
        number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
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
            integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)
        integer("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            integer("best_of", self.best_of, self.n, MAX_SEQUENCES)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def num_sequences(self) -> int:
        """How many answers are drawn."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether more answers are drawn than are kept."""
        return self.num_sequences > self.n
