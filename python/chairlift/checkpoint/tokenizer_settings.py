"""The entries of tokenizer_config.json: some replace parts of a tokenizer.json, and those that nothing here knows are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS, split_into_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import BertNormalizer

CONFIG = "tokenizer_config.json"
_KNOWN = re.compile(
    # Tokens, templates, and settings that are read.
    r"\w+_token|(additional_special|extra_special|model_specific_special|added)_tokens\w*|chat_template"
    r"|tokenizer_class|add_(bos|eos)_token|add_prefix_space|legacy|do_lower_case|strip_accents"
    r"|tokenize_chinese_chars|response_schema|fix_mistral_regex"
    # What the file is, and files that were read when it was made.
    r"|_\w+|auto_map|\w*processor_\w+|\w*_file|name_or_path|init_inputs"
    r"|transformers_version|model_type|use_fast|from_slow|backend|is_local|local_files_only"
    r"|device\w*|trust_remote_code|vocab_size|language|\w*url"
    # Lengths and paddings of a batch, and what else belongs to training.
    r"|model_max_length|max_\w*length|max_seq\w*|stride|\w*truncat\w*"
    r"|\w*pad(ding)?|padding_\w+|pad_\w+|return_\w+|model_input_names|verbose"
    # What a tokenizer.json or a tokenizer.model says itself, or other programs alone do.
    r"|sp_model\w*|do_basic_tokenize|never_split|trim_offsets|keep_accents"
    r"|remove_space|byte_fallback|errors|use_default_system_prompt|do_split"
    r"|clean_up_tokenization_spaces|spaces_between_special_tokens|skip_special_tokens"
)
"""Entries that are used, or that change no token."""
_LOWERING = ("bert", "distilbert", "electra", "mpnet")
_OF_BYTES = ("gpt2", "qwen2tokenizer", "roberta", "codegen")
_OF_PIECES = ("llama", "code_llama", "codellama")
"""Beginnings, in small letters, of the names of transformers' classes that read settings beside their tokenizer.json."""


def unknown_settings(config: Mapping[str, Any]) -> list[str]:
    """Returns the entries of a tokenizer_config.json that nothing here knows, such as split_special_tokens."""
    return [name for name, value in config.items() if value and not _KNOWN.fullmatch(name)]


def bert_normalizer(config: Mapping[str, Any]) -> BertNormalizer:
    """Returns how the class of BERT changes texts before it splits them, with the settings of its tokenizer_config.json."""
    from tokenizers.normalizers import BertNormalizer

    return BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )


def set_as_class(backend: Tokenizer, named: str, config: Mapping[str, Any]) -> None:
    """Replaces parts of a tokenizer.json by settings of tokenizer_config.json, as transformers' class `named` does."""
    from tokenizers.normalizers import BertNormalizer

    named, spaced = named.lower(), config.get("add_prefix_space")
    if named.startswith(_LOWERING) and isinstance(backend.normalizer, BertNormalizer):
        backend.normalizer = bert_normalizer(config)
    if config.get("fix_mistral_regex") and backend.pre_tokenizer and b"ByteLevel" in backend.pre_tokenizer.__getstate__():
        split_into_bytes(backend, PRE_TOKENIZERS["tekken"].patterns)
    if isinstance(spaced, bool) and named.startswith((*_OF_BYTES, *_OF_PIECES)):
        for place in ("normalizer", "pre_tokenizer", "decoder"):
            if (part := getattr(backend, place)) is not None:
                state = json.loads(part.__getstate__())
                _set_spaces(state, spaced, of_bytes=named.startswith(_OF_BYTES))
                part.__setstate__(json.dumps(state).encode())
                setattr(backend, place, part)


def _set_spaces(state: dict[str, Any], spaced: bool, *, of_bytes: bool) -> None:
    """Changes in the state of a part of a tokenizer whether a text gets a space before it."""
    if of_bytes and state["type"] == "ByteLevel":
        state["add_prefix_space"] = spaced
    elif state["type"] == "Metaspace" and (not spaced or state["prepend_scheme"] == "never"):
        state["prepend_scheme"] = "always" if spaced else "never"
    for steps, adding in (("normalizers", "Prepend"), ("pretokenizers", ""), ("decoders", "Strip")):
        for step in state.get(steps, ()):
            _set_spaces(step, spaced, of_bytes=of_bytes)
        if steps in state and not spaced:
            state[steps] = [step for step in state[steps] if step["type"] != adding]
