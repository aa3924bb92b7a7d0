"""Gemma 2 and 3."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Windows

TENSORS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma has an additional norm after attention and after the MLP, and other names for the norms before them."""
CONSTANTS = {"hidden_activation": "gelu_pytorch_tanh"}

GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
    gguf=GGUFFormat(
        names=("gemma2",),
        constants=CONSTANTS,
        keys={
            "sliding_window": Key("attention.sliding_window", int, 4096),
            "attn_logit_softcapping": Key("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": Key("final_logit_softcapping", float, 30.0),
        },
        tensors=TENSORS,
        stored_offset=1.0,
        largest_layers=46,
    ),
    kv_heads=4,
    head_dim=256,
    max_positions=8192,
    tied=True,
    windows=Windows.LISTED,
    sliding_window=4096,
    window_interval=2,
    norm_offset=1.0,
    post_norms=True,
    activation="gelu_tanh",
    query_scalar=256.0,
    softcaps=(50.0, 30.0),
    scaled_embeddings=True,
)
GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3",
    wrappers=("Gemma3ForConditionalGeneration",),
    text_types=("gemma3_text",),
    gguf=GGUFFormat(
        names=("gemma3",),
        constants={**CONSTANTS, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        keys={
            "sliding_window": Key("attention.sliding_window", int, 4096),
            "rope_local_base_freq": Key("rope.freq_base_swa", float, 10000.0),
            "attn_logit_softcapping": Key("attn_logit_softcapping", float, optional=True),
            "final_logit_softcapping": Key("final_logit_softcapping", float, optional=True),
        },
        tensors=TENSORS,
        stored_offset=1.0,
        largest_layers=62,
    ),
    vocab_size=262208,
    heads=8,
    kv_heads=4,
    head_dim=256,
    max_positions=131072,
    tied=True,
    theta=1e6,
    local_theta=1e4,
    windows=Windows.LISTED,
    sliding_window=4096,
    window_interval=6,
    qk_norm=True,
    norm_offset=1.0,
    post_norms=True,
    activation="gelu_tanh",
    query_scalar=256.0,
    softcaps=(None, None),
    scaled_embeddings=True,
)
