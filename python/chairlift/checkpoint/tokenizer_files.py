"""Finds and loads the tokenizer of a model's directory: tokenizer.json, or another file with a vocabulary."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.sentencepiece_file import sentencepiece_tokenizer
from chairlift.checkpoint.tekken import split_as_tekken, tekken_tokenizer
from chairlift.checkpoint.tokenizer_settings import set_as_class
from chairlift.checkpoint.vocabulary_files import FAMILIES, Family, family_of, vocabulary_tokenizer
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger("chairlift")

_NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", *FAMILIES)
"""The files that hold a vocabulary; the first of them that is there counts."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHERS = ("additional_special_tokens", "extra_special_tokens")
"""Lists of further special tokens, by their older and their newer name."""
_RENUMBERED = ("XLMRoberta", "Camembert", "MBart", "Nllb", "XGLM", "Barthez", "XLNet", "Deberta", "M2M100", "Speech2Text")
"""Beginnings of the names of transformers' classes whose ids are not those of their tokenizer.model."""


def tokenizer_file(directory: Path, source: str | Path | None = None) -> Path:
    """Returns the path of the vocabulary of the model in `directory`, or of `source`, another directory or file."""
    path = Path(source).expanduser() if source else directory
    if path.suffix in (".json", ".model", ".txt"):
        return path
    return next((path / name for name in _NAMES if (path / name).is_file()), path / _NAMES[0])


