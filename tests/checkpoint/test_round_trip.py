"""Arbitrary text becomes tokens and text again, in each family of vocabularies."""

import shutil
from pathlib import Path

import pytest
from gguf_files import byte_level_metadata, sentencepiece_metadata, write_vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tekken_files import write_tekken

from chairlift.engine.detokenizer import TextStream
from chairlift.sampling import SamplingParams
from chairlift.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "sentencepiece"
MERGES = {"tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"], "tokenizer.ggml.scores": None}
FAMILIES = {
    "gpt-2": byte_level_metadata("gpt-2"),
    "llama-bpe": byte_level_metadata("llama-bpe"),
    "kimi-k2": byte_level_metadata("kimi-k2"),
    "sentencepiece": sentencepiece_metadata(),
    "gemma4": sentencepiece_metadata() | MERGES | {"tokenizer.ggml.model": "gemma4"},
    "tekken": None,
    "bpe": None,
    "unigram-bytes": None,
}
SPECIAL = ("<|end|>", "</s>", "<0x41>", "[INST]", " hello", "hello", "  ", "\r\n", "\u2581", "\U0001f600", "\0", "<|im_start|>")
TEXTS = st.lists(st.text(max_size=6) | st.sampled_from(SPECIAL), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("families")
    for name, metadata in FAMILIES.items():
        if metadata is not None:
            write_vocabulary(directory / name, metadata)
            continue
        (directory / name).mkdir()
        if name == "tekken":
            write_tekken(directory / name / "tekken.json")
        else:
            shutil.copyfile(DATA / f"{name}.model", directory / name / "tokenizer.model")
    return {name: Tokenizer(directory / name) for name in FAMILIES}


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@example(text="".join(SPECIAL), sizes=[1])
@settings(max_examples=40, deadline=None)
def test_text_is_read_back_at_once_and_in_pieces(tokenizers: dict[str, Tokenizer], name: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode_pieces([(text, True)])
    if tokenizer.encode("") and ids[:1] == tokenizer.encode("")[:1]:
        ids = ids[1:]  # the beginning of a text
    # SentencePiece writes a space as ▁, and a ▁ of the text is one, too.
    expected = text if name in ("gpt-2", "llama-bpe", "kimi-k2", "tekken") else text.replace("\u2581", " ")
    assert not tokenizer.special_token_ids & set(ids)
    assert tokenizer.decode(ids) == expected
    stream, read, at = TextStream(tokenizer, SamplingParams(max_tokens=None)), "", 0
    while at < len(ids):
        size = sizes[at % len(sizes)]
        read += stream.push(ids[at : at + size], False)
        at += size
    assert read + stream.push([], True) == expected
