"""Makes tokenizers that read control tokens in a text as plain text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def plain(backend: Tokenizer) -> Tokenizer:
    """Returns a copy of `backend` that gives no text the id of a control token.

    The tokenizers package has a switch for this, which turns off the search for added tokens. A vocabulary may still hold their texts as
    pieces: a unigram model takes them like any others, and a BPE model does so if they can be merged, or are whole words. In the copy such
    a piece has a space in its name, which no text has once its spaces are marked or its bytes are spelled.
    """
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    control = {token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special}
    if type(copy.model).__name__ != "Unigram" and not _whole_texts(copy) and not _found(copy, control):
        return copy
    state = json.loads(copy.to_str())
    state["added_tokens"] = [added for added in state["added_tokens"] if not added["special"]]
    state["post_processor"] = None
    _rename(state["model"], control)
    copy = type(backend).from_str(json.dumps(state))
    return copy


def _whole_texts(backend: Tokenizer) -> bool:
    """Whether a BPE model takes whole words that are not bytes, which may be the texts of control tokens."""
    return bool(getattr(backend.model, "ignore_merges", False)) and "ByteLevel" not in str(backend.pre_tokenizer)


def _found(backend: Tokenizer, control: dict[int, str]) -> bool:
    """Whether the text of a control token becomes a control token."""
    encodings = backend.encode_batch_fast(list(control.values()), add_special_tokens=False)
    return any(control.keys() & set(encoding.ids) for encoding in encodings)


def _rename(model: dict[str, Any], control: dict[int, str]) -> None:
    """Gives the pieces of control tokens names that no text has. A BPE model's unknown token keeps its name, which the model refers to."""
    renamed = {text: f" {text}" for text in control.values() if text != model.get("unk_token")}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
        return
    model["vocab"] = {renamed.get(text, text): token for text, token in model["vocab"].items()}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model.get("merges", []))
    model["merges"] = [pair for pair in pairs if not renamed.keys() & {*pair, "".join(pair)}]
