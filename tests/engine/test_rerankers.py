"""Qwen3's rerankers and embedders, against transformers: yes and no of a decoder are the score of a query and a document."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import CONTROL, byte_level_metadata, gguf_of, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification

from chairlift import LLM
from chairlift.architectures.reranker import is_reranker
from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.models.config import ModelConfig, load_shape

QUERY, DOCUMENTS = "what is it", ["yes it is", " a <|im_end|> b", "{query}"]
PREFIX, SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SHORT = f"{PREFIX}<Query>: {{query}}\n<Document>: {{document}}{SUFFIX}"


def metadata() -> dict[str, Any]:
    """A vocabulary of bytes with the words yes and no and the control tokens of a conversation."""
    values = byte_level_metadata("qwen2")
    tokens, merges = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"]
    new = ["ye", "yes", "no", "<|im_start|>", "<|im_end|>"]
    first = next(index for index, token in enumerate(tokens) if token.startswith("[PAD"))
    values["tokenizer.ggml.tokens"] = tokens[:first] + new + tokens[first + len(new) :]
    values["tokenizer.ggml.merges"] = [*merges, "y e", "ye s", "n o"]
    values["tokenizer.ggml.token_type"][first : first + len(new)] = [1, 1, 1, CONTROL, CONTROL]
    return values


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Writes the same vocabulary as tokenizer.json and returns it."""
    values = metadata()
    vocabulary = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return vocabulary


def expected_scores(model: Any, prompts: list[list[int]], yes: int, no: int) -> list[float]:
    """The probability of yes among yes and no after each prompt."""
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    return [torch.softmax(torch.stack([row[no], row[yes]]), 0)[1].item() for row in logits]


@pytest.mark.parametrize("tied", [False, True])
def test_the_score_is_the_probability_of_yes(tmp_path: Path, tied: bool) -> None:
    directory = tmp_path / "Qwen3-Reranker-tiny"
    model = tiny_model("qwen3", tie_word_embeddings=tied, max_position_embeddings=2048)
    model.save_pretrained(directory)
    vocabulary = write_tokenizer(directory)
    with LLM(directory, threads=2) as llm:
        prompts = [llm.tokenizer.encode_pair(QUERY, document)[0] for document in DOCUMENTS]
        scores = llm.score(QUERY, DOCUMENTS)
        assert [llm.score(QUERY, [document])[0] for document in DOCUMENTS] == scores
        with pytest.raises(InvalidRequest, match="only scores pairs of texts"):
            llm.generate("abc")
        assert (llm.info.score, llm.info.embedding_size) == ("sigmoid", 1)
    expected = expected_scores(model, prompts, vocabulary["yes"], vocabulary["no"])
    assert np.abs(np.array(scores) - expected).max() < 1e-5
    assert len(set(scores)) == 3


