"""Gives returned answers the very tokens that the model generated.

Clients return answers as text and tool calls. Rendered and tokenized again, the same text can have other tokens, and the same arguments
another form (spaces, escapes, `1e2`), from where on the prefix cache finds nothing. A returned answer that means what the generated tokens
mean gets these tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.server.chat.prompt_parts import normal_json
from chairlift.server.turns import Anchor, Found

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

Parse = Callable[[str], list[str | ToolCallDelta]]
"""Separates a whole answer's text into content and tool calls."""


def anchor_of(rendered: array[int], tokenizer: Tokenizer) -> Anchor:
    """Returns where in a prompt the answer's message begins. Later prompts of the conversation are rendered alike up to there."""
    controls = tokenizer.special_token_ids
    begin = next((index + 1 for index in range(len(rendered) - 1, -1, -1) if rendered[index] in controls), 0)
    return Anchor(begin, _digest(rendered[:begin]), len(rendered) - begin)


def exact_tokens(found: Found, rendered: array[int], tokenizer: Tokenizer, parse: Parse) -> tuple[array[int], int] | None:
    """Returns a prompt with the tokens of an earlier turn and its answer in the place of those that were `rendered`, and their number.

    None if the prompt does not continue the turn, or returns its answer with another meaning.
    """
    turn, answer = found.turn, found.turn.answers.get(found.choice)
    anchor = turn.anchor
    if answer is None or _digest(rendered[: anchor.rendered]) != anchor.digest:
        return None
    ends = tokenizer.eos_token_ids
    end = next((index for index in range(anchor.rendered, len(rendered)) if rendered[index] in ends), None)
    if end is None:
        return None
    answered = answer.tokens[:-1] if answer.tokens and answer.tokens[-1] in ends else answer.tokens
    generated = turn.prompt[len(turn.prompt) - anchor.tail :] + answered
    returned = rendered[anchor.rendered : end]
    if returned != generated and not _same_meaning(_text(returned, tokenizer), _text(generated, tokenizer), parse):
        return None
    exact = turn.prompt + answered
    return exact + rendered[end:], len(exact)


def before_stop(tokens: array[int], stop: str, tokenizer: Tokenizer) -> array[int]:
    """Returns an answer's tokens before the stop string at its end, which the client does not get and cannot return.

    None of them if the tokens do not have the string, because a control token that the client does not see divides it.
    """
    wanted, text = stop.encode(), b""
    for length in reversed(range(len(tokens))):
        # Only as much as a stop string that begins in this token needs: the time is linear, also if there is none.
        text = tokenizer.piece(tokens[length]) + text[: len(wanted) - 1]
        if wanted in text:
            return tokens[:length]
    return tokens[:0]


def _digest(tokens: array[int]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _text(tokens: array[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def _same_meaning(one: str, other: str, parse: Parse) -> bool:
    """Whether two texts of an answer are equal, or equal but for the form of tool calls."""
    return one == other or _meaning(parse(one)) == _meaning(parse(other))


def _meaning(parts: list[str | ToolCallDelta]) -> list[Any]:
    """Returns an answer's content, and each call's name and arguments as JSON in normal form. White space around calls means nothing."""
    content = "".join(part for part in parts if isinstance(part, str)).strip()
    calls: dict[int, list[str]] = {}
    for part in parts:
        if not isinstance(part, str):
            call = calls.setdefault(part.index, ["", ""])
            call[0] += part.name or ""
            call[1] += part.arguments
    return [content, *([name, _normal(arguments)] for name, arguments in calls.values())]


def _normal(arguments: str) -> str:
    try:
        return json.dumps(normal_json(json.loads(arguments)))
    except (ValueError, RecursionError):  # arguments that a model wrote may be invalid JSON
        return arguments
