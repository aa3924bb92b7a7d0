"""LFM2, with and without experts: most layers are short convolutions."""

from dataclasses import replace

from chairlift.architectures.architecture import (
    TOP,
    Architecture,
    GGUFFormat,
    Key,
    Mixture,
    Norms,
    Projections,
    Recurrence,
    RecurrentKind,
    Scores,
)

TENSORS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}

LFM2 = Architecture(
    name="Lfm2ForCausalLM",
    model_type="lfm2",
    models="LFM2, LFM2.5, text of LFM2-VL",
    wrappers=("Lfm2VlForConditionalGeneration",),
    text_types=("lfm2",),
    gguf=GGUFFormat(
        names=("lfm2",),
        constants={"block_auto_adjust_ff_dim": False},
        keys={"conv_L_cache": Key("shortconv.l_cache", int)},
        tensors=TENSORS,
        top={**TOP, "token_embd_norm": "model.embedding_norm"},
    ),
    kv_heads=8,
    max_positions=128000,
    norm_eps="norm_eps",
    rms_norm_eps=1e-5,
    tied=True,
    projections=Projections(output="self_attn.out_proj", gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2"),
    norms=Norms("operator_norm", "self_attn.q_layernorm", "self_attn.k_layernorm", "ffn_norm", "model.embedding_norm"),
    output_bias=False,
    theta=1e6,
    qk_norm=True,
    recurrence=Recurrence(
        kind=RecurrentKind.CONVOLUTION,
        types=("conv",),
        prefix="conv.",
        convolution="conv",
        taps=("conv_L_cache", 3),
        conv_bias=("conv_bias", False),
        bias=("conv_bias", False),
    ),
)
LFM2_MOE = replace(
    LFM2,
    name="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    models="LFM2-8B-A1B, LFM2-24B-A2B",
    text_types=("lfm2_moe",),
    gguf=GGUFFormat(
        names=("lfm2moe",),
        constants={"norm_topk_prob": True},
        keys={"conv_L_cache": Key("shortconv.l_cache", int), "num_dense_layers": Key("leading_dense_block_count", int, 0)},
        tensors={
            **TENSORS,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.w1",
            "ffn_down_exps": "feed_forward.experts.w2",
            "ffn_up_exps": "feed_forward.experts.w3",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        top={**TOP, "token_embd_norm": "model.embedding_norm"},
    ),
    mixture=Mixture(
        router="feed_forward.gate",
        gate="feed_forward.experts.{}.w1",
        up="feed_forward.experts.{}.w3",
        down="feed_forward.experts.{}.w2",
        scores=Scores.SIGMOID,
        choice_bias="feed_forward.expert_bias",
        epsilon=1e-6,
        scale=("routed_scaling_factor", 1.0),
        dense=("num_dense_layers", 2),
        normalised=("norm_topk_prob", True),
    ),
)
