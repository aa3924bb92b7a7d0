from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf_files import sentencepiece_metadata, write_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.choice import Choice
from chairlift.engine.detokenizer import TextStream
from chairlift.sampling import SamplingParams
from chairlift.tokenizer import Tokenizer

PROSE = "naïve café 你好世界 👩\u200d👩\u200d👧 e\u0301 \ufffd  tabs\tand\n\nlines <stop> def f(x): return x[1:]"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return _tokenizer(model_dir)


@cache
def _tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@cache
def _partial_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end inside a character, or are no whole character: what a random token hardly ever is."""
    tokenizer = _tokenizer(directory)
    return tuple(token for token in range(tokenizer.vocab_size) if not _is_text(tokenizer.piece(token)))


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _token_ids(directory: Path) -> st.SearchStrategy[list[int]]:
    anything = st.integers(0, _tokenizer(directory).vocab_size - 1)
    prose = st.text(max_size=12).map(_tokenizer(directory).encode)
    pieces = st.one_of(st.lists(anything, max_size=8), st.lists(st.sampled_from(_partial_ids(directory)), max_size=8), prose)
    return st.lists(pieces, max_size=4).map(lambda found: [token for piece in found for token in piece])


def _pushed(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = (), **settings: Any
) -> tuple[list[str], str | None]:
    """The texts of each push, with the ids cut into groups of `sizes` over and over."""
    stream = TextStream(tokenizer, SamplingParams(max_tokens=None, stop=stop, **settings))
    texts, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(stream.push(ids[at : at + size], False))
        at, turn = at + size, turn + 1
    texts.append(stream.push([], True))
    return texts, stream.stopped


def _cut(text: str, stop: tuple[str, ...], start: int = 0, *, shown: bool = False) -> tuple[str, str | None]:
    """The text before (or, if it is `shown`, with) the stop string that is completed first after `start` characters, the plain way."""
    ends = [
        (end, -len(one), one) for one in stop for end in range(max(start + 1, len(one)), len(text) + 1) if text[end - len(one) : end] == one
    ]
    if not ends:
        return text, None
    end, _, one = min(ends)
    return text[: end if shown else end - len(one)], one


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_joined_text_is_the_decoded_text(model_dir: Path, data: st.DataObject, sizes: list[int]) -> None:
    ids = data.draw(_token_ids(model_dir))
    texts, stopped = _pushed(_tokenizer(model_dir), ids, sizes)
    assert "".join(texts) == _tokenizer(model_dir).decode(ids)
    assert stopped is None


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_text_ends_before_the_first_stop(model_dir: Path, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = _tokenizer(model_dir)
    ids = data.draw(_token_ids(model_dir))
    whole = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 6)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stop = tuple(one for one in data.draw(st.lists(st.one_of(spans, st.text("ab\ufffd", min_size=1, max_size=4)), max_size=3)) if one)
    texts, stopped = _pushed(tokenizer, ids, sizes, stop)
    text, expected = _cut(whole, stop)
    assert ("".join(texts), stopped) == (text, expected)
    # What was shown is never taken back, so each push is a beginning of the answer, too.
    assert all(text.startswith("".join(texts[:count])) for count in range(len(texts)))


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    soon=st.integers(0, 12),
    shown=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_overlapping_stops_of_two_letters(
    model_dir: Path, text: str, stop: tuple[str, ...], sizes: list[int], soon: int, shown: bool
) -> None:
    tokenizer = _tokenizer(model_dir)
    ids = [token for letter in text for token in tokenizer.encode(letter)]
    texts, stopped = _pushed(tokenizer, ids, sizes, stop, min_tokens=soon, include_stop_str_in_output=shown)
    assert ("".join(texts), stopped) == _cut(text, stop, soon, shown=shown)


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩\u200d👩\u200d👧你")
    texts, _ = _pushed(tokenizer, ids, [1])
    assert len(ids) > len([text for text in texts if text])
    assert "\ufffd" not in "".join(texts)


def test_half_a_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams())
    ids = tokenizer.encode("a👩")
    assert stream.push(ids[:-1], False) == "a"
    assert stream.push([], True) == "\ufffd"


def test_a_stop_string_over_several_tokens_never_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROSE)
    texts, stopped = _pushed(tokenizer, ids, [1], ("<stop>",))
    assert "".join(texts) == PROSE.split("<stop>")[0]
    assert stopped == "<stop>"
    assert "<" not in "".join(texts)


def test_what_only_began_like_a_stop_string_is_given_out(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("world peace",)))
    assert stream.push(tokenizer.encode("hello world"), False) == "hello "
    assert stream.push([], True) == "world"
    assert stream.stopped is None


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("b",)))
    assert stream.push(tokenizer.encode("abc"), False) == "a"
    assert stream.push(tokenizer.encode("def"), True) == ""


def test_control_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert "".join(_pushed(tokenizer, ids, [1])[0]) == "hi"
    assert "".join(_pushed(tokenizer, ids, [1], skip_special_tokens=False)[0]) == "<|im_start|>hi<|im_end|>"


def test_the_length_counts_what_is_held_back_and_what_was_cut_off(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("bcd",)))
    assert [(stream.push(tokenizer.encode(letter), False), stream.length) for letter in "abcd"] == [("a", 1), ("", 2), ("", 3), ("", 4)]
    half = TextStream(tokenizer, SamplingParams())
    ids = tokenizer.encode("👩")
    assert len(ids) > 1
    lengths = []
    for token in ids:
        half.push([token], False)
        lengths.append(half.length)
    assert lengths == [0] * (len(ids) - 1) + [1]


@pytest.fixture(scope="module")
def spaced_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that puts a space before a text."""
    return Tokenizer(write_vocabulary(tmp_path_factory.mktemp("spaced"), sentencepiece_metadata()))


@pytest.mark.parametrize(
    ("prompt", "answer", "shown"),
    [
        ((), (" hello",), "hello"),
        (("<s>",), (" hello",), "hello"),
        (("<s>", " hello", "<s>"), (" hello",), "hello"),
        (("<s>", " hello"), (" hello",), " hello"),
        ((" hello",), ("  ", " hello"), "   hello"),
        ((" hello",), ("lo",), "lo"),
    ],
)
def test_an_answer_keeps_the_space_after_text(
    spaced_tokenizer: Tokenizer, prompt: tuple[str, ...], answer: tuple[str, ...], shown: str
) -> None:
    tokens = {spaced_tokenizer.piece(token): token for token in range(320)}
    choice = Choice(spaced_tokenizer, 0, [tokens[text.encode()] for text in prompt], SamplingParams(), 0.0)
    for text in answer:
        choice.feed(tokens[text.encode()], 0.0, 0)
    output = choice.take()
    assert output is not None
    assert output.text == shown
