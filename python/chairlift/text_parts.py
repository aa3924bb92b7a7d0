"""Cuts a text into parts that have the same tokens together as on their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chairlift.alternatives import alternatives

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_PART = 512
"""Least characters of a part, except the last."""


class TextParts:
    """Where the texts of one vocabulary can be cut.

    The tokenizers package first finds the added tokens in a text, and tokenizes what lies between them piece by piece, so a text can be cut
    after a control token. The exceptions are tokens that look at their neighbours, and vocabularies that treat the beginning of a text in
    another way.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """Reads the added tokens of a vocabulary. Texts of one that allows no cut stay whole."""
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content and not token.normalized]
        self._ends = {token.content for token in added if token.special and not token.rstrip and token.content.strip() == token.content}
        looks_around = any(token.single_word for token in added)
        begins_otherwise = b'"prepend_scheme":"first"' in (backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b"")
        if looks_around or begins_otherwise or not self._ends:
            self._added = None
        else:
            self._added = re.compile(alternatives([token.content for token in added]))

    def of(self, text: str) -> Iterator[str]:
        """Yields the parts of a text. Each begins where the one before it ends, so texts with one beginning have the same first parts."""
        start = 0
        for found in self._added.finditer(text) if self._added is not None else ():
            if found.end() - start >= MIN_PART and found.group() in self._ends:
                yield text[start : found.end()]
                start = found.end()
        if start < len(text):
            yield text[start:]
