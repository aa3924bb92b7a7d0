"""OLMoE and OLMo 2."""

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Mixture

OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    models="OLMoE",
    gguf=GGUFFormat(names=("olmoe",)),
    max_positions=4096,
    rms_norm_eps=1e-5,
    qk_norm=True,
    whole_norms=True,
    mixture=Mixture(inner="intermediate_size"),
)
OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    models="OLMo 2",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(
        names=("olmo2",), tensors={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    ),
    qk_norm=True,
    whole_norms=True,
    post_norms=True,
)
