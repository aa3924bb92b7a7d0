"""Builds tokenizers for SentencePiece's vocabularies: byte-pair encoding and unigram."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"
"""SentencePiece's mark for a space."""


class Kind(IntEnum):
    """The type of a token, as SentencePiece and GGUF files number it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary with a score for each token, and the rules that normalise a text before it is split."""

    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: int | None
    """The id of the token for what no other token covers."""
    adds_space: bool
    """Whether a text gets a space in front."""
    merges_spaces: bool = False
    """Whether runs of spaces become one, and spaces at both ends are removed."""
    charsmap: bytes = b""
    """SentencePiece's compiled table of replacements, such as NFKC; empty for none."""

    def __post_init__(self) -> None:
        """Raises ValueError for data that contradict each other."""
        if len(self.scores) != len(self.tokens):
            raise ValueError("its vocabulary has no scores")
        if len(self.kinds) != len(self.tokens):
            raise ValueError("its vocabulary has no types of tokens")
        if not all(map(math.isfinite, self.scores)):
            raise ValueError("a token's score is no number")


def merged(vocabulary: Vocabulary) -> Tokenizer:
    """Builds a tokenizer that merges pairs with byte fallback, as in Llama 2 and Gemma."""
    from tokenizers import Tokenizer, models

    matched = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.kinds[index] in (Kind.NORMAL, Kind.UNUSED)}
    model = models.BPE(
        vocab={token: index for index, token in enumerate(vocabulary.tokens)},
        merges=merges(matched, vocabulary.scores),
        fuse_unk=True,
        byte_fallback=True,
    )
    if vocabulary.unknown is not None:
        model.unk_token = vocabulary.tokens[vocabulary.unknown]
    tokenizer = Tokenizer(model)
    _add_text_rules(tokenizer, vocabulary)
    return tokenizer


def unigram(vocabulary: Vocabulary) -> Tokenizer:
    """Builds a tokenizer that finds the most likely pieces, as in T5 and XLM-RoBERTa. Raises ValueError without an unknown token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    if vocabulary.unknown is None:
        raise ValueError("its vocabulary has no unknown token")
    pieces = list(zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True))
    has_bytes = Kind.BYTE in vocabulary.kinds
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocabulary.unknown, byte_fallback=has_bytes))
    _add_text_rules(tokenizer, vocabulary)
    if has_bytes:
        # A text that spells a byte token, such as <0x41>, is no byte.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=<)(?=0x[0-9A-F]{2}>)"), "isolated")
    return tokenizer


def merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the merges that are equivalent to scores: every split of a token into two tokens, best token first.

    `vocab` are ids by text, and `scores` are by id.
    """
    found: list[tuple[str, str]] = []
    lengths = set(map(len, vocab))  # so that few parts of a very long token are copied
    for token in sorted(vocab, key=lambda token: (-scores[vocab[token]], vocab[token])):
        splits = (at for at in range(1, len(token)) if at in lengths and len(token) - at in lengths)
        pairs = [(token[:at], token[at:]) for at in splits if token[:at] in vocab and token[at:] in vocab]
        found += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return found


def _add_text_rules(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds what happens to a text before it is split, and to tokens when they become text."""
    from tokenizers import Regex, decoders, normalizers

    steps: list[Any] = []
    if vocabulary.charsmap:
        _check_charsmap(vocabulary.charsmap)
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.merges_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.adds_space:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if vocabulary.adds_space else back)


def _check_charsmap(charsmap: bytes) -> None:
    """Raises ValueError for a table of replacements that would make the tokenizers package look beyond its end.

    The table is the size of a trie in bytes, the trie as a double array of 32-bit units (https://github.com/s-yata/darts-clone), and
    replacements that end with NUL.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units, texts = array("I"), charsmap[4 + size :]
    if not texts.endswith(b"\0") or size < 4 or size % 4:
        raise ValueError("its table of replacements is cut off")
    units.frombytes(charsmap[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    starts = {at for at, byte in enumerate(texts) if byte & 0xC0 != 0x80}  # of characters in UTF-8
    for index, unit in enumerate(units):
        leads_to = unit & 0x7FFFFFFF if unit >> 31 else (index ^ (unit >> 10 << ((unit & 0x200) >> 6))) | 0xFF
        if leads_to not in starts if unit >> 31 else leads_to >= len(units):
            raise ValueError("its table of replacements refers to what is not in it")
