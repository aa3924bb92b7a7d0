"""Reads tekken.json, the tokenizer of Mistral's own checkpoints."""

from __future__ import annotations

import base64
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.byte_alphabet import BYTE_CHARACTERS
from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.pre_tokenizers import split_into_bytes
from chairlift.checkpoint.sentencepiece import merges
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("chairlift")

_CONTROL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The control tokens of files that list none, as in mistral-common."""
_PATTERN = re.compile(rb'"pattern"\s*:\s*("(?:[^"\\]|\\.)*")')
_HEAD = 1 << 16
"""Bytes of a tekken.json in which its settings are, before the tokens."""
_MAX_CONTROL = 1 << 16
"""Most control tokens of a file; Mistral's have 1000."""


def tekken_tokenizer(path: Path) -> Tokenizer:
    """Builds the tokenizer of a tekken.json. Raises UnsupportedModel if it cannot be read.

    Tokens are bytes with a rank, in the order in which pairs are merged; control tokens come before them.
    """
    from tokenizers import AddedToken, Tokenizer, models

    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        control, tokens = _tokens(file)
        vocab = {token: index for index, token in enumerate([*control, *tokens])}
        ranked = {token: index for token, index in vocab.items() if index >= len(control)}
        if len(vocab) != len(control) + len(tokens):
            raise ValueError("a token occurs twice")
        ranks = [-float(index) for index in range(len(vocab))]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges(ranked, ranks), ignore_merges=True))
        split_into_bytes(tokenizer, [file["config"]["pattern"]])
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UnsupportedModel(f"{path} cannot be read as a tekken.json ({error}): {remedy(path)}") from None
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def split_as_tekken(tokenizer: Tokenizer, file: Path) -> None:
    """Makes the tokenizer of a tokenizer.json split texts as the tekken.json beside it, if there is one.

    Those of several Mistral models were converted with another rule, and have other tokens than in training.
    """
    tekken = file.with_name("tekken.json")
    if not tekken.is_file():
        return
    with tekken.open("rb") as opened:
        found = _PATTERN.search(opened.read(_HEAD))
    state = tokenizer.pre_tokenizer.__getstate__() if tokenizer.pre_tokenizer else b""
    pattern = json.loads(found[1]) if found else ""
    if not pattern or b"ByteLevel" not in state or json.dumps(pattern, ensure_ascii=False).encode() in state:
        return
    split_into_bytes(tokenizer, [pattern])
    log.warning("%s splits texts by another rule than the tekken.json beside it, whose rule is used", file)


def _tokens(file: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the control tokens, and the other tokens in GPT-2's alphabet for bytes, each by its rank."""
    config = file["config"]
    num_control, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    if not 0 <= num_control <= _MAX_CONTROL or size - num_control > len(file["vocab"]):
        raise ValueError(f"it has no {size} tokens, {num_control} of them control tokens")
    listed = file.get("special_tokens") or [{"rank": rank, "token_str": text} for rank, text in enumerate(_CONTROL_TOKENS)]
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    entries = sorted(file["vocab"][: size - num_control], key=lambda entry: int(entry["rank"]))
    if [entry["rank"] for entry in entries] != list(range(size - num_control)) or not set(named) <= set(range(num_control)):
        raise ValueError(f"its ranks are not those of {size} tokens, {num_control} of them control tokens")
    tokens = ["".join(BYTE_CHARACTERS[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in entries]
    return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(num_control)], tokens
