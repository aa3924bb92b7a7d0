"""Mixtral, whose GGUF files say that they hold a Llama."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Mixture, Windows

MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    models="Mixtral 8x7B, 8x22B",
    gguf=GGUFFormat(
        names=("llama",),
        tensors={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.w1",
            "ffn_up_exps": "block_sparse_moe.experts.w3",
            "ffn_down_exps": "block_sparse_moe.experts.w2",
        },
        adjacent_pairs=True,
    ),
    kv_heads=8,
    max_positions=131072,
    rms_norm_eps=1e-5,
    theta=1e6,
    windows=Windows.ALL,
    output_bias=False,
    mixture=Mixture(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
        count="num_local_experts",
        inner="intermediate_size",
        normalised=True,
    ),
)
