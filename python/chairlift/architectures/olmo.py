"""OLMoE."""

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Mixture

OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    models="OLMoE",
    code=Code.RUST,
    gguf=GGUFFormat(names=("olmoe",)),
    max_positions=4096,
    rms_norm_eps=1e-5,
    qk_norm=True,
    whole_norms=True,
    mixture=Mixture(inner="intermediate_size"),
)
