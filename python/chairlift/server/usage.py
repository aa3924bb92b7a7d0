"""What a request used, counted in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens that a request took so far: each prompt once, and all of its answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def response(self) -> dict[str, Any]:
        """The `usage` object of OpenAI's Responses API; nothing is counted as reasoning, or as written to the cache."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }

    def message(self) -> dict[str, Any]:
        """Anthropic's `usage` object, where what was found in the cache is not counted as input."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
        }
