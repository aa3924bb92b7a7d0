"""A text cut into parts, and kept tokens, change no token."""

import shutil
from pathlib import Path

import pytest
from free_interpreter import share_beside
from gguf_files import byte_level_metadata, sentencepiece_metadata, write_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import chairlift.text_parts
import chairlift.token_cache
from chairlift.errors import InvalidRequest
from chairlift.text_parts import TextParts
from chairlift.token_cache import MAX_GROUPS, TokenCache
from chairlift.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "sentencepiece"
FAMILIES = ("gpt-2", "phi-3", "sentencepiece", "unigram", "bpe", "around")
WORDS = ("<|end|>", "<|user|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<sep>", "<think>", "<w>", "<l>", "<r>", "<|end|><|user|>")
TEXTS = st.lists(
    st.sampled_from((*WORDS, " ", "\n", "hello", " he", "\u2581", "e\u0301", "<", "a")) | st.text(max_size=3), max_size=25
).map("".join)


def around(directory: Path) -> None:
    """A vocabulary of bytes whose added tokens swallow white space, overlap, and stand before others."""
    backend = Backend(models.BPE(vocab={text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|end|>", "<|user|>", "<s>")]
    special += [
        AddedToken("<l>", special=True, normalized=False, lstrip=True),
        AddedToken("<r>", special=True, normalized=False, rstrip=True),
    ]
    backend.add_tokens([*special, AddedToken("<|end|><|user|>", normalized=False), AddedToken("<think>", normalized=True)])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("families")
    write_vocabulary(directory / "gpt-2", byte_level_metadata("gpt-2"))
    write_vocabulary(directory / "phi-3", byte_level_metadata("gpt-2") | {"general.name": "phi-3"})
    write_vocabulary(directory / "sentencepiece", sentencepiece_metadata())
    for name in ("unigram", "bpe"):
        (directory / name).mkdir()
        shutil.copyfile(DATA / f"{name}.model", directory / name / "tokenizer.model")
    around(directory / "around")
    return {name: Tokenizer(directory / name) for name in FAMILIES}


@pytest.fixture
def _every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts at each control token, and keeps each part."""
    monkeypatch.setattr(chairlift.text_parts, "MIN_PART", 1)
    monkeypatch.setattr(chairlift.token_cache, "MIN_CHARACTERS", 1)


@pytest.mark.usefixtures("_every_part")
@pytest.mark.parametrize("name", FAMILIES)
@given(chat=st.lists(st.tuples(TEXTS, st.booleans()), max_size=4))
@settings(max_examples=40, deadline=None)
def test_kept_tokens_are_those_of_the_whole_text(tokenizers: dict[str, Tokenizer], name: str, chat: list[tuple[str, bool]]) -> None:
    tokenizer = tokenizers[name]
    for end in range(len(chat) + 1):  # a conversation that grows
        assert tokenizer.encode_pieces(chat[:end], "group") == tokenizer.encode_pieces(chat[:end])


def _parts(*added: AddedToken) -> TextParts:
    backend = Backend(models.BPE())
    backend.add_tokens(list(added))
    return TextParts(backend)


def test_parts_end_with_control_tokens(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chairlift.text_parts, "MIN_PART", 10)
    special = {"special": True, "normalized": False}
    parts = _parts(AddedToken("<a>", **special), AddedToken("<r>", rstrip=True, **special), AddedToken("<a><a><a>", normalized=False))
    assert list(parts.of("0123456<a>0<a>1<r>234567890<a>x")) == ["0123456<a>", "0<a>1<r>234567890<a>", "x"]
    assert list(parts.of("0123456789<a><a><a>0<a>")) == ["0123456789<a><a><a>0<a>"]
    assert list(parts.of("")) == []


@pytest.mark.parametrize(
    "added",
    [
        (),
        (AddedToken("<a>", special=True, normalized=False, single_word=True),),
        (AddedToken("<a>", special=True, normalized=False, rstrip=True),),
        (AddedToken("<a>", special=True, normalized=True),),
        (AddedToken("<a>", special=False, normalized=False),),
    ],
)
def test_a_text_stays_whole_where_a_cut_could_change_it(added: tuple[AddedToken, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chairlift.text_parts, "MIN_PART", 1)
    assert list(_parts(*added).of("b<a>c<a>")) == ["b<a>c<a>"]


def test_a_long_control_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chairlift.text_parts, "MIN_PART", 1)
    long = f"<{'a' * 5000}>"
    assert list(_parts(*(AddedToken(text, special=True, normalized=False) for text in (long, "<a>", "<aa>"))).of(f"b{long}c<aa>d")) == [
        f"b{long}",
        "c<aa>",
        "d",
    ]


def test_a_beginning_that_is_treated_otherwise_allows_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chairlift.text_parts, "MIN_PART", 1)
    backend = Backend(models.BPE())
    backend.add_tokens([AddedToken("<a>", special=True, normalized=False)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert list(TextParts(backend).of("b<a>c<a>")) == ["b<a>c<a>"]


class Counting:
    """Counts the characters that it is given."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        return [len(text)]


def test_a_text_is_tokenized_once_for_each_group_and_kind() -> None:
    cache, encode = TokenCache(), Counting()
    for group, kind in [("a", "text"), ("a", "text"), ("b", "text"), ("a", "plain"), ("b", "text")]:
        assert cache.tokens(group, kind, "x" * 1000, encode) == [1000]
    assert encode.characters == 3000


def test_memory_is_shared_equally() -> None:
    cache, encode = TokenCache(max_bytes=100_000), Counting()
    cache.tokens("small", "text", "s" * 500, encode)
    for index in range(2000):
        cache.tokens("large", "text", f"{index:05}" * 100, encode)
        assert cache.size <= 100_000
    before = encode.characters
    cache.tokens("small", "text", "s" * 500, encode)
    assert encode.characters == before  # the other group took none of it
    for group in range(2 * MAX_GROUPS):
        cache.tokens(str(group), "text", "s" * 500, encode)
    assert cache.size <= 100_000
    before = encode.characters
    cache.tokens("small", "text", "s" * 500, encode)
    assert encode.characters > before  # it was silent for too long


def test_the_beginning_of_a_conversation_is_not_tokenized_again(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = tokenizers["gpt-2"], Counting()
    monkeypatch.setattr("chairlift.tokenizer._encode", lambda backend, text, add_special_tokens: encoded(text))
    turns = [f"<|user|>{index} {'hello ' * 500}<|end|>" for index in range(20)]
    for end in range(1, len(turns) + 1):
        tokenizer.encode_pieces([("".join(turns[:end]) + "<|user|>", False)], "g")
    assert encoded.characters < 1.1 * sum(map(len, turns))


def test_lone_surrogates_are_refused_with_their_place(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages has a lone surrogate \(U\+D800\) at character 2007"):
        tokenizers["gpt-2"].encode_pieces([("a" * 2000 + "<|end|>\ud800", False)], "g")


@pytest.mark.parametrize("group", [None, "g"])
def test_other_threads_run_while_a_text_is_tokenized(tokenizers: dict[str, Tokenizer], group: str | None) -> None:
    assert share_beside(lambda: tokenizers["gpt-2"].encode_pieces([("<|user|> hello world" * 40_000, False)], group)) > 0.3
