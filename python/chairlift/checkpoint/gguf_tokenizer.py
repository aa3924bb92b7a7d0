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
from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS, Alphabet, PreTokenizer, split_into_bytes
from chairlift.checkpoint.sentencepiece import SPACE, Kind, Vocabulary, merged, merges, unigram
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("chairlift")

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask"}
"""Roles of tokens, and their names in keys of GGUF files."""
_USUAL_ROLES = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "sep": 102, "unk": 100, "pad": 0},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
"""Roles by kind of tokenizer, for files that do not say, as in llama.cpp."""
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss's marks of a message's parts: they are text of an answer, whatever type the file gives them."""


def write_tokenizer(file: GGUFFile, out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json for a GGUF file to the directory `out`.

    A tokenizer.json beside the file is copied instead of building one. Raises UnsupportedModel for a vocabulary of an unknown kind or with
    contradictory data.
    """
    beside = file.path.parent / "tokenizer.json"
    if beside.is_file():
        log.info("%s: its tokens are those of %s", file.path, beside)
        _report_other_texts(file, beside)
        shutil.copyfile(beside, out / "tokenizer.json")
        for key in file.keys("tokenizer.ggml."):
            file.value(key)  # replaced, so that none is reported as unused
    else:
        # Not `save`, whose error for a full disk is no OSError.
        (out / "tokenizer.json").write_text(build_tokenizer(file).to_str(), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "model_max_length": file.context_length,
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


def _report_other_texts(file: GGUFFile, beside: Path) -> None:
    """Logs that most tokens of the file have other texts in the tokenizer.json beside it, which may be another model's."""
    from tokenizers import Tokenizer

    try:
        texts = {index: text for text, index in Tokenizer.from_file(str(beside)).get_vocab().items()}
    except Exception:  # the tokenizers package raises plain Exception
        return  # whoever loads the model reads it again, and says what is wrong
    tokens = file.get("tokenizer.ggml.tokens", list) or []
    others = sum(_without_mark(texts.get(index, "")) != _without_mark(str(token)) for index, token in enumerate(tokens))
    if 2 * others > len(tokens):
        log.warning("%s: %d of its %d tokens have other texts in %s: is that of this model?", file.path, others, len(tokens), beside)


def _without_mark(text: str) -> str:
    """Returns a token's text without the mark of BERT's words, which begin with ▁ in GGUF files and go on with ## elsewhere."""
    return text.removeprefix(SPACE).removeprefix("##")


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
    kinds = file.get("tokenizer.ggml.token_type", list) or []
    controls = {text: index for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == Kind.CONTROL}
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
            tokenizer = _pair_merging(vocab, _listed_merges(file, vocab), rules, file)
        elif model in ("llama", "t5"):
            tokenizer = _sentencepiece(tokens, kinds, file)
        elif model == "bert":
            tokenizer = _wordpiece(tokens, kinds, file)
        else:
            raise _refused(file, f"its tokenizer is of the kind {model!r} / {file.get('tokenizer.ggml.pre', str)!r}")
        _add_tokens(tokenizer, tokens, kinds, file)
        _add_ends(tokenizer, file)
    except UnsupportedModel:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise _refused(file, f"its vocabulary is not sound ({error})") from None
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], file: GGUFFile) -> None:
    """Marks the tokens that are found in a text before it is split. Tokens that end an answer are control tokens, whatever their type."""
    from tokenizers import AddedToken

    special = {index for index, kind in enumerate(kinds) if kind in (Kind.UNKNOWN, Kind.CONTROL)} | set(end_token_ids(file))
    special -= {index for index, token in enumerate(tokens) if token in _SHOWN}
    shown = {index for index, kind in enumerate(kinds) if kind == Kind.USER_DEFINED or tokens[index] in _SHOWN} - special
    before, after = _stripping(file, {tokens[index] for index in special | shown})
    for chosen, is_special in ((special, True), (shown, False)):
        texts = [tokens[index] for index in sorted(chosen)]
        tokenizer.add_tokens(
            [AddedToken(text, normalized=False, special=is_special, lstrip=text in before, rstrip=text in after) for text in texts]
        )


def _stripping(file: GGUFFile, texts: set[str]) -> tuple[set[str], set[str]]:
    """Returns the added tokens that swallow the white space before them, and those that swallow what is after them.

    The files do not say. The rules are llama.cpp's (src/llama-vocab.cpp).
    """
    pre, name = file.get("tokenizer.ggml.pre", str) or "", (file.get("general.name", str) or "").lower()
    kind = file.get("general.architecture", str)
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert") or kind in ("nomic-bert-moe", "jina-bert-v3"):
        return texts & {"<mask>"}, set()
    if "phi-3" in name or "phi3" in name:
        return set(), texts - {"<unk>", "<s>", "<|endoftext|>"}
    return (texts & {"[MASK]"} if "modern-bert" in name else set()), set()


def _rules(file: GGUFFile) -> PreTokenizer | None:
    """Returns how a vocabulary with merges splits text; None for other kinds of vocabularies, and for an unknown name."""
    model, name = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    if model in ("gemma4", "whitespace"):
        return PRE_TOKENIZERS[model]
    return PRE_TOKENIZERS.get(name or "default") if model == "gpt2" else None


