"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.end_tokens import end_tokens
from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("chairlift")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask"}
"""Roles of tokens, and their names in keys of GGUF files."""
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss's marks of a message's parts: they are text of an answer, whatever type the file gives them."""


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
    for role in _ROLES:
        if token := _role(file, role):
            config[f"{role}_token"] = token[0]
            # Lets callers read the id of a role's token without loading the tokenizer.
            config["added_tokens_decoder"][str(token[1])] = {"content": token[0], "special": True}
    if templates := _chat_templates(file):
        config["chat_template"] = templates
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _chat_templates(file: GGUFFile) -> list[dict[str, str]]:
    """Returns the file's chat templates by name, as tokenizer_config.json lists them."""
    key = "tokenizer.chat_template"
    named = {"default": key} | {name.removeprefix(f"{key}."): name for name in file.keys(f"{key}.")}
    return [{"name": name, "template": text} for name, key in named.items() if (text := file.get(key, str))]


def end_token_ids(file: GGUFFile, stop: Collection[str] = ()) -> list[int]:
    """Returns the tokens that end an answer: those with such a role, those that the file lists, and those with a known text.

    Texts of `stop` that are control tokens count too; others are reported.
    """
    roles = [token[1] for name in ("eos", "eot", "eom") if (token := _role(file, name))]
    tokens = file.get("tokenizer.ggml.tokens", list) or []
    listed = [token for token in file.get("tokenizer.ggml.eos_token_ids", list) or [] if type(token) is int and 0 <= token < len(tokens)]
    known = end_tokens({text: index for index, text in enumerate(tokens)})
    controls = {tokens[index]: index for index, kind in enumerate(file.get("tokenizer.ggml.token_type", list) or []) if kind == _CONTROL}
    known |= {controls[text] for text in stop if text in controls}
    if others := [text for text in stop if text not in controls]:
        log.warning("%s: a stop text that is no control token is not used, send it with each request as `stop`: %r", file.path, others)
    return list(dict.fromkeys((*roles, *listed, *sorted(known))))


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer that the file's metadata describes."""
    tokens, kinds = file.get("tokenizer.ggml.tokens", list) or [], file.get("tokenizer.ggml.token_type", list) or []
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if not vocab or len(vocab) != len(tokens) or (kinds and len(kinds) != len(tokens)):
        raise _refused(file, "its vocabulary is missing or contradicts itself")
    try:
        model, rules = file.get("tokenizer.ggml.model", str), _rules(file)
        if rules is PRE_TOKENIZERS["default"]:
            log.warning("%s names no pre-tokenizer, so its text may be split in another way than in training: convert it again", file.path)
        if rules is not None:
            tokenizer = _pair_merging(vocab, file.get("tokenizer.ggml.merges", list) or [], rules)
        elif model == "llama":
            tokenizer = _sentencepiece(vocab, file)
        elif model == "bert":
            tokenizer = _wordpiece(tokens, kinds, file)
        else:
            raise _refused(file, f"its tokenizer is of the kind {model!r} / {file.get('tokenizer.ggml.pre', str)!r}")
        _add_tokens(tokenizer, tokens, kinds, set(end_token_ids(file)))
        _add_ends(tokenizer, file)
    except UnsupportedModel:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise _refused(file, f"its vocabulary is not sound ({error})") from None
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], ends: set[int]) -> None:
    """Marks the tokens that are found in a text before it is split. Tokens that end an answer are control tokens, whatever their type."""
    from tokenizers import AddedToken

    special = {index for index, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)} | ends
    special -= {index for index, token in enumerate(tokens) if token in _SHOWN}
    shown = {index for index, kind in enumerate(kinds) if kind == _USER_DEFINED or tokens[index] in _SHOWN} - special
    for chosen, is_special in ((special, True), (shown, False)):
        tokenizer.add_tokens([AddedToken(tokens[index], normalized=False, special=is_special) for index in sorted(chosen)])


def _rules(file: GGUFFile) -> PreTokenizer | None:
    """Returns how a vocabulary with merges splits text; None for other kinds of vocabularies, and for an unknown name."""
    model, name = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    if model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    return PRE_TOKENIZERS.get(name or "default") if model == "gpt2" else None


def _refused(file: GGUFFile, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{file.path}: {reason}; put the model's own tokenizer.json beside the file")


def _pair_merging(vocab: dict[str, int], lines: list[str], rules: PreTokenizer) -> Tokenizer:
    """Builds a BPE tokenizer with merges, over bytes as in GPT-2, or over characters with byte fallback as in Gemma 4."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    # A merge is two pieces separated by a space; neither is empty.
    merges = [(line[:at], line[at + 1 :]) for line in lines for at in (line.index(" ", 1),)]
    by_text = rules.spaces_as_text
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words, byte_fallback=by_text, fuse_unk=by_text))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    if by_text:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    if rules.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _wordpiece(tokens: list[str], kinds: list[int], file: GGUFFile) -> Tokenizer:
    """Builds a WordPiece tokenizer as in BERT. Files mark the tokens that begin a word with ▁, instead of ## on the others."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    control = [kind in (_UNKNOWN, _CONTROL) for kind in kinds] or [False] * len(tokens)
    texts = [
        token if special else token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"
        for token, special in zip(tokens, control, strict=True)
    ]
    unknown = _role(file, "unk")
    model = models.WordPiece(
        vocab={text: index for index, text in enumerate(texts)}, unk_token=unknown[0] if unknown else "[UNK]", max_input_chars_per_word=100
    )
    tokenizer = Tokenizer(model)
    lowercase = file.get("tokenizer.ggml.normalizer.lowercase", bool) is not False
    accents = file.get("tokenizer.ggml.normalizer.strip_accents", bool)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase if accents is None else accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    return tokenizer


def _sentencepiece(vocab: dict[str, int], file: GGUFFile) -> Tokenizer:
    """Builds a SentencePiece BPE tokenizer with byte fallback, as in Llama 2 and early Mistral."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, unknown = file.get("tokenizer.ggml.scores", list) or [], _role(file, "unk")
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


def _role(file: GGUFFile, role: str) -> tuple[str, int] | None:
    """Returns the text and id of the token with a role like `bos`."""
    tokens, token = file.get("tokenizer.ggml.tokens", list) or [], file.get(f"tokenizer.ggml.{_ROLES.get(role, role)}_token_id", int)
    return (tokens[token], token) if token is not None and token < len(tokens) else None


def _adds(file: GGUFFile, role: str) -> bool:
    """Whether each prompt begins with `bos`, or ends with `eos` or `sep`."""
    said, model, rules = file.get(f"tokenizer.ggml.add_{role}_token", bool), file.get("tokenizer.ggml.model", str), _rules(file)
    if said is not None and (role, model) != ("bos", "gemma4"):  # published Gemma 4 files say False, and mean True
        return said
    usual = {
        "bos": model in ("llama", "bert") or (rules is not None and rules.adds_bos),
        "sep": model == "bert" or (rules is not None and rules.adds_sep),
    }
    return usual.get(role, False)


def _add_ends(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Makes the tokenizer add `bos` before, and `eos` or `sep` after each prompt, as the file says."""
    from tokenizers import processors

    ends = {name: token for name in ("bos", "eos", "sep") if _adds(file, name) and (token := _role(file, name))}
    if ends:
        # `$` begins a variable in a template, so the template refers to the tokens by plain names.
        single = [name for name in ("bos", "$A", "eos", "sep") if name == "$A" or name in ends]
        special = [{"id": name, "ids": [index], "tokens": [text]} for name, (text, index) in ends.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
