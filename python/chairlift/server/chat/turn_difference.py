"""Compares a prompt with the turn before it: where they differ, and why the prefix cache was not used."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.server.cache_miss import CacheMiss, Difference, MissReason
from chairlift.server.chat.prompt_parts import SYSTEM_ROLE
from chairlift.server.turns import Anchor, Found, Part, Scope

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

_EXCERPT_TOKENS, _EXCERPT_CHARACTERS = 24, 160
_CONTEXT_TOKENS = 4
"""Equal tokens at the beginning of an excerpt."""
_MIN_SNIPPET = 8
"""Characters of a text that tell in which field it stands."""


@dataclass(frozen=True, slots=True)
class PromptOfTurn:
    """A prompt with what it was made of."""

    conversation: Sequence[Mapping[str, Any]]
    parts: Sequence[Part]
    tokens: array[int]
    anchor: Anchor
    scope: Scope
    restarts: int


def cache_miss(earlier: Found, now: PromptOfTurn, cached: int, block_size: int, tokenizer: Tokenizer) -> CacheMiss | None:
    """Returns why less than the turn before had left in the cache was found there; None if that was found.

    `cached` are the prompt's cached tokens. The last token of an answer is never computed, so its block cannot be cached; that of a prompt
    always is.
    """
    turn = earlier.turn
    before = turn.tokens(earlier.choice)
    reusable = min(len(before) - 1, len(now.tokens) - max(1, now.anchor.tail)) // block_size * block_size
    if cached >= reusable:
        return None
    shared = shared_prefix(before, now.tokens)
    same = min(shared // block_size * block_size, reusable)
    difference = Difference()
    if (changed := _scope_reason(turn.scope, now.scope)) is not None:
        reason = changed
    elif reusable - same >= same - cached:
        reason, field = _reason(earlier, now, shared, before, tokenizer)
        difference = Difference(field, _excerpt(before, shared, tokenizer), _excerpt(now.tokens, shared, tokenizer))
    else:
        reason = MissReason.RESTARTED if turn.restarts != now.restarts else MissReason.EVICTED
    return CacheMiss(reason, reusable - cached, reusable, difference)


def shared_prefix(one: array[int], other: array[int]) -> int:
    """Returns the number of equal leading tokens, by bisection with slices: a loop over long prompts would hold up the event loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _scope_reason(before: Scope, now: Scope) -> MissReason | None:
    reasons = (MissReason.MODEL, MissReason.ADAPTER, MissReason.SALT, MissReason.GROUP, MissReason.RESTARTED)
    return next((reason for reason, one, other in zip(reasons, before, now, strict=True) if one != other), None)


def _reason(earlier: Found, now: PromptOfTurn, shared: int, before: array[int], tokenizer: Tokenizer) -> tuple[MissReason, str | None]:
    """Returns why the tokens differ after the first `shared`, and the field."""
    turn = earlier.turn
    field = first_difference(turn.parts, now.parts)
    if field is not None:
        return _field_reason(field, turn.parts, now.parts), field
    answer = turn.answers.get(earlier.choice)
    if answer is None or shared < len(turn.prompt) - turn.anchor.tail:
        return MissReason.TEMPLATE, _field_with(_text(before, shared, tokenizer), now.conversation)
    prefix = f"messages[{_num_messages(turn.parts)}]."
    returned = [(name.removeprefix(prefix), digest) for name, digest in now.parts if name.startswith(prefix)]
    if dict(returned).get("role") != dict(answer.parts)["role"]:
        return MissReason.HISTORY, f"{prefix}role"
    field = first_difference(answer.parts, returned)
    if field is not None:
        dropped = field == "reasoning" and field not in dict(returned)
        return MissReason.REASONING if dropped else MissReason.HISTORY, prefix + field
    fields = dict(answer.parts)
    calls = "tool_calls[0].name" in fields
    # The template writes the arguments of calls in its own form.
    if (calls and "reasoning" not in fields) or _same_text(before, now.tokens, shared, tokenizer):
        return MissReason.TOKENS, f"{prefix}{'tool_calls' if calls else 'content'}"
    return MissReason.TEMPLATE, f"{prefix}{'reasoning' if 'reasoning' in fields else 'content'}"


def first_difference(before: Sequence[Part], now: Sequence[Part]) -> str | None:
    """Returns the first field that has changed, is gone or is new; None if all fields of `before` begin `now`."""
    for index, part in enumerate(before):
        if index == len(now):
            return part[0]
        if part != now[index]:
            gone = part[0] not in {name for name, _ in now}
            return part[0] if gone or now[index][0] in {name for name, _ in before} else now[index][0]
    return None


def _field_reason(field: str, before: Sequence[Part], now: Sequence[Part]) -> MissReason:
    if field.startswith("settings."):
        return MissReason.SETTINGS
    if field.startswith("tools["):
        return MissReason.TOOLS
    roles = [dict(parts).get("messages[0].role") for parts in (before, now)]
    if field.startswith("messages[0].") and SYSTEM_ROLE in roles:
        return MissReason.SYSTEM
    if field.endswith("].reasoning") and field not in dict(now):
        return MissReason.REASONING
    return MissReason.SHORTENED if _num_messages(now) < _num_messages(before) else MissReason.HISTORY


def _num_messages(parts: Sequence[Part]) -> int:
    return sum(name.startswith("messages[") and name.endswith("].role") for name, _ in parts)


def _excerpt(tokens: array[int], shared: int, tokenizer: Tokenizer) -> str:
    start = max(0, shared - _CONTEXT_TOKENS)
    return _text(tokens, start, tokenizer)[:_EXCERPT_CHARACTERS]


def _text(tokens: array[int], start: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens[start : start + _EXCERPT_TOKENS].tolist(), skip_special_tokens=False)


def _same_text(before: array[int], now: array[int], shared: int, tokenizer: Tokenizer) -> bool:
    """Whether the texts after the first `shared` tokens begin alike. The last characters may be cut in the middle."""
    one, other = _text(before, shared, tokenizer), _text(now, shared, tokenizer)
    length = min(len(one), len(other)) - 4
    return length > 0 and one[:length] == other[:length]


def _field_with(text: str, conversation: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the field of a conversation in which the longest line of `text` stands; None if it stands in none."""
    snippet = max((line.strip() for line in text.splitlines()), key=len, default="")
    if len(snippet) < _MIN_SNIPPET:
        return None
    return next((field for field, value in _texts(conversation) if snippet in value), None)


def _texts(conversation: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(conversation):
        for name, key in (("reasoning", "reasoning_content"), ("content", "content")):
            if value := message.get(key):
                yield f"messages[{index}].{name}", value
