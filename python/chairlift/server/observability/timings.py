"""One answer's timings, as a client may ask for them."""

from __future__ import annotations

from chairlift.outputs import Timing


def timings(timing: Timing, tokens: int) -> dict[str, float | None]:
    """The `metrics` object of an answer of so many tokens, in vLLM's shape; milliseconds, None for what there was not.

    `generation_time_ms` is the time from the first token to the end, `mean_itl_ms` that time over the tokens after the first, and
    `tokens_per_second` counts all tokens over the time since the answer left the queue.
    """
    generation = None if timing.first_token is None else timing.total - timing.first_token
    worked = timing.total - timing.started
    return {
        "time_to_first_token_ms": _ms(timing.first_token),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(timing.queued),
        "mean_itl_ms": _ms(generation / (tokens - 1)) if generation is not None and tokens > 1 else None,
        "tokens_per_second": round(tokens / worked, 3) if tokens and worked > 0 else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
