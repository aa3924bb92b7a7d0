"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
"""Regular expressions that split text into words before merging, by the file's `tokenizer.ggml.pre`."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def write_tokenizer(file: GGUFFile, out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json for a GGUF file to the directory `out`.

    A tokenizer.json beside the file is copied instead of building one. Raises UnsupportedModel for a vocabulary of an unknown kind or with
    contradictory data.
    """
    beside = file.path.parent / "tokenizer.json"
    if beside.is_file():
        shutil.copyfile(beside, out / "tokenizer.json")
    else:
        build_tokenizer(file).save(str(out / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "model_max_length": file.size(f"{file.get('general.architecture', str)}.context_length"),
        "added_tokens_decoder": {},
    }
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if token := _role(file, name):
            config[f"{role}_token"] = token[0]
            # Lets callers read the id of a role's token without loading the tokenizer.
            config["added_tokens_decoder"][str(token[1])] = {"content": token[0], "special": True}
    if template := file.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def turn_end_ids(file: GGUFFile) -> list[int]:
    """Returns the tokens that end an answer: end of sequence, and the end-of-turn tokens of chat models."""
    ids = [token[1] for name in ("eos", "eot", "eom") if (token := _role(file, name))]
    tokens, kinds = file.get("tokenizer.ggml.tokens", list) or [], file.get("tokenizer.ggml.token_type", list) or []
    for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and text in _TURN_ENDS:
            ids.append(index)
    return list(dict.fromkeys(ids))


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer that the file's metadata describes."""
    from tokenizers import AddedToken

    tokens, kinds = file.get("tokenizer.ggml.tokens", list) or [], file.get("tokenizer.ggml.token_type", list) or []
    vocab = {token: index for index, token in enumerate(tokens)}
    if not vocab or len(vocab) != len(tokens) or (kinds and len(kinds) != len(tokens)):
        raise _refused(file, "its vocabulary is missing or contradicts itself")
    model, split = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str) or "default"
    try:
        if model == "gpt2" and split in _SPLITS:
            tokenizer = _byte_level(vocab, file.get("tokenizer.ggml.merges", list) or [], _SPLITS[split])
        elif model == "llama":
            tokenizer = _sentencepiece(vocab, file)
        else:
            raise _refused(file, f"its tokenizer is of the kind {model!r} / {split!r}")
        for special, chosen in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
            added = [token for token, kind in zip(tokens, kinds, strict=False) if token and kind in chosen]
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
        _add_ends(tokenizer, file)
    except UnsupportedModel:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise _refused(file, f"its vocabulary is not sound ({error})") from None
    return tokenizer


def _refused(file: GGUFFile, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{file.path}: {reason}; put the model's own tokenizer.json beside the file")


def _byte_level(vocab: dict[str, int], lines: list[str], split: str) -> Tokenizer:
    """Builds a byte-level BPE tokenizer, as in GPT-2, SmolLM, Llama 3 and Qwen."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    # A merge is two pieces separated by a space; neither is empty.
    merges = [(line[:at], line[at + 1 :]) for line in lines for at in (line.index(" ", 1),)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama3"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "gpt2":
        tokenizer.pre_tokenizer = by_gpt2
    elif split == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2])
    else:
        words = _LLAMA3_WORDS if split == "llama3" else _QWEN2_WORDS
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), whole])
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: dict[str, int], file: GGUFFile) -> Tokenizer:
    """Builds a SentencePiece BPE tokenizer with byte fallback, as in Llama 2 and early Mistral."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, unknown = file.get("tokenizer.ggml.scores", list) or [], _role(file, "unknown")
    if len(scores) != len(vocab):
        raise _refused(file, "its vocabulary has no scores")
    model = models.BPE(vocab=vocab, merges=_merges(vocab, scores), fuse_unk=True, byte_fallback=True)
    if unknown:
        model.unk_token = unknown[0]
    tokenizer = Tokenizer(model)
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the merges that are equivalent to SentencePiece's scores: every split of a token into two tokens, best token first."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((-scores[index], index, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _role(file: GGUFFile, name: str) -> tuple[str, int] | None:
    """Returns the text and id of the token with a role like `bos`."""
    tokens, token = file.get("tokenizer.ggml.tokens", list) or [], file.get(f"tokenizer.ggml.{name}_token_id", int)
    return (tokens[token], token) if token is not None and token < len(tokens) else None


def _adds(file: GGUFFile, name: str) -> bool:
    """Whether each prompt begins with `bos` or ends with `eos`."""
    said = file.get(f"tokenizer.ggml.add_{name}_token", bool)
    llama3 = _SPLITS.get(file.get("tokenizer.ggml.pre", str) or "") == "llama3"
    return name == "bos" and (llama3 or file.get("tokenizer.ggml.model", str) == "llama") if said is None else said


def _add_ends(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Makes the tokenizer add `bos` before or `eos` after each prompt, as the file says."""
    from tokenizers import processors

    ends = {name: token for name in ("bos", "eos") if _adds(file, name) and (token := _role(file, name))}
    if ends:
        # `$` begins a variable in a template, so the template refers to the tokens by plain names.
        single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ends]
        special = [{"id": name, "ids": [index], "tokens": [text]} for name, (text, index) in ends.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
