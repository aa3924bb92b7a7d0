"""Reads tokenizer.model, the file of a SentencePiece model, without the sentencepiece package."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.alternatives import alternatives
from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.sentencepiece import Kind, Vocabulary, merged, unigram
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNIGRAM, _PAIRS = 1, 2
_VARINT, _EIGHT_BYTES, _TEXT, _FOUR_BYTES = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
"""Fields of a model."""
_TEXT_OF, _SCORE_OF, _KIND_OF = 1, 2, 3
"""Fields of a piece."""
_MODEL_TYPE, _SUFFIX = 3, 24
"""Fields of the trainer's settings: the kind of model, and whether ▁ follows words."""
_CHARSMAP, _ADDS_SPACE, _MERGES_SPACES, _MARKS_SPACES = 2, 3, 4, 5
"""Fields of the normaliser's settings."""


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """Builds the tokenizer of a tokenizer.model. Raises UnsupportedModel for a damaged file and for a model of words or characters.

    Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Texts get the ids that SentencePiece gives,
    with one difference: a text between two control tokens is normalised as a text of its own.
    """
    from tokenizers import AddedToken, Regex, pre_tokenizers

    try:
        is_unigram, vocabulary = _read(path.read_bytes())
        tokenizer = unigram(vocabulary) if is_unigram else merged(vocabulary)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UnsupportedModel(f"{path} cannot be read as a SentencePiece model ({error}): {remedy(path)}") from None
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (Kind.CONTROL, Kind.UNKNOWN)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    if defined := [token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.USER_DEFINED]:
        # SentencePiece finds these in the normalised text and takes the longest, whole.
        isolated = pre_tokenizers.Split(Regex(alternatives(defined)), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([isolated, tokenizer.pre_tokenizer] if tokenizer.pre_tokenizer else [isolated])
        if not is_unigram:
            tokenizer.model.ignore_merges = True
    return tokenizer


def _read(data: bytes) -> tuple[bool, Vocabulary]:
    """Returns whether the model is a unigram model, and its vocabulary. Raises ValueError for invalid data."""
    model = list(_fields(data))
    pieces = [dict(_fields(value)) for field, value in model if field == _PIECES]
    trainer, normalizer = (
        {field: value for part, value in model if part == wanted for field, value in _fields(value)} for wanted in (_TRAINER, _NORMALIZER)
    )
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _PAIRS):
        raise ValueError(f"a model of type {kind}, which is neither unigram nor BPE")
    if trainer.get(_SUFFIX, 0) or not normalizer.get(_MARKS_SPACES, 1):
        raise ValueError("it marks spaces in another way than with ▁ before words")
    kinds = [piece.get(_KIND_OF, Kind.NORMAL) for piece in pieces]
    tokens = [str(piece.get(_TEXT_OF, b""), "utf-8") for piece in pieces]
    if not tokens or len(set(tokens)) != len(tokens):
        raise ValueError("its vocabulary is missing or contradicts itself")
    return kind == _UNIGRAM, Vocabulary(
        tokens=tokens,
        scores=[struct.unpack("<f", piece.get(_SCORE_OF, bytes(4)))[0] for piece in pieces],
        kinds=kinds,
        unknown=kinds.index(Kind.UNKNOWN) if Kind.UNKNOWN in kinds else None,
        adds_space=bool(normalizer.get(_ADDS_SPACE, 1)),
        merges_spaces=bool(normalizer.get(_MERGES_SPACES, 1)),
        charsmap=normalizer.get(_CHARSMAP, b""),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message of protocol buffers: an integer, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire)
        if wire == _TEXT:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"{size} bytes at byte {at} of {len(data)}" if size is not None else f"a field of unknown type {wire}")
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the integer at `at`, seven bits a byte, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError(f"an integer at byte {at} has no end")
