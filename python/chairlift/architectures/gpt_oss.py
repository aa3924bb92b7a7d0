"""gpt-oss."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Mixture, Scores, Windows

GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss-20b, gpt-oss-120b",
    gguf=GGUFFormat(
        names=("gpt-oss",),
        keys={"sliding_window": Key("attention.sliding_window", int, 128)},
        tensors={
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        truncates_yarn=False,
    ),
    kv_heads=8,
    head_dim=64,
    max_positions=131072,
    rms_norm_eps=1e-5,
    theta=150000.0,
    windows=Windows.LISTED,
    sliding_window=128,
    window_interval=2,
    sinks=True,
    mixture=Mixture(
        router="mlp.router",
        both="mlp.experts.gate_up_proj",
        alternating=True,
        transposed="mlp.experts.down_proj",
        biases=True,
        count="num_local_experts",
        inner="intermediate_size",
        scores=Scores.LOGITS,
        clamped=True,
    ),
)