def _refused(file: GGUFFile, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{file.path}: {reason}; put the model's own tokenizer.json beside the file")


def _listed_merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the file's merges. A file for Kimi K2 may have none, because its tokens are merged in the order of their ids."""
    lines = file.get("tokenizer.ggml.merges", list) or []
    if not lines and file.get("tokenizer.ggml.pre", str) == "kimi-k2":
        return merges(vocab, [-float(index) for index in range(len(vocab))])
    kinds = file.get("tokenizer.ggml.token_type", list) or [Kind.NORMAL] * len(vocab)
    is_merged = any(len(token) > 1 and kind == Kind.NORMAL for token, kind in zip(vocab, kinds, strict=True))
    if not lines and is_merged and file.get("tokenizer.ggml.model", str) == "gpt2":
        raise _refused(file, "it lists no merges (tokenizer.ggml.merges), without which text would become other tokens")
    # A merge is two pieces separated by a space; neither is empty.
    return [(line[:at], line[at + 1 :]) for line in lines for at in (line.index(" ", 1),)]


def _pair_merging(vocab: dict[str, int], pairs: list[tuple[str, str]], rules: PreTokenizer, file: GGUFFile) -> Tokenizer:
    """Builds a BPE tokenizer with merges, over bytes as in GPT-2, or over characters with byte fallback as in Gemma 4."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    by_text = rules.alphabet is not Alphabet.BYTES
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules.whole_words, byte_fallback=by_text, fuse_unk=by_text))
    words: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    changes: list[Any] = [normalizers.NFC()] if rules.composes else []
    if rules.alphabet is Alphabet.BYTES:
        split_into_bytes(tokenizer, rules.patterns)
    elif rules.alphabet is Alphabet.MARKED_SPACES:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
        changes.append(normalizers.Replace(" ", SPACE))
        if rules.marks_lines:
            changes.append(normalizers.Replace(Regex(rf"(?<![^\n])(?=[^\n{SPACE}])"), SPACE))
        back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if rules.marks_lines else back)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.Split(Regex(r"\s+"), "removed")])
        changes += [normalizers.Lowercase()] if file.get("tokenizer.ggml.normalizer.lowercase", bool) else []
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if changes:
        tokenizer.normalizer = normalizers.Sequence(changes)
    return tokenizer


def _wordpiece(tokens: list[str], kinds: list[int], file: GGUFFile) -> Tokenizer:
    """Builds a WordPiece tokenizer as in BERT. Files mark the tokens that begin a word with ▁, instead of ## on the others."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    control = [kind in (Kind.UNKNOWN, Kind.CONTROL) for kind in kinds] or [False] * len(tokens)
    texts = [
        token if special else token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
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


def _sentencepiece(tokens: list[str], kinds: list[int], file: GGUFFile) -> Tokenizer:
    """Builds a SentencePiece tokenizer: byte-pair encoding as in Llama 2 and early Mistral, or unigram as in T5 and XLM-RoBERTa."""
    unknown, is_unigram = _role(file, "unk"), file.get("tokenizer.ggml.model", str) == "t5"
    adds_space, charsmap = file.get("tokenizer.ggml.add_space_prefix", bool), file.get("tokenizer.ggml.precompiled_charsmap", list) or []
    vocabulary = Vocabulary(
        tokens=tokens,
        scores=file.get("tokenizer.ggml.scores", list) or [],
        kinds=kinds or [Kind.NORMAL] * len(tokens),
        unknown=unknown[1] if unknown else None,
        adds_space=not is_unigram if adds_space is None else adds_space,
        merges_spaces=is_unigram and bool(file.get("tokenizer.ggml.remove_extra_whitespaces", bool)),
        charsmap=bytes(value & 0xFF for value in charsmap) if is_unigram else b"",
    )
    return unigram(vocabulary) if is_unigram else merged(vocabulary)


def _role(file: GGUFFile, role: str) -> tuple[str, int] | None:
    """Returns the text and id of the token with a role like `bos`."""
    tokens, model = file.get("tokenizer.ggml.tokens", list) or [], file.get("tokenizer.ggml.model", str) or ""
    token = file.get(f"tokenizer.ggml.{_ROLES.get(role, role)}_token_id", int)
    if token is None and (role, model) == ("bos", "bert"):
        token = file.get("tokenizer.ggml.cls_token_id", int)  # files of 2024 have this key alone
    if token is None:
        token = _USUAL_ROLES.get(model, {}).get(role)
    return (tokens[token], token) if token is not None and 0 <= token < len(tokens) else None


def _adds(file: GGUFFile, role: str) -> bool:
    """Whether each prompt begins with `bos`, or ends with `eos` or `sep`."""
    stored, model, rules = file.get(f"tokenizer.ggml.add_{role}_token", bool), file.get("tokenizer.ggml.model", str), _rules(file)
    if model == "bert":  # llama.cpp does not ask what the file says
        return role != "eos"
    if stored is not None and (role, model) != ("bos", "gemma4"):  # published Gemma 4 files say False, and mean True
        return stored
    usual = {
        "eos": model == "t5",
        "bos": model == "llama" or (rules is not None and rules.adds_bos),
        "sep": rules is not None and rules.adds_sep,
    }
    return usual.get(role, False)


def _add_ends(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Makes the tokenizer add `bos` before, and `eos` or `sep` after each prompt, and between two texts, as the file says."""
    from tokenizers import processors

    ends = {name: token for name in ("bos", "eos", "sep") if _adds(file, name) and (token := _role(file, name))}
    if ends:
        # `$` begins a variable in a template, so the template refers to the tokens by plain names.
        first = ["bos"] if "bos" in ends else []
        close = next(([name] for name in ("eos", "sep") if name in ends), [])
        # RoBERTa has two tokens between the texts of a pair, BERT has one.
        between = close if file.get("tokenizer.ggml.model", str) == "bert" else [name for name in ("eos", "sep") if name in ends]
        special = [{"id": name, "ids": [index], "tokens": [text]} for name, (text, index) in ends.items()]
        pair = [*first, "$A", *between, "$B:1", *(f"{name}:1" for name in close)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *close], pair=pair, special_tokens=special)
