"""Mixtral, whose GGUF files say that they hold a Llama, and MiniMax-M2."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Mixture, Scores, Windows

TENSORS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
EXPERTS = Mixture(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    count="num_local_experts",
    inner="intermediate_size",
    normalised=True,
)
CHOICE_BIAS = "block_sparse_moe.e_score_correction_bias"

MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    models="Mixtral 8x7B, 8x22B",
    gguf=GGUFFormat(
        names=("llama",),
        tensors=TENSORS,
        adjacent_pairs=True,
    ),
    kv_heads=8,
    max_positions=131072,
    rms_norm_eps=1e-5,
    theta=1e6,
    windows=Windows.ALL,
    output_bias=False,
    mixture=EXPERTS,
)
MINIMAX_M2 = Architecture(
    name="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    models="MiniMax-M2, M2.1, M2.5",
    gguf=GGUFFormat(names=("minimax-m2",), tensors={**TENSORS, "exp_probs_b.bias": CHOICE_BIAS}),
    kv_heads=8,
    head_dim=128,
    max_positions=196608,
    theta=5e6,
    output_bias=False,
    qk_norm=True,
    whole_norms=True,
    rotary=1.0,
    mixture=replace(EXPERTS, scores=Scores.SIGMOID, choice_bias=CHOICE_BIAS),
)