def tokenizer_config(file: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json beside a vocabulary, with the roles of tokens that the format of the vocabulary implies.

    Without `added_tokens_decoder`, the roles of the older special_tokens_map.json prevail, as in transformers.
    """
    config = read_json(file.with_name("tokenizer_config.json"))
    if "added_tokens_decoder" not in config:
        older = read_json(file.with_name("special_tokens_map.json"))
        config |= {role: older[role] for role in (*_ROLES, *_OTHERS) if older.get(role)}
    if file.name == "tekken.json":
        return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": True} | config
    if file.suffix == ".model":
        is_t5 = str(config.get("tokenizer_class")).startswith("T5")
        return {"bos_token": None if is_t5 else "<s>", "eos_token": "</s>", "add_bos_token": not is_t5, "add_eos_token": is_t5} | config
    return {**_family(file, config).roles, **config} if file.name in FAMILIES else config


def load_backend(file: Path, config: Mapping[str, Any]) -> Backend:
    """Loads a vocabulary, with the added tokens of `config`, its tokenizer_config.json. Raises UnsupportedModel if it cannot be read."""
    from tokenizers import Tokenizer as Backend

    if file.name == "tekken.json" or file.suffix == ".model":
        if str(config.get("tokenizer_class")).startswith(_RENUMBERED):
            raise UnsupportedModel(f"{file}: {config['tokenizer_class']} numbers its tokens otherwise; it needs the model's tokenizer.json")
        backend = tekken_tokenizer(file) if file.suffix == ".json" else sentencepiece_tokenizer(file)
        _add_ends(backend, config)
    elif file.name in FAMILIES:
        backend = vocabulary_tokenizer(file, _family(file, config), config)
    else:
        try:
            backend = Backend.from_file(str(file))
            set_as_class(backend, _class(file, config), config)
            split_as_tekken(backend, file)
            _end_embedded_texts(backend, file, config)
        except Exception as error:  # the tokenizers package raises plain Exception
            raise UnsupportedModel(f"{file} cannot be read ({error}): {remedy(file)}") from None
    _add_tokens(backend, file, config)
    if any(read_json(path).get("do_lower_case") for path in file.parent.glob("sentence_*_config.json")):
        _lower(backend)
    return backend


def _family(file: Path, config: Mapping[str, Any]) -> Family:
    return family_of(file, _class(file, config))


def _class(file: Path, config: Mapping[str, Any]) -> str:
    """Returns the name of the tokenizer's class in transformers, or the type of its model."""
    return str(config.get("tokenizer_class") or read_json(file.with_name("config.json")).get("model_type"))


def token_with_role(config: Mapping[str, Any], role: str) -> str | None:
    """Returns the text of the token with a role, such as `bos_token`, in tokenizer_config.json."""
    value = config.get(role)
    text = value.get("content") if isinstance(value, dict) else value
    return text if _is_text(text) else None


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value of a JSON file is text in Unicode. JSON can spell lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def listed_tokens(config: Mapping[str, Any], file: Path) -> Iterator[tuple[int, str, dict[str, bool]]]:
    """Yields the id, the text and the flags of each added token that tokenizer_config.json or the older added_tokens.json lists."""
    listed = config.get("added_tokens_decoder")
    if not listed:
        special = set(_special_texts(config))
        older = read_json(file.with_name("added_tokens.json")).items()
        listed = {str(token): {"content": text, "special": text in special, "normalized": text not in special} for text, token in older}
    for number, fields in listed.items() if isinstance(listed, dict) else ():
        text = fields.get("content") if isinstance(fields, dict) else None
        if number.isascii() and number.isdecimal() and len(number) < 10 and text and _is_text(text):
            yield int(number), text, {flag: fields[flag] for flag in _FLAGS if isinstance(fields.get(flag), bool)}


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, an empty one if there is no file or another value. Raises UnsupportedModel for other text."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _add_tokens(backend: Backend, file: Path, config: Mapping[str, Any]) -> None:
    """Adds the added tokens of tokenizer_config.json, or of the older added_tokens.json, as transformers does.

    Their flags replace those of the vocabulary. A token whose id would be another one is left out, and so is a role's token that is not in
    the vocabulary.
    """
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for number, text, flags in sorted(listed_tokens(config, file)):
        if text in known and len(flags) < len(_FLAGS):
            continue
        found = backend.token_to_id(text)
        if number == (backend.get_vocab_size() if found is None else found):
            backend.add_tokens([AddedToken(text, **flags)])
            known.add(text)
    missing = [text for text in _special_texts(config) if text not in known and backend.token_to_id(text) is not None]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _lower(backend: Backend) -> None:
    """Makes the tokenizer change capitals into small letters first, as the configuration of sentence-transformers asks for."""
    from tokenizers import normalizers

    steps = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
    backend.normalizer = normalizers.Sequence(steps)


def _special_texts(config: Mapping[str, Any]) -> list[str]:
    """Returns the texts of the tokens that tokenizer_config.json gives a role, or lists as special ones."""
    extra = next((found for name in _OTHERS if (found := config.get(name))), None)
    extra = list(extra.values()) if isinstance(extra, dict) else extra  # by their roles
    others = [token_with_role({"": token}, "") for token in extra] if isinstance(extra, list) else []
    return list(dict.fromkeys(text for text in (*(token_with_role(config, role) for role in _ROLES), *others) if text))


def _end_embedded_texts(backend: Backend, file: Path, config: Mapping[str, Any]) -> None:
    """Makes the tokenizer of sentence-transformers' models add `eos_token` if tokenizer_config.json says so, and tokenizer.json does not.

    The state of this token is the embedding. Tokenizers with classes of their own add it, and transformers 4 did.
    """
    if not config.get("add_eos_token") or not file.with_name("modules.json").is_file():
        return
    bos, eos = (backend.token_to_id(token_with_role(config, role) or "") for role in ("bos_token", "eos_token"))
    ids = backend.encode("a").ids
    if eos is not None and eos not in ids[-1:]:
        _add_ends(backend, {**config, "add_bos_token": ids[:1] == [bos]})
        log.warning("%s adds no end to a text, though tokenizer_config.json says add_eos_token: it is added", file)


def _add_ends(backend: Backend, config: Mapping[str, Any]) -> None:
    """Makes the tokenizer add `bos_token` before and `eos_token` after a text, as tokenizer_config.json says."""
    from tokenizers import processors

    ends = {name: text for name in ("bos", "eos") if config.get(f"add_{name}_token") and (text := token_with_role(config, f"{name}_token"))}
    ids = {name: token for name, text in ends.items() if (token := backend.token_to_id(text)) is not None}
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ids]
    special = [{"id": name, "ids": [token], "tokens": [ends[name]]} for name, token in ids.items()]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
