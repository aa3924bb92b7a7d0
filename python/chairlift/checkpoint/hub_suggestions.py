"""Models of the Hugging Face hub to suggest for a name that is none of its own, like `llama3`."""

from __future__ import annotations

import re
from collections.abc import Iterable

MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen/Qwen3-Embedding-0.6B",
    "google/gemma-2-2b-it",
    "google/gemma-3-1b-it",
    "google/gemma-3-4b-it",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "ibm-granite/granite-3.3-2b-instruct",
    "openai/gpt-oss-20b",
    "allenai/OLMo-2-0425-1B-Instruct",
)
"""One or more of each family that Chairlift's own code computes."""
MOST = 3


def suggestions(name: str) -> list[str]:
    """Returns at most three of the models for a name without an organisation, the most similar first."""
    short = {_letters(model.rpartition("/")[2]): model for model in MODELS}
    asked = _letters(name)
    if not asked:
        return []
    beginning = [key for key in short if key.startswith(asked)]
    return [short[key] for key in (beginning or _close(asked, short))[:MOST]]


def _close(asked: str, known: Iterable[str]) -> list[str]:
    """Returns the names that begin like the one asked for, maybe with a mistake."""
    from difflib import get_close_matches  # not before it is needed

    heads = {key[: len(asked)]: key for key in reversed(list(known))}
    return [heads[head] for head in get_close_matches(asked, heads, MOST, 0.8)]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
