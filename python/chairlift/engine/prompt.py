"""The types of prompts in the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from chairlift.errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list or an array), or as in vLLM {"prompt": text} or {"prompt_token_ids": ids}."""

_TYPES = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def listed(prompts: Prompt | Iterable[Any]) -> list[Any]:
    """The prompts as a list; a single prompt becomes a list of one. Raises InvalidRequest."""
    values = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array
    if isinstance(values, (str, bytes, Mapping)):
        return [values]
    if not isinstance(values, Iterable):
        raise InvalidRequest(f"prompts must be {_TYPES}, or a list of these, got {prompts!r:.50}", param="prompt")
    several = list(values)
    return [several] if several and isinstance(several[0], Integral) else several


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """A prompt as text or as a list of token ids. Raises InvalidRequest for other types."""
    value: Any = prompt
    if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
        value = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidRequest(f"a prompt is {_TYPES}, got {prompt!r:.50}", param="prompt")
    return [int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token for token in value]
