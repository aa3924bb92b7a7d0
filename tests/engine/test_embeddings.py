"""Embeddings of encoders, against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_encoders

from chairlift import LLM, SamplingParams
from chairlift.errors import InvalidRequest, InvalidSetting, UnsupportedModel
from chairlift.scheduling import Scheduling

TEXTS = [np.random.default_rng(length).integers(4, 56, length).tolist() for length in (3, tiny_encoders.LONGEST, 1, 17, 26)]
POOLINGS = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}


@pytest.mark.parametrize(
    ("family", "pooling"), [("Bert", "mean"), ("Bert", "first"), ("Bert", "last"), ("Roberta", "mean"), ("XLMRoberta", "first")]
)
def test_embeddings_equal_those_of_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    oracle = tiny_encoders.write(family, tmp_path, POOLINGS[pooling])
    with LLM(tmp_path, threads=2) as llm:
        embeddings = llm.embed(TEXTS)
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        expected = tiny_encoders.embed(oracle, text, pooling).numpy()
        assert np.abs(embedding - expected).max() < 1e-5, len(text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("bert")
    tiny_encoders.write("Bert", path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    # A step has fewer tokens than the longest text, and fewer texts than the tests have.
    return LLM(directory, threads=2, max_num_seqs=3, max_num_batched_tokens=16)


def test_a_text_has_the_same_bits_alone_and_in_any_step(directory: Path, llm: LLM) -> None:
    alone = np.concatenate([llm.embed(text) for text in TEXTS])
    with LLM(directory, threads=1, max_num_batched_tokens=256) as other:
        assert np.array_equal(llm.embed(TEXTS), alone)
        assert np.array_equal(other.embed(TEXTS), alone)
    llm.engine.check()


def test_text_is_tokenized_and_shortened_embeddings_have_length_1(llm: LLM) -> None:
    (whole,), (short,) = llm.embed("abc"), llm.embed(["abc"], dimensions=5)
    assert np.allclose(short, whole[:5] / np.linalg.norm(whole[:5]))
    assert whole.dtype == np.float32
    assert np.isclose(np.linalg.norm(whole), 1)
    tokens = llm.tokenizer.encode("abc de")
    assert tokens == [2, 4, 31, 32, 7, 34, 3]
    assert llm.tokenizer.decode(tokens) == "[CLS] abc de [SEP]"
    assert np.array_equal(llm.embed([tokens, "abc de"])[0], llm.embed("abc de")[0])
    assert llm.tokenizer.num_closing_tokens == 1


def test_bad_requests_are_refused_and_harm_no_other(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="generates no text"):
        llm.generate("abc", SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match=r"40 tokens for an embedding, and the input has 41"):
        llm.embed([[4], [4] * 41])
    with pytest.raises(InvalidRequest, match="not a token id"):
        llm.embed([[64]])
    with pytest.raises(InvalidRequest, match="empty"):
        llm.embed([[]])
    with pytest.raises(InvalidRequest, match="dimensions must be an integer from 1 to 48"):
        llm.embed("a", dimensions=49)
    with pytest.raises(InvalidRequest, match="one result"):
        SamplingParams(embed=True, n=2)
    assert llm.embed([[4], [5]], scheduling=[Scheduling(tenant="a"), Scheduling(tenant="b", cache_salt="x")]).shape == (2, 48)


def test_unsuitable_settings_and_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny_encoders.write("Bert", tmp_path)
    for settings, message in [
        ({"max_model_len": 65}, "made for 64 positions"),
        ({"runner": "torch"}, "CPU kernels, in one process"),
    ]:
        with pytest.raises(InvalidSetting, match=message):
            LLM(tmp_path, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(UnsupportedModel, match="hidden_act 'relu'"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModel, match="pooling by max"):
        LLM(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModel, match="a module Dense"):
        LLM(tmp_path)
