"""Embeddings of encoders, against transformers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_encoders
import tiny_models
import torch
import transformers
from gguf_files import finish, writer_of
from safetensors.torch import load_file, save_file
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from chairlift import LLM, SamplingParams, _core
from chairlift.checkpoint.gguf import GGUFTensors, open_gguf
from chairlift.checkpoint.gguf_encoder import encoder_modules
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidRequest, InvalidSetting, UnsupportedModel
from chairlift.models.encoder import report_prompt
from chairlift.runner.cpu_encoder import buckets
from chairlift.sampling import EMBED
from chairlift.scheduling import Scheduling

TEXTS = [np.random.default_rng(length).integers(4, 56, length).tolist() for length in (3, tiny_encoders.LONGEST, 1, 17, 26)]
POOLINGS = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}


FAMILIES = [("Bert", "mean"), ("Bert", "first"), ("Bert", "last"), ("Roberta", "mean"), ("XLMRoberta", "first")]
FAMILIES += [("NomicBert", "mean"), ("Gemma3Text", "mean"), ("ModernBert", "first"), ("DistilBert", "mean")]


@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_embeddings_equal_those_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, pooling: str) -> None:
    oracle = tiny_encoders.write(family, tmp_path / "hf", POOLINGS[pooling])
    with LLM(tmp_path / "hf", threads=2) as llm:
        embeddings = llm.embed(TEXTS)
        assert llm.embed([]).shape == (0, embeddings.shape[1])
    assert "entries that are not known" not in caplog.text
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        expected = tiny_encoders.embed(oracle, text, pooling).numpy()
        assert np.abs(embedding - expected).max() < 1e-5, len(text)
    file = tmp_path / "file.gguf"
    tiny_encoders.gguf_of(oracle, file, pooling={"mean": 1, "first": 2, "last": 3}[pooling])
    with LLM(file, threads=1, max_num_seqs=3, max_num_batched_tokens=16) as llm:
        assert np.array_equal(llm.embed(TEXTS), embeddings)
        assert np.array_equal(np.concatenate([llm.embed(text) for text in TEXTS]), embeddings)
        assert llm.tokenizer.encode("abc de") == [2, 4, 31, 32, 7, 34, 3]
    assert "entries that are not known" not in caplog.text


def test_embeddings_that_are_compared_by_their_dot_product_keep_their_lengths(tmp_path: Path) -> None:
    oracle = tiny_encoders.write("Bert", tmp_path)
    with torch.no_grad():
        whole = oracle(input_ids=torch.tensor([TEXTS[0]])).last_hidden_state[0].mean(0).numpy()
    similarity, modules = tmp_path / "config_sentence_transformers.json", tmp_path / "modules.json"

    def embedding() -> np.ndarray:
        with LLM(tmp_path, threads=1) as llm:
            return llm.embed(TEXTS[0])[0]

    similarity.write_text(json.dumps({"similarity_fn_name": "dot"}))
    assert np.abs(embedding() - whole / np.linalg.norm(whole)).max() < 1e-5  # its modules scale them
    modules.write_text(json.dumps([module for module in json.loads(modules.read_text()) if "Normalize" not in module["type"]]))
    assert np.abs(embedding() - whole).max() < 1e-5
    similarity.write_text(json.dumps({"similarity_fn_name": "cosine"}))
    assert np.abs(embedding() - whole / np.linalg.norm(whole)).max() < 1e-5


def test_a_default_prompt_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    for name, reported in ((None, False), ("document", False), ("query", True), ("other", False)):
        caplog.clear()
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings | {"default_prompt_name": name}))
        report_prompt(tmp_path)
        assert ("puts 'query: ' before each text" in caplog.text) == reported


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_distances_change_the_scores_of_mpnet(tmp_path: Path, pooling: str) -> None:
    oracle = tiny_encoders.write("MPNet", tmp_path, POOLINGS[pooling])
    expected = np.stack([tiny_encoders.embed(oracle, text, pooling).numpy() for text in TEXTS])
    with LLM(tmp_path, threads=2, max_num_batched_tokens=16) as llm:
        embeddings = llm.embed(TEXTS)
        assert np.abs(embeddings - expected).max() < 1e-5
        assert np.array_equal(np.concatenate([llm.embed(text) for text in TEXTS]), embeddings)


@pytest.mark.parametrize("types", [0, 1])
def test_gte_under_its_first_names(tmp_path: Path, caplog: pytest.LogCaptureFixture, types: int) -> None:
    """Its scaling of positions is that of vLLM's NTKScalingRotaryEmbedding: another base, and frequencies divided by a root."""
    oracle = tiny_encoders.write("Gte", tmp_path, "cls_token", type_vocab_size=types)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {
        "encoder.layer.1.mlp.up_gate_proj.weight",
        "encoder.layer.1.attention.qkv_proj.bias",
        "encoder.layer.1.attn_ln.bias",
    } <= tensors.keys()
    save_file({f"new.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    path, dim = tmp_path / "config.json", 12
    raw = json.loads(path.read_text()) | {"architectures": ["NewModel"], "model_type": "new", "position_embedding_type": "rope"}
    del raw["rope_parameters"]
    raw["depth_of_thought"] = 3
    for scaling, theta, divisor in ((None, 500.0, 1.0), ({"type": "ntk", "factor": 2.0}, 1000.0, 2 ** (2 / dim))):
        path.write_text(json.dumps(raw | {"rope_theta": 500.0, "rope_scaling": scaling}))
        oracle.rotary_emb.inv_freq.copy_(1 / theta ** (torch.arange(0, dim, 2) / dim) / divisor)
        with LLM(tmp_path, threads=1) as llm:
            assert np.abs(llm.embed(TEXTS[1]) - tiny_encoders.embed(oracle, TEXTS[1], "first").numpy()).max() < 1e-5
    assert "entries that are not known here and not used: depth_of_thought" in caplog.text
    path.write_text(json.dumps(raw | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}))
    with pytest.raises(UnsupportedModel, match="positions of type 'ntk' is not supported"):
        LLM(tmp_path)


def test_older_entries_of_a_modernbert(tmp_path: Path) -> None:
    oracle = tiny_encoders.write("ModernBert", tmp_path, global_attn_every_n_layers=2)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    assert raw["layer_types"] == ["full_attention", "sliding_attention"] * 2
    path.write_text(json.dumps({name: value for name, value in raw.items() if name not in ("layer_types", "rope_parameters")} | older))
    with LLM(tmp_path, threads=1) as llm:
        assert np.abs(llm.embed(TEXTS[1]) - tiny_encoders.embed(oracle, TEXTS[1]).numpy()).max() < 1e-5


def test_buckets_of_distances_are_those_of_transformers() -> None:
    position = torch.arange(600)
    expected = MPNetEncoder.relative_position_bucket(position[None] - position[:, None]).numpy()
    found = buckets(600)
    assert np.array_equal(found[599:], expected[0])
    assert np.array_equal(found[:600], expected[-1])


OTHER_NAMES = [
    ("Bert", ["BertModel"], "bert."),
    ("Bert", ["BertForMaskedLM"], "bert."),
    ("Bert", ["BertForPreTraining"], ""),
    ("Bert", None, "0.auto_model."),
    ("XLMRoberta", ["XLMRobertaForMaskedLM"], "roberta."),
    ("Gemma3Text", ["Gemma3TextModel"], "model."),
    ("ModernBert", ["ModernBertForMaskedLM"], "model."),
    ("DistilBert", ["DistilBertForMaskedLM"], "distilbert."),
    ("MPNet", None, "mpnet."),
    ("Camembert", ["CamembertForMaskedLM"], "roberta."),
    ("Electra", None, "electra."),
]


@pytest.mark.parametrize(("family", "architectures", "prefix"), OTHER_NAMES)
def test_an_encoder_under_other_names(tmp_path: Path, family: str, architectures: list[str] | None, prefix: str) -> None:
    tiny_encoders.write(family, tmp_path)
    with LLM(tmp_path, threads=1) as llm:
        expected = llm.embed(TEXTS[0])
    tensors = load_file(tmp_path / "model.safetensors")
    if prefix == "bert.":  # as in checkpoints that were made of TensorFlow's
        tensors = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value for name, value in tensors.items()}
    save_file({prefix + name: value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text()) | {"architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with LLM(tmp_path, threads=1) as llm:
        assert np.array_equal(llm.embed(TEXTS[0]), expected)


def test_a_classifier_without_the_prefix(tmp_path: Path) -> None:
    tiny_encoders.write("BertForSequenceClassification", tmp_path)
    with LLM(tmp_path, threads=1) as llm:
        expected = llm.score("abc", "def")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("bert."): value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with LLM(tmp_path, threads=1) as llm:
        assert llm.score("abc", "def") == expected


def test_a_tensor_of_an_encoders_layers_that_is_not_used_is_refused(tmp_path: Path) -> None:
    tiny_encoders.write("Bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"cls.predictions.bias": torch.ones(64), "pooler.dense.bias": torch.ones(48)}, tmp_path / "model.safetensors")
    LLM(tmp_path, threads=1).close()
    save_file(tensors | {"encoder.layer.0.attention.self.distance_embedding.weight": torch.ones(9, 12)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"does not account for: encoder\.layer\.0\.attention\.self\.distance_embedding"):
        LLM(tmp_path, threads=1)


@pytest.mark.parametrize("family", ["Bert", "Gemma3Text"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
def test_an_embedding_of_quantised_weights_equals_that_of_the_dequantised(tmp_path: Path, family: str, kind: str) -> None:
    # Blocks of Q4_K have 256 numbers.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "head_dim": 64}
    sizes["query_pre_attn_scalar"] = 64
    oracle = tiny_encoders.write(family, tmp_path / "hf", None, **sizes)
    tiny_encoders.gguf_of(oracle, tmp_path / "file.gguf", gguf.GGMLQuantizationType[kind])
    with LLM(tmp_path / "file.gguf", threads=2) as llm:
        embeddings = llm.embed(TEXTS)
    tensors = GGUFTensors(tmp_path / "file.gguf")
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name in tensors.entries:
                parameter.copy_(torch.from_numpy(tensors.values(name)))
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        assert np.abs(embedding - tiny_encoders.embed(oracle, text).numpy()).max() < 1e-4, len(text)


CLASSIFIERS = ["BertForSequenceClassification", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_of_pairs_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    oracle = tiny_encoders.write(family, tmp_path / "hf", type_vocab_size=1 if "Roberta" in family else 2)
    documents = ["d", "def ghi", "abc abc abc"]
    with LLM(tmp_path / "hf", threads=2, max_num_batched_tokens=16) as llm:
        scores = llm.score("abc", documents)
        assert [llm.score("abc", [document])[0] for document in documents] == scores
        with pytest.raises(InvalidRequest, match="only scores pairs of texts"):
            llm.embed("abc")
    expected = [tiny_encoders.score(oracle, "abc", document) for document in documents]
    assert np.allclose(scores, expected, atol=1e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    plain = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | plain))
    with LLM(tmp_path / "hf", threads=1) as llm:
        assert np.allclose(1 / (1 + np.exp(-np.array(llm.score("abc", documents)))), expected, atol=1e-5)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"id2label": {"0": "no", "1": "yes"}}))
    with pytest.raises(UnsupportedModel, match="2 labels"):
        LLM(tmp_path / "hf")
    # Only a GGUF file may lack the layer before the labels.
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    path, missing = tmp_path / "hf" / "model.safetensors", "pooler.dense.weight" if family.startswith("Bert") else "classifier.dense.weight"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.endswith(missing)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"has no tensor .*{missing}"):
        LLM(tmp_path / "hf")


OTHER_CLASSIFIERS = [("ModernBert", {"classifier_pooling": "cls"}), ("ModernBert", {"classifier_pooling": "mean"}), ("Electra", {})]
OTHER_CLASSIFIERS += [("Camembert", {"type_vocab_size": 1}), ("Gte", {"type_vocab_size": 1})]


@pytest.mark.parametrize(("family", "settings"), OTHER_CLASSIFIERS)
def test_scores_of_classifiers_with_other_heads(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    oracle = tiny_encoders.write(f"{family}ForSequenceClassification", tmp_path / "hf", **settings)
    documents = ["d", "def ghi"]
    expected = [tiny_encoders.score(oracle, "abc", document) for document in documents]
    with LLM(tmp_path / "hf", threads=2) as llm:
        scores = llm.score("abc", documents)
    assert np.allclose(scores, expected, atol=1e-5)
    if settings == {"classifier_pooling": "cls"}:
        tiny_encoders.gguf_of(oracle, tmp_path / "file.gguf", pooling=4)
        with LLM(tmp_path / "file.gguf", threads=1) as llm:
            assert np.array_equal(llm.score("abc", documents), scores)


def test_scores_of_a_gguf_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = tiny_encoders.write("XLMRobertaForSequenceClassification", tmp_path / "hf", type_vocab_size=1)
    tiny_encoders.gguf_of(oracle, tmp_path / "file.gguf", pooling=None)
    with LLM(tmp_path / "file.gguf", threads=1) as llm:
        assert np.allclose(
            llm.score("abc", ["d", "ef gh"]), [tiny_encoders.score(oracle, "abc", text) for text in ("d", "ef gh")], atol=1e-5
        )
        assert llm.tokenizer.encode_pair("abc", "d") == ([2, 4, 31, 32, 3, 7, 3], 5)
    assert "without the layer before it" not in caplog.text
    # llama.cpp's converter leaves out BERT's pooler.
    oracle = tiny_encoders.write("BertForSequenceClassification", tmp_path / "bert")
    oracle.classifier = torch.nn.ModuleDict({"out_proj": oracle.classifier})
    tiny_encoders.gguf_of(oracle, tmp_path / "bert.gguf", pooling=4)
    with LLM(tmp_path / "bert.gguf", threads=1) as llm:
        (score,) = llm.score("abc", ["d"])
    with torch.no_grad():
        ids, types = torch.tensor([[2, 4, 31, 32, 3, 7, 3]]), torch.tensor([[0] * 5 + [1] * 2])
        state = oracle.bert(input_ids=ids, token_type_ids=types).last_hidden_state[0, 0]
        assert np.isclose(score, torch.sigmoid(oracle.classifier["out_proj"](state)).item(), atol=1e-5)
    assert "without the layer before it" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"bert.pooling_type": 0}, "a state for each token"),
        ({"bert.pooling_type": 9}, "pooling_type is 9"),
        ({"bert.attention.causal": True}, "attention.causal is true"),
        ({"bert.expert_count": 8}, "expert_count"),
        ({"bert.embedding_length": 40}, "where the configuration asks for"),
    ],
)
def test_unsuitable_files_of_encoders_are_refused(directory: Path, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    oracle = transformers.BertModel.from_pretrained(directory)
    tiny_encoders.gguf_of(oracle, tmp_path / "file.gguf", replaced=metadata)
    with pytest.raises(UnsupportedModel, match=message):
        LLM(tmp_path / "file.gguf")


def test_a_layer_after_the_pooling_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "file.gguf", {"general.architecture": "gemma-embedding"})
    writer.add_tensor("dense_2.weight", np.zeros(32, np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModel, match=r"dense_2.weight is \[32\], and no matrix"):
        encoder_modules(open_gguf(tmp_path / "file.gguf"))


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


def test_a_file_of_blocks_is_computed_with_activations_of_16_bits_where_that_is_faster(tmp_path: Path) -> None:
    oracle = tiny_encoders.write("Bert", tmp_path / "hf", hidden_size=64, intermediate_size=64)
    file = tmp_path / "file.gguf"
    tiny_encoders.gguf_of(oracle, file, gguf.GGMLQuantizationType.Q8_0)

    def embed(**settings: Any) -> np.ndarray:
        with LLM(file, threads=1, **settings) as llm:
            return llm.embed(TEXTS)

    found, exact = embed(), embed(cpu_math="exact")
    if _core.byte_products("auto") and _core.bf16_products("auto") != "tiles":
        assert np.array_equal(found, embed(cpu_math="int16"))
        assert 0 < np.abs(found - exact).max() < 1e-3
    else:
        assert np.array_equal(found, exact)


def test_a_step_makes_progress_and_is_exact_without_being_asked(llm: LLM) -> None:
    assert ["arithmetic", "float32", "no activation is rounded"] in llm.engine.info.decisions
    llm.embed(TEXTS[0])
    assert llm.engine.runner.progress > 0


def test_text_is_tokenized_and_shortened_embeddings_have_length_1(llm: LLM) -> None:
    (whole,), (short,) = llm.embed("abc"), llm.embed(["abc"], dimensions=5)
    assert np.allclose(short, whole[:5] / np.linalg.norm(whole[:5]))
    assert whole.dtype == np.float32
    assert np.isclose(np.linalg.norm(whole), 1)
    tokens = llm.tokenizer.encode("abc de")
    assert tokens == [2, 4, 31, 32, 7, 34, 3]
    assert llm.tokenizer.decode(tokens, skip_special_tokens=False) == "[CLS] abc de [SEP]"
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


def test_a_limit_for_all_models_gives_way_to_the_positions_of_an_encoder(tmp_path: Path) -> None:
    tiny_encoders.write("Bert", tmp_path)
    engine = Engine(EngineConfig(model=str(tmp_path), max_model_len=100, shared_max_model_len=True))
    assert engine.info.max_text_len == tiny_encoders.LONGEST
    assert ["--max-model-len", "not used", "100 is for all models, and this one was made for 64 tokens"] in engine.info.decisions
    engine = Engine(EngineConfig(model=str(tmp_path), max_model_len=30, shared_max_model_len=True))
    assert engine.info.max_text_len == 30
    assert "--max-model-len" not in [what for what, *_ in engine.info.decisions]


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
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "2_CNN", "type": "sentence_transformers.models.CNN"}]))
    with pytest.raises(UnsupportedModel, match="a module CNN"):
        LLM(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite"])
def test_a_decoder_s_embedding_is_its_last_state_beside_running_answers(tmp_path: Path, family: str) -> None:
    oracle = tiny_models.write(family, tmp_path)
    texts = [np.random.default_rng(length).integers(4, 199, length).tolist() for length in (3, 40, 1, 17, 40)]
    texts[4][:32] = texts[1][:32]  # the prefix cache has its beginning
    with LLM(tmp_path, threads=2, max_num_seqs=3, max_num_batched_tokens=16, tokenizer=str(_letters(tmp_path))) as llm:
        answers = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
        alone = llm.generate(texts[1], answers)[0]
        mixed = llm.generate([*texts, texts[1]], [*[EMBED] * len(texts), answers])
        assert (mixed[-1].token_ids, mixed[-1].logprobs) == (alone.token_ids, alone.logprobs)
        assert all(output.token_ids == [] and output.finish_reason == "stop" for output in mixed[:-1])
        assert mixed[4].cached_tokens == 32
        embeddings = llm.embed(texts)
        llm.engine.check()
    assert np.array_equal(embeddings, np.array([output.embedding for output in mixed[:-1]], dtype=np.float32))
    for text, embedding in zip(texts, embeddings, strict=True):
        with torch.no_grad():
            state = oracle.model(input_ids=torch.tensor([text])).last_hidden_state[0, -1]
        assert np.abs(embedding - (state / state.norm()).numpy()).max() < 1e-4, len(text)


def test_a_decoder_without_its_prefix_and_one_with_other_modules(tmp_path: Path) -> None:
    oracle = tiny_models.write("qwen3", tmp_path / "whole")
    bare = tmp_path / "bare"
    oracle.model.save_pretrained(bare)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tokenizer = str(_letters(bare))
    with LLM(bare, threads=1, tokenizer=tokenizer) as llm, LLM(tmp_path / "whole", threads=1, tokenizer=tokenizer) as other:
        assert np.array_equal(llm.embed([[5, 6, 7]]), other.embed([[5, 6, 7]]))
    (bare / "modules.json").write_text(json.dumps([{"path": "2_CNN", "type": "sentence_transformers.models.CNN"}]))
    with LLM(bare, threads=1, tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequest, match="computes no embeddings"):
            llm.embed([[5, 6, 7]])
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def _letters(directory: Path) -> Path:
    tiny_encoders.tokenizer().save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"
