"""What is known of an upstream's speed and memory: measured on the answers that pass."""

from __future__ import annotations

from chairlift.engine.estimated_engine import STEP_SECONDS, TOKEN_SECONDS
from chairlift.engine.frames import Estimate
from chairlift.gate.answer import Answer

SMOOTHING = 0.1
"""Weight of the newest measurement in a moving average. The first ones weigh more, so that no average keeps much of its first value."""
SHORT = 256
"""Tokens to compute of a prompt above which the time to the first token says how fast prompts are computed."""
MAX_PER_TOKEN = 4.0
"""Our estimate of a prompt's tokens over the upstream's own number is believed from the inverse of this on, up to this."""
MIN_SHARE = 0.25
"""The smallest part of the upstream's KV on which we count, however few tokens it finds."""
TRUSTED = 20
"""Answers that should find tokens after which missing ones shrink the budget."""


class _Average:
    """A moving average; `value` is assumed until something is measured."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 0

    def observe(self, measured: float) -> None:
        self.count += 1
        self.value += max(SMOOTHING, 1 / self.count) * (measured - self.value)


class Estimates:
    """Moving averages of one upstream, and the estimate that the engine schedules by."""

    def __init__(self, kv_tokens: int, block_size: int, most_blocks: int) -> None:
        """`kv_tokens` are what the upstream's KV cache holds; the engine has at most `most_blocks` blocks of `block_size`."""
        self._kv_tokens, self._block_size, self._most = kv_tokens, block_size, most_blocks
        self._step, self._token = _Average(STEP_SECONDS), _Average(TOKEN_SECONDS)
        self._ratio = _Average(1.0)
        self._found = _Average(1.0)
        """Tokens that the upstream found in its cache over those that we expected."""
        self.share = 1.0
        """The part of the upstream's KV on which we count: less where it finds fewer tokens than were expected."""

    @property
    def ratio(self) -> float:
        """Tokens that we count over those that the upstream counts."""
        return self._ratio.value

    def observe(self, answer: Answer, prompt: int, cached: int) -> None:
        """Learns from an answer whose prompt had `prompt` tokens by our count, of which `cached` were expected to be found."""
        if (between := answer.between_tokens) is not None:
            self._step.observe(between)
        if (ttft := answer.ttft) is not None and prompt - cached > SHORT:
            self._token.observe(max(0.0, ttft - self._step.value) / (prompt - cached))
        usage = answer.usage
        if usage.prompt:
            self._ratio.observe(min(max(prompt / usage.prompt, 1 / MAX_PER_TOKEN), MAX_PER_TOKEN))
        if usage.cached is not None and cached > SHORT:
            self._found.observe(min(1.0, usage.cached * self.ratio / cached))
            if self._found.count >= TRUSTED:
                self.share = max(MIN_SHARE, self.share - 0.02) if self._found.value < 0.8 else min(1.0, self.share + 0.005)

    def frame(self) -> Estimate:
        """The estimate for the engine."""
        blocks = int(self._kv_tokens * self.share * self.ratio) // self._block_size
        return Estimate(round(self._step.value * 1e6), round(self._token.value * 1e9), max(1, min(self._most, blocks)))
