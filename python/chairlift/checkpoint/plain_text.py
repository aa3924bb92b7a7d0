"""Makes tokenizers that read control tokens in a text as plain text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def plain(backend: Tokenizer) -> Tokenizer:
    """Returns a copy of `backend` that gives no text the id of a control token.

    The tokenizers package has a switch for this, which turns off the search for added tokens. A vocabulary may still hold their texts as
    pieces: a unigram model takes them like any others, and a BPE model does so if they can be merged, or are whole words. In the copy such
    a piece has a random name, which no text has.
    """
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    control = {token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special}
    state = json.loads(copy.to_str())
    texts = set(control.values())
    is_merged = any("".join(pair) in texts for pair in _merges(state["model"]))
    if type(copy.model).__name__ != "Unigram" and not _whole_texts(copy) and not _found(copy, control) and not is_merged:
        return copy
    pieces = {piece if isinstance(piece, str) else piece[0] for piece in state["model"]["vocab"]}
    # Control tokens that are no pieces stay, because the ids of the added tokens behind them are counted from theirs.
    state["added_tokens"] = [added for added in state["added_tokens"] if not added["special"] or added["content"] not in pieces]
    state["post_processor"] = None
    _rename(state["model"], control)
    copy = type(backend).from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _whole_texts(backend: Tokenizer) -> bool:
    """Whether a BPE model takes whole words that are not bytes, which may be the texts of control tokens."""
    return bool(getattr(backend.model, "ignore_merges", False)) and "ByteLevel" not in str(backend.pre_tokenizer)


def _found(backend: Tokenizer, control: dict[int, str]) -> bool:
    """Whether the text of a control token becomes a control token on its own."""
    encodings = backend.encode_batch_fast(list(control.values()), add_special_tokens=False)
    return any(control.keys() & set(encoding.ids) for encoding in encodings)


def _rename(model: dict[str, Any], control: dict[int, str]) -> None:
    """Gives the pieces of control tokens names that no text has. A BPE model's unknown token keeps its name, which the model refers to."""
    secret = secrets.token_hex(16)
    renamed = {text: f" {secret}{text}" for text in control.values() if text != model.get("unk_token")}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
        return
    model["vocab"] = {renamed.get(text, text): token for text, token in model["vocab"].items()}
    model["merges"] = [pair for pair in _merges(model) if not renamed.keys() & {*pair, "".join(pair)}]


def _merges(model: dict[str, Any]) -> Iterator[list[str]]:
    """Yields the pairs that a BPE model merges."""
    yield from (pair if isinstance(pair, list) else pair.split(" ") for pair in model.get("merges", []))
