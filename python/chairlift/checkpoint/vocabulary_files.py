"""Builds the tokenizers of checkpoints that have vocab.json with merges.txt, or vocab.txt, and no tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS, split_into_bytes
from chairlift.checkpoint.tokenizer_settings import bert_normalizer
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>"}
_ROBERTA |= {"pad_token": "<pad>", "mask_token": "<mask>"}


@dataclass(frozen=True, slots=True)
class Family:
    """A class of tokenizers in transformers: its tokens with a role, and the name of its pre-tokenizer, None for WordPiece.

    `between` is how many separators stand between two texts; with 0 nothing stands around a text.
    """

    roles: Mapping[str, str]
    pre: str | None = None
    between: int = 0


FAMILIES = {
    "vocab.json": {
        "qwen2": Family(dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"), "qwen2"),
        "gpt2": Family(dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"), "gpt-2"),
        "roberta": Family(_ROBERTA, "gpt-2", 2),
    },
    "vocab.txt": dict.fromkeys(("bert", "distilbert", "electra"), Family(_BERT, None, 1)),
}
"""The families by the name of a file and by the beginning of the class's name, or of `model_type`, in small letters."""


def family_of(file: Path, named: str) -> Family:
    """Returns the family of a file by the class of its tokenizer, or by the type of its model. Raises UnsupportedModel for another one."""
    families = FAMILIES[file.name]
    found = next((family for name, family in families.items() if named.lower().startswith(name)), None)
    if found is None:
        known = ", ".join(families)
        raise UnsupportedModel(f"{file} belongs to {named}, for which the model's tokenizer.json is needed (there is code for {known})")
    return found


def vocabulary_tokenizer(file: Path, family: Family, config: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of a file. `config` is its tokenizer_config.json. Raises UnsupportedModel if it cannot be read."""
    try:
        return _words(file, family, config) if family.pre is None else _pairs(file, family, family.pre)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise UnsupportedModel(f"{file} cannot be read as a vocabulary ({error}): is the download complete?") from None


def _pairs(file: Path, family: Family, pre: str) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers

    rules = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE.from_file(str(file), str(file.with_name("merges.txt"))))
    if rules.composes:
        tokenizer.normalizer = normalizers.NFC()
    split_into_bytes(tokenizer, rules.patterns)
    _surround(tokenizer, family)
    return tokenizer


def _words(file: Path, family: Family, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece.from_file(str(file), unk_token=family.roles["unk_token"]))
    tokenizer.normalizer = bert_normalizer(config)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    _surround(tokenizer, family)
    return tokenizer


def _surround(tokenizer: Tokenizer, family: Family) -> None:
    """Makes the tokenizer add the first token and the separators to a text, and to a pair of texts."""
    from tokenizers import processors

    if not family.between:
        return
    special = [{"id": role, "ids": [tokenizer.token_to_id(family.roles[f"{role}_token"])], "tokens": [role]} for role in ("cls", "sep")]
    pair = ["cls", "$A", *["sep"] * family.between, "$B:1", "sep:1"]
    tokenizer.post_processor = processors.TemplateProcessing(single=["cls", "$A", "sep"], pair=pair, special_tokens=special)
