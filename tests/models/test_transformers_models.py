"""Models of transformers with our attention give what they give by themselves, however their tokens are computed."""

import copy

import numpy as np
import pytest
import torch
from tiny_transformers import DYNAMIC, EXPERTS, LONGROPE, TYPES, VOCABULARY, adopted, build, configure, logits_of

from chairlift.errors import UnsupportedModel
from chairlift.models.shape import KvSpec
from chairlift.models.transformers_config import TransformersConfig, skeleton
from chairlift.models.transformers_model import TransformersModel
from chairlift.runner.self_check import check

LENGTHS = (23, 7, 31)
STEPS = [
    # Whole prompts beside pieces of others, pieces that end within blocks, decodes; sequences come and go.
    [5, 7, 0],
    [9, 0, 13],
    [8, 0, 1],
    [0, 0, 16],
    [1, 0, 1],
]


@torch.inference_mode()
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.slow
def test_ragged_chunked_and_mixed_steps_give_the_logits_of_the_whole(name):
    reference = build(configure(name))
    ours = adopted(copy.deepcopy(reference))
    prompts = [np.random.default_rng(length).integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    assert [sum(column) for column in zip(*STEPS, strict=True)] == list(LENGTHS)
    for prompt, found in zip(prompts, logits_of(ours, prompts, STEPS), strict=True):
        expected = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        assert expected.std() > 0.01
        error = (found - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "rope"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_rotary_frequencies_do_not_follow_from_the_company(kind, rope):
    """They are those of the longest sequence that may come: what transformers gives a sequence at the head of one so long."""
    original = {"original_max_position_embeddings": 16, "max_position_embeddings": 64 if kind == "phi3" else 16}
    reference = build(configure(kind, rope_parameters=rope, **original))
    # Before it runs, for frequencies stay as the last sequence had them.
    long, short = copy.deepcopy(reference), copy.deepcopy(reference)
    prompts = [np.random.default_rng(length).integers(3, VOCABULARY, length).tolist() for length in LENGTHS]

    def expected(prompt: list[int], longest: int) -> torch.Tensor:
        return reference(input_ids=torch.tensor([prompt + [5] * (longest - len(prompt))]), use_cache=False).logits[0, : len(prompt)]

    assert not torch.allclose(expected(prompts[1], 64), expected(prompts[1], 7), rtol=1e-3, atol=1e-3)
    found = logits_of(adopted(long, longest=64), prompts, STEPS)
    for prompt, logits in zip(prompts, found, strict=True):
        assert torch.allclose(logits, expected(prompt, 64), rtol=1e-4, atol=1e-4)
    [logits] = logits_of(adopted(short, longest=16), prompts[1:2], [[4], [3]])
    assert torch.allclose(logits, expected(prompts[1], 7), rtol=1e-4, atol=1e-4)


LLAMA4 = EXPERTS | {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}


def shape(name: str, **changes: object) -> TransformersConfig:
    return TransformersConfig.of(configure(name, **changes), "a test")


def test_layers_may_differ_in_all_that_the_cache_keeps():
    assert shape("gemma2").kv_specs == (KvSpec(2, 8, 8, 9), KvSpec(2, 8, 8, None))
    assert shape("llama").kv_specs == (KvSpec(2, 8, 8), KvSpec(2, 8, 8))
    assert shape("deepseek_v3").kv_specs == (KvSpec(4, 24, 16),) * 2
    different = shape("mimo_v2_flash", layer_types=["full_attention", "sliding_attention"]).kv_specs
    assert [spec.window for spec in different] == [None, 9]
    assert different[0].kv_heads != different[1].kv_heads
    assert different[0].head_dim != different[0].value_dim


def test_what_memory_goes_by_is_found_without_weights():
    gpt2 = shape("gpt2", vocab_size=100, max_position_embeddings=64, dtype="bfloat16")
    assert (gpt2.architecture, gpt2.max_position_embeddings, gpt2.vocab_size, gpt2.num_layers) == ("GPT2LMHeadModel", 64, 100, 2)
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.num_heads, gpt2.dtype) == (32, 128, 4, "bfloat16")
    assert gpt2.num_weights == sum(parameter.numel() for parameter in build(gpt2.theirs).parameters())
    assert (gpt2.decoder, shape("opt").decoder, shape("gemma3").decoder) == ("transformer", "model.decoder", "model")
    # Two experts at work on a token.
    assert shape("mixtral", vocab_size=100).intermediate_size == 2 * 2 * 64


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama4_text", EXPERTS, r"layers of chunked_attention \(supported: full_attention, sliding_attention\)"),
        ("llama4_text", LLAMA4, "counts the positions of attention by itself"),
        ("roberta", {"is_decoder": True}, r"counts positions from its padding token's number on \(roberta\.embeddings\), and not from 0"),
        ("minimax", EXPERTS, "layers of linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("mamba", {}, "does not let others compute its attention"),
        ("falcon", {}, "does not let others compute its attention"),
        ("bert", {}, "its attention is not causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its attention is not causal"),
        ("diffllama", {}, "does not run each of its layers once"),
        ("doge", {}, "attention_mask, which ours does not know"),
        ("nemotron", {}, "does not hand on what it is given"),
        (
            "phimoe",
            {"rope_parameters": LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.2}},
            "scales all positions by the longest sequence",
        ),
        ("t5", {}, r"t5 is no model of text in transformers \(model_type t5 has none\), and no encoder of docs"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r"\(model_type llama has LlamaForCausalLM\)"),
        ("jetmoe", EXPERTS, "cannot be tried before the weights are loaded"),
    ],
)
def test_what_would_go_wrong_in_a_paged_cache_is_refused(name, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        shape(name, **changes)


def test_layers_without_attention_are_noticed_where_nothing_names_them(monkeypatch):
    theirs = configure("llama")

    class Skipping(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    def half(config):
        model = skeleton(config)
        model.model.layers[1] = Skipping()
        return model

    monkeypatch.setattr("chairlift.models.transformers_config.skeleton", half)
    with pytest.raises(UnsupportedModel, match="has 2 layers, of which 1 have attention"):
        TransformersConfig.of(theirs, "a test")


def test_texts_need_no_packages_for_images(monkeypatch):
    def without(config):
        if hasattr(config, "vision_config"):
            raise ImportError("TimmWrapperModel requires the timm library")
        return skeleton(config)

    monkeypatch.setattr("chairlift.models.transformers_config.skeleton", without)
    theirs = configure("gemma3")
    theirs.dtype = "bfloat16"
    found = TransformersConfig.of(theirs, "a test")
    assert (found.architecture, found.dtype, found.theirs) == ("Gemma3ForCausalLM", "bfloat16", theirs.text_config)
    theirs.text_config.vision_config = {}
    with pytest.raises(UnsupportedModel, match="transformers cannot build it: TimmWrapperModel requires the timm library"):
        TransformersConfig.of(theirs, "a test")


def checked(model: TransformersModel) -> None:
    check(model, next(model.model.parameters()).dtype, torch.device("cpu"), VOCABULARY, "it")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
@pytest.mark.slow
def test_the_check_at_the_start_passes(name, dtype):
    ours = adopted(build(configure(name)).to(dtype))
    before = ours.specs
    checked(ours)
    assert ours.specs == before
    assert getattr(ours.text, "sliding_window", None) == getattr(configure(name), "sliding_window", None)


@pytest.mark.slow
def test_the_check_sees_a_window_that_is_only_in_the_mask():
    # PhiMoE does not tell attention of its window; one as wide as any sequence hides nothing.
    for window, longest in ((None, 128), (64, 64)):
        checked(adopted(build(configure("phimoe", sliding_window=window)), longest))
    with pytest.raises(UnsupportedModel, match="the model's logits with a paged cache differ from transformers' own"):
        checked(adopted(build(configure("phimoe", sliding_window=64))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_sees_what_is_kept_beside_keys_and_values(dtype):
    ours = adopted(build(configure("llama")).to(dtype))
    # As a convolution over tokens would: each sees the one before it on the token axis.
    ours.model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, 1),))
    with pytest.raises(UnsupportedModel, match="it has state besides keys and values"):
        checked(ours)


def test_the_check_sees_positions_of_another_way_to_count():
    model = build(configure("gpt2"))
    forward = model.transformer.forward

    def later(input_ids, position_ids=None, **how):
        own = torch.arange(2, 2 + input_ids.shape[1])[None]
        return forward(input_ids=input_ids, position_ids=own if position_ids is None else position_ids, **how)

    model.transformer.forward = later
    with pytest.raises(UnsupportedModel, match="or counts positions in a way of its own"):
        checked(adopted(model))


def test_the_check_sees_what_is_not_a_number():
    ours = adopted(build(configure("llama")))
    ours.model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: output * float("nan"))
    with pytest.raises(UnsupportedModel, match="error nan"):
        checked(ours)
