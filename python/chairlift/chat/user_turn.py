"""Where the user's last turn ends in a conversation that goes on after it, such as with calls of tools."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any


def up_to_user(conversation: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns the messages up to the user's last one; None if there is none, or if nothing follows it."""
    last = next((index for index in reversed(range(len(conversation))) if conversation[index]["role"] == "user"), None)
    return None if last is None or last == len(conversation) - 1 else conversation[: last + 1]


def user_turn_end(prompt: Sequence[int], beginning: Sequence[int], end_tokens: Container[int]) -> int | None:
    """Returns the number of tokens of `prompt` up to the end of the user's last turn; None if it is not found.

    `beginning` are the tokens of the messages up to that turn. Both have the same number of end tokens up to there. Tokens between them may
    differ, because the tokens of generated answers replace rendered ones.
    """
    left = sum(token in end_tokens for token in beginning)
    if left == 0:
        return None
    for index, token in enumerate(prompt):
        left -= token in end_tokens
        if left == 0:
            return index + 1
    return None
