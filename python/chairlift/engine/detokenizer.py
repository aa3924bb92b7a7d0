"""Decodes a request's tokens incrementally, without partial characters and without partial stop strings."""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer


class TextStream:
    """Decodes the tokens of one answer, a few at a time.

    However the tokens are grouped, the texts of all pushes together equal `Tokenizer.decode` of all tokens, up to the stop string that is
    completed first, or including it. If one character completes several stop strings, the longest counts. Stop strings that the first
    `min_tokens` tokens complete do not count. The cost of a token does not depend on the number of tokens before it.

    After a prompt that ends in text the answer keeps its first space, so that it follows the prompt as the model wrote it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._in_character = False
        """Whether the decoder has the first bytes of a character."""
        self._hidden = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._stops = [_Stop(text, shorter) for text, shorter in _tables(params.stop)]
        self._shows_stop = params.include_stop_str_in_output
        self._too_soon = params.min_tokens if params.stop else 0
        self._held = ""
        # Such a tokenizer puts a space before the first word of a text, and before the first one after a control token.
        begins_text = not len(prompt_token_ids) or prompt_token_ids[-1] in tokenizer.special_token_ids
        self._at_start = tokenizer.strips_first_space and begins_text
        self.stopped: str | None = None
        """The stop string that ended the text, if any. Tokens pushed afterwards are ignored."""
        self.length = 0
        """Characters so far, including text that is held back or cut off by a stop string."""

    def push(self, token_ids: Sequence[int], final: bool) -> str:
        """Returns the new text that cannot be part of a stop string. `final` also returns the text held back."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return self._decode(token_ids, final)
        shown = ""
        if soon := token_ids[: self._too_soon]:
            self._too_soon -= len(soon)
            shown = self._before_stop(self._decode(soon, False), False, counts=False)
        return shown + self._before_stop(self._decode(token_ids[len(soon) :], final), final)

    def _decode(self, token_ids: Sequence[int], final: bool) -> str:
        data = b"".join([self._tokenizer.piece(token) for token in token_ids if token not in self._hidden])
        if self._in_character or not data.isascii():
            text = self._decoder.decode(data, final)
            self._in_character = bool(self._decoder.getstate()[0])
        else:
            text = data.decode()  # in a sixth of the time
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        self.length += len(text)
        return text

    def _before_stop(self, text: str, final: bool, *, counts: bool = True) -> str:
        """Adds text and returns the part that cannot belong to a stop string any more. A complete stop string ends the text if `counts`."""
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            complete = [stop for stop in self._stops if stop.takes(character)]
            if complete and counts:
                longest = max(complete, key=lambda stop: len(stop.text))
                self.stopped = longest.text
                shown, self._held = self._held[: end if self._shows_stop else end - len(longest.text)], ""
                return shown
        kept = 0 if final else max(stop.matched for stop in self._stops)
        at = len(self._held) - kept
        shown, self._held = self._held[:at], self._held[at:]
        return shown


class _Stop:
    """Tracks how many characters of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str, shorter: array[int]) -> None:
        self.text, self._shorter = text, shorter
        self.matched = 0

    def takes(self, character: str) -> bool:
        """Advances by `character` and returns whether it completes the stop string."""
        self.matched = _next(self.text, self._shorter, self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[self.matched]
        return True


@lru_cache(16)
def _tables(stops: tuple[str, ...]) -> list[tuple[str, array[int]]]:
    """Stop strings, each with a table: at n, the length of the next shorter prefix that its first n characters also end with.

    They are cached, because all answers of a request have the same: there may be a thousand with 16 strings of 1,024 characters.
    """
    tables = []
    for text in stops:
        length, shorter = 0, array("H", [0, 0])
        for character in text[1:]:
            length = _next(text, shorter, length, character)
            shorter.append(length)
        tables.append((text, shorter))
    return tables


def _next(text: str, shorter: array[int], length: int, character: str) -> int:
    while length and text[length] != character:
        length = shorter[length]
    return length + (text[length] == character)
