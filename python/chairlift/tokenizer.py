"""Tokenizes text, detokenizes, and renders chat templates."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.checkpoint.byte_alphabet import BYTES
from chairlift.checkpoint.end_tokens import end_tokens
from chairlift.checkpoint.plain_text import plain
from chairlift.checkpoint.reranker import fill_template, pair_template
from chairlift.checkpoint.tokenizer_files import listed_tokens, load_backend, read_json, token_with_role, tokenizer_config, tokenizer_file
from chairlift.checkpoint.tokenizer_settings import CONFIG, unknown_settings
from chairlift.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from chairlift.sampling import MAX_BAD_WORDS
from chairlift.text_parts import TextParts
from chairlift.token_cache import TokenCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from chairlift.chat_template import ChatTemplate

log = logging.getLogger("chairlift")


class Tokenizer:
    """A model's tokenizer: a vocabulary, such as tokenizer.json, and tokenizer_config.json for roles of tokens and the chat template.

    It is thread-safe and does not need transformers. Its text equals that of transformers, except for byte tokens that form no
    character and spaces in the first token (see `decode`).
    """

    def __init__(self, directory: Path, source: str | Path | None = None, chat_template: str | Path | None = None) -> None:
        """Loads the tokenizer of the model in `directory`; `source` names another directory or file.

        `chat_template` names a Jinja file, which replaces the model's. Raises ModelNotFound if there is no vocabulary,
        UnsupportedModel if it cannot be read, InvalidSetting if the chat template cannot be used.
        """
        self._model = directory
        file = self._file = tokenizer_file(directory, source)
        if not file.is_file():
            raise ModelNotFound(f"{file.parent} has no {file.name}; name one with --tokenizer")
        self._config = tokenizer_config(file)
        if unknown := unknown_settings(self._config):
            log.warning("%s has entries that are not known here and not used: %s", file.parent / CONFIG, ", ".join(unknown))
        self._backend = load_backend(file, self._config)
        # Some files enable truncation or padding for training.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._directory = file.parent
        self.special_token_ids = frozenset(token for token, added in self._backend.get_added_tokens_decoder().items() if added.special)
        """Control tokens, which `decode` skips."""
        self.suppressed_token_ids = _suppressed(directory / "generation_config.json", self.vocab_size)
        """Tokens that the model never samples, as bad words of each request."""
        self._pieces: dict[int, bytes] = {}
        self._cache = TokenCache()
        self._token_bytes = _TokenBytes(self._backend, file)
        if chat_template is not None:
            from chairlift.chat_template import ChatTemplate

            self.template = ChatTemplate.from_file(Path(chat_template), self.special_tokens)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one; a model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` surely has, without tokenizing it. White space does not count: tokenizers may drop it."""
        if self._token_bytes.splits_words:  # a word that it does not know is one token, however long
            return len(text.split())
        counted = len(text) - sum(map(text.count, " \n\r\t")) if self._known is None else sum(map(self._known.__contains__, text))
        return math.ceil(counted / self.longest_token)

    @cached_property
    def _known(self) -> frozenset[str] | None:
        """The characters that have tokens of their own, if a run of others may be one token or none; None if that cannot be."""
        from tokenizers import models

        unknown = "\U0010fffd" * 16  # for private use
        if len(self.encode(unknown, add_special_tokens=False)) >= len(unknown):
            return None
        if not isinstance(self._backend.model, (models.BPE, models.Unigram)):  # whole words may be unknown
            return frozenset()
        texts = (self._token_bytes.to_bytes(token).decode(errors="ignore") for token in self._backend.get_vocab(with_added_tokens=False))
        return frozenset(text for text in texts if len(text) == 1 and not text.isspace())

    @cached_property
    def longest_token(self) -> int:
        """Length in bytes of the longest token, without white space."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(1, *(len(self._token_bytes.to_bytes(token).translate(None, b" \n\r\t")) for token in vocabulary))

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """All tokens that end an answer: see the function of this name."""
        return eos_token_ids(self._model, self._file, self._backend)

    @cached_property
    def num_closing_tokens(self) -> int:
        """Number of special tokens that `encode` adds after a text, such as [SEP]."""
        whole, plain = self.encode("a"), self.encode("a", add_special_tokens=False)
        added = len(whole) - len(plain)
        return next((count for count in range(added + 1) if whole[added - count : len(whole) - count] == plain), 0)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the tokens with a role: `bos_token`, `eos_token`, `unk_token`, `pad_token` and so on."""
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        return {name: text for name in names if (text := token_with_role(self._config, name)) is not None}

    @cached_property
    def _bos(self) -> int | None:
        """The id of `bos_token`."""
        text = self.special_tokens.get("bos_token")
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; raises InvalidRequest if the model has none."""
        from chairlift.chat_template import ChatTemplate

        return ChatTemplate.from_files(self._directory, self._config, self.special_tokens)

    def prepare(self) -> None:
        """Starts the process that renders the chat template, if there is one: otherwise the first conversation waits for it."""
        with contextlib.suppress(InvalidRequest, OSError, ValueError):  # this fails conversations, but not the start
            self.template.prepare()

    @property
    def template_source(self) -> str | None:
        """The source of the default chat template, None if there is none."""
        try:
            return self.template.default
        except InvalidRequest:
            return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of `text`; control tokens written in it become control tokens, as in completion APIs.

        `add_special_tokens` adds the tokens that the model expects around a text; a text that begins with the first of them gets no second
        one. Raises InvalidRequest for text with lone surrogates.
        """
        _check_unicode(text, "prompt")
        ids = _encode(self._backend, text, add_special_tokens=add_special_tokens)
        return ids[1:] if add_special_tokens and self._bos is not None and ids[:2] == [self._bos] * 2 else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Returns the tokens of two texts as a classifier of pairs expects them, and the index of the second's first token.

        The index is None if the tokenizer does not tell the texts apart. Raises InvalidRequest for text with lone surrogates.
        """
        for text in (first, second):
            _check_unicode(text, "input")
        if self._pair_template is not None:
            return self.encode_pieces(fill_template(self._pair_template, first, second, self.control_texts)), None
        encoding = self._backend.encode_batch_fast([(first, second)])[0]
        return encoding.ids, next((at for at, kind in enumerate(encoding.type_ids) if kind == 1), None)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Returns the tokens of a conversation, rendered by the chat template; `kwargs` are variables of the template, like `tools`.

        Control tokens written in messages or `kwargs` stay plain text, so that a user cannot end the user's message and begin a system
        message. Raises InvalidRequest if there is no template, or the template fails.
        """
        return self.encode_pieces(self.render(messages, add_generation_prompt=add_generation_prompt, **kwargs))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> list[tuple[str, bool]]:
        """Returns a conversation as pieces of text for `encode_pieces`: see `chat` and `ChatTemplate.render`."""
        return self.template.render(messages, self.control_texts, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], group: str | None = None) -> list[int]:
        """Returns the tokens of pieces of text, each with whether control tokens are plain text in it.

        They begin with one `bos_token` if the model expects it, whether or not the chat template writes it. Parts of a text that `group`
        has sent before are not tokenized again. Without a group nothing is kept.
        """
        ids: list[int] = []
        for text, is_plain in pieces:
            _check_unicode(text, "messages")
            backend = self._plain_backend if is_plain else self._backend
            encode = partial(_encode, backend, add_special_tokens=False)
            if group is None:
                ids += encode(text)
                continue
            for part in (text,) if is_plain else self._parts.of(text):
                ids += self._cache.tokens(group, "plain" if is_plain else "text", part, encode)
        if self._bos is None or not self._config.get("add_bos_token"):
            return ids
        written = next((index for index, token in enumerate(ids) if token != self._bos), len(ids))
        return [self._bos, *ids[written:]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; invalid bytes become U+FFFD, and ids outside the vocabulary are skipped.

        The result equals that of the tokenizers package, except that for SentencePiece vocabularies the package replaces a whole run of
        byte tokens if one of them is invalid; here only the invalid ones are replaced. For Metaspace decoders the package removes all
        spaces of the first token; here only the one that encoding adds is removed, so that indented text stays as it is.
        """
        skipped = self.special_token_ids if skip_special_tokens else ()
        text = b"".join(self.piece(token) for token in ids if token not in skipped).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding removes the first space of a text."""
        return self._token_bytes.strips_first_space

    def piece(self, token: int) -> bytes:
        """Returns the bytes of a token, which may be part of a character."""
        piece = self._pieces.get(token)
        if piece is None:
            text = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
            piece = self._pieces[token] = b"" if text is None else self._token_bytes.to_bytes(text)
        return piece

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of the control tokens, longest first."""
        texts = (self._backend.id_to_token(token) for token in self.special_token_ids)
        return tuple(sorted((text for text in texts if text), key=lambda text: (-len(text), text)))

    @cached_property
    def _plain_backend(self) -> Backend:
        """A second tokenizer that treats control tokens as plain text."""
        return plain(self._backend)

    @cached_property
    def _pair_template(self) -> str | None:
        """The prompt for a query and a document, if the model is a reranker."""
        names = read_json(self._model / "config.json").get("architectures")
        return pair_template(self._model, names if isinstance(names, list) else (), self._config)

    @cached_property
    def _parts(self) -> TextParts:
        return TextParts(self._backend)


def _suppressed(file: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the `suppress_tokens` of a generation_config.json. Raises UnsupportedModel if they are too many."""
    listed = read_json(file).get("suppress_tokens")
    found = sorted({token for token in listed if type(token) is int and 0 <= token < vocab_size}) if isinstance(listed, list) else []
    if len(found) > MAX_BAD_WORDS:
        raise UnsupportedModel(f"{file}: suppress_tokens has {len(found)} tokens, and {MAX_BAD_WORDS} can be suppressed")
    return tuple(found)


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which is not valid Unicode"
        raise InvalidRequest(message, param=param) from None


def _encode(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    # Unlike `encode`, this method runs without the GIL. It also spares the characters' offsets, which take most of the memory.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class _TokenBytes:
    """A vocabulary's representation of bytes: GPT-2's alphabet of 256 characters, SentencePiece's ▁ and <0x0A>, or WordPiece's ##.

    Without a decoder tokens are words, with spaces between them.
    """

    def __init__(self, backend: Backend, file: Path) -> None:
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"decoders": []}
        listed = list(_steps(decoder))
        steps = {step["type"]: step for step in listed}
        self._separates = backend.decoder is None
        self._alphabet = BYTES if "ByteLevel" in steps else None
        self._byte_fallback = "ByteFallback" in steps
        self._continues: str | None = steps["WordPiece"]["prefix"] if "WordPiece" in steps else None
        self.splits_words = self._continues is not None or self._separates
        """Whether a text's words are tokenized one by one, as WordPiece does."""
        unknown = steps.keys() - {"ByteLevel", "ByteFallback", "Replace", "Fuse", "Strip", "Metaspace", "WordPiece"}
        if unknown:
            raise UnsupportedModel(f"{file} uses unknown decoder steps: {', '.join(sorted(unknown))}")
        self._replaced = [_replacement(step, file) for step in listed if step["type"] in ("Replace", "Metaspace")]
        metaspace = steps.get("Metaspace", {"prepend_scheme": "never"})["prepend_scheme"] != "never"
        self.strips_first_space: bool = metaspace or self.splits_words or steps.get("Strip", {}).get("start", 0) > 0

    def to_bytes(self, token: str) -> bytes:
        if self._separates:
            return f" {token}".encode()
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:  # an added token is stored as plain text
                return token.encode()
        if self._continues is not None:
            return (token.removeprefix(self._continues) if token.startswith(self._continues) else " " + token).encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for text, content in self._replaced:
            token = token.replace(text, content)
        return token.encode()


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the steps of a decoder, which may be sequences of others."""
    if "decoders" not in decoder:
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _replacement(step: dict[str, Any], file: Path) -> tuple[str, str]:
    """Returns what a step replaces in each token, and by what. Raises UnsupportedModel for a regular expression."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise UnsupportedModel(f"{file} replaces {step['pattern']} in tokens, and there is code for texts alone")
    return step["pattern"]["String"], step["content"]


def eos_token_ids(directory: Path, source: str | Path | None = None, backend: Backend | None = None) -> frozenset[int]:
    """Returns all tokens that end an answer: those that the checkpoint's settings name, and those whose texts are known.

    The settings are config.json, generation_config.json and tokenizer_config.json; the paths are those of `Tokenizer`. Without a `backend`
    the tokenizer is loaded if the settings do not have the ids, which takes 0.1 s.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        raw = read_json(directory / name)
        for table in (raw, raw.get("text_config")):  # models that also read images have the second
            value = table.get("eos_token_id") if isinstance(table, dict) else None
            ids.update(token for token in (value if isinstance(value, list) else [value]) if type(token) is int and token >= 0)
    file = tokenizer_file(directory, source)
    config = tokenizer_config(file)
    known = {text: token for token, text, _ in listed_tokens(config, file)}
    text = token_with_role(config, "eos_token")
    if backend is None and file.is_file() and (not known or (text is not None and text not in known)):
        backend = load_backend(file, config)
    if backend is not None:
        known |= {one.content: token for token, one in backend.get_added_tokens_decoder().items()}
    ids |= end_tokens(known)
    if text is not None:
        token = known.get(text) if text in known or backend is None else backend.token_to_id(text)
        ids |= set() if token is None else {token}
    return frozenset(ids)