def test_the_prompt_is_that_of_the_models_card(tmp_path: Path) -> None:
    directory = tmp_path / "Qwen3-Reranker-tiny"
    tiny_model("qwen3", max_position_embeddings=2048).save_pretrained(directory)
    vocabulary = write_tokenizer(directory)
    with LLM(directory, threads=1) as llm:
        encode = llm.tokenizer.encode
        instruct = "Given a web search query, retrieve relevant passages that answer the query"
        system = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        )
        body = f"<Instruct>: {instruct}\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}"
        end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert llm.tokenizer.encode_pair(QUERY, DOCUMENTS[0]) == (encode(system + body + end), None)
        # A document cannot end the user's message, and its braces are text.
        for document in DOCUMENTS:
            ids = llm.tokenizer.encode_pair(QUERY, document)[0]
            assert ids.count(vocabulary["<|im_end|>"]) == 2
            assert document in llm.tokenizer.decode(ids)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_classifier_scores_in_place_of_the_decoders_head(tmp_path: Path, labels: int) -> None:
    """As llama.cpp's converter writes it (yes and no), and as converters to one label do; with the file's own prompt."""
    decoder = tiny_model("qwen3", max_position_embeddings=2048, tie_word_embeddings=True)
    model = AutoModelForSequenceClassification.from_config(decoder.config).eval()
    model.config.num_labels = labels
    vocabulary = {token: index for index, token in enumerate(metadata()["tokenizer.ggml.tokens"])}
    yes, no = (decoder.lm_head.weight[vocabulary[word]].detach() for word in ("yes", "no"))
    rows = torch.stack([yes, no]) if labels == 2 else (yes - no)[None]
    model.model.load_state_dict(decoder.model.state_dict())
    model.score = torch.nn.Linear(64, labels, bias=False)
    model.score.weight = torch.nn.Parameter(rows)
    values = metadata() | {
        "tokenizer.chat_template.rerank": SHORT,
        "qwen3.pooling_type": 4,
        "qwen3.classifier.output_labels": ["yes", "no"],
    }
    gguf_of(model, tmp_path / "tiny.gguf", replaced=values)
    with LLM(tmp_path / "tiny.gguf", threads=2, cpu_math="exact") as llm:
        prompts = [llm.tokenizer.encode_pair(QUERY, document)[0] for document in DOCUMENTS]
        assert prompts[0] == llm.tokenizer.encode(SHORT.format(query=QUERY, document=DOCUMENTS[0]))
        scores = llm.score(QUERY, DOCUMENTS)
    expected = expected_scores(decoder, prompts, vocabulary["yes"], vocabulary["no"])
    assert np.abs(np.array(scores) - expected).max() < 1e-5
    directory = tmp_path / "hf"
    model.save_pretrained(directory)
    write_tokenizer(directory)
    with LLM(directory, threads=2) as llm:
        prompts = [llm.tokenizer.encode_pair(QUERY, document)[0] for document in DOCUMENTS]
        scores = llm.score(QUERY, DOCUMENTS)
    expected = expected_scores(decoder, prompts, vocabulary["yes"], vocabulary["no"])
    assert np.abs(np.array(scores) - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("path", "reranks"),
    [
        ("Qwen3-Reranker-0.6B", True),
        ("models--Qwen--Qwen3-Reranker-0.6B/snapshots/e61197ed", True),
        ("qwen3-reranker-trials/Qwen3-0.6B", False),
        ("qwen3-reranker-trials/snapshots/e61197ed/Qwen3-0.6B", False),
    ],
)
def test_the_models_own_name_makes_it_a_reranker(path: str, reranks: bool) -> None:
    assert is_reranker(Path(path), ["Qwen3ForCausalLM"]) == reranks
    assert not is_reranker(Path(path), ["Qwen2ForCausalLM"])


def test_rerankers_that_cannot_be_run_are_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "Qwen3-Reranker-tiny"
    tiny_model("qwen3").save_pretrained(directory)
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json has the tokens yes and no"):
        ModelConfig.load(directory)
    write_tokenizer(directory)
    with pytest.raises(UnsupportedModel, match="use --device cpu"):
        load_shape(directory, in_torch=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UnsupportedModel, match="vocabulary of 100 lacks"):
        ModelConfig.load(directory)
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}))
    with pytest.raises(UnsupportedModel, match="has 3 labels"):
        ModelConfig.load(directory)
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    (directory / "config.json").write_text(json.dumps(config | labels))
    with pytest.raises(UnsupportedModel, match="labels no and yes"):
        ModelConfig.load(directory)


def test_an_embedder_ends_texts_with_its_end_token_and_pools_the_last_state(tmp_path: Path) -> None:
    model = tiny_model("qwen3", max_position_embeddings=2048, tie_word_embeddings=True)
    values = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    gguf_of(model, tmp_path / "tiny.gguf", tokenizer="qwen2", replaced=values)
    with LLM(tmp_path / "tiny.gguf", threads=2, cpu_math="exact") as llm:
        texts = ["hello", "hell 12"]
        prompts = [llm.tokenizer.encode(text) for text in texts]
        embeddings = llm.embed(texts)
    with torch.inference_mode():
        for ids, embedding in zip(prompts, embeddings, strict=True):
            assert ids[-1] == 256
            state = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
            assert np.abs(embedding - torch.nn.functional.normalize(state, dim=0).numpy()).max() < 1e-5
