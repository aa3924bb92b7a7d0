"""The `usage` and `metrics` objects of an answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from chairlift.outputs import Timing


@dataclass(slots=True)
class Energy:
    """The field `energy` of an answer: None without a meter, or before an answer has ended."""

    joules: float | None
    method: str | None


@dataclass(slots=True)
class Usage:
    """Tokens that a request has used so far: each prompt once, and all of its answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int | None = None
    """Tokens of the answers that are reasoning; None if the model does not reason."""
    accepted: int = 0
    """Tokens of the answers that speculative decoding proposed."""
    rejected: int = 0
    """Proposed tokens that are not in the answers; they are not part of `completion`."""

    cacheable: int = 0
    """Tokens of the prompts in whole KV blocks, which stay in the prefix cache."""
    energy: Energy | None = None
    """Set if the request asks for it."""

    @property
    def written(self) -> int:
        """Tokens of the prompts that these requests have put into the prefix cache."""
        return max(0, self.cacheable - self.cached)

    def json(self) -> dict[str, object]:
        """Returns OpenAI's `usage` object, and the energy."""
        details = {} if self.reasoning is None else {"reasoning_tokens": self.reasoning}
        if self.accepted or self.rejected:
            details |= {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.rejected}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": self.written},
            **({"completion_tokens_details": details} if details else {}),
            **({} if self.energy is None else {"energy": asdict(self.energy)}),
        }

    def response(self) -> dict[str, object]:
        """Returns the `usage` object of OpenAI's Responses API."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": self.written},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning or 0},
            "total_tokens": self.prompt + self.completion,
        }

    def message(self) -> dict[str, object]:
        """Returns Anthropic's `usage` object, which does not count tokens as input that the prefix cache had or now has."""
        return {
            "input_tokens": self.prompt - self.cached - self.written,
            "cache_creation_input_tokens": self.written,
            "cache_creation": {"ephemeral_5m_input_tokens": self.written, "ephemeral_1h_input_tokens": 0},
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
            "output_tokens_details": None if self.reasoning is None else {"thinking_tokens": self.reasoning},
            "server_tool_use": None,
        }


def timing_metrics(timing: Timing, tokens: int) -> dict[str, float | None]:
    """Returns the `metrics` object of an answer of `tokens` tokens, in vLLM's shape; milliseconds, None for what did not happen.

    `generation_time_ms` is the time from the first token to the end, `mean_itl_ms` divides it by the tokens after the first, and
    `tokens_per_second` divides all tokens by the time since the answer left the queue.
    """
    generation = None if timing.first_token is None else timing.total - timing.first_token
    running = timing.total - timing.started
    return {
        "time_to_first_token_ms": _ms(timing.first_token),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(timing.queued),
        "mean_itl_ms": _ms(generation / (tokens - 1)) if generation is not None and tokens > 1 else None,
        "tokens_per_second": round(tokens / running, 3) if tokens and running > 0 else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
