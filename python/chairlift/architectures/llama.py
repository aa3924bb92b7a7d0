"""Llama, Arcee, Jais 2, CWM, Helium, Seed-OSS, Mistral and Ministral."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Projections, Windows

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2 and 3, SmolLM2, TinyLlama, InternLM3, IQuest-Coder; Mistral 7B as GGUF; text of SmolVLM and LLaVA",
    aliases=("InternLM3ForCausalLM", "IQuestCoderForCausalLM", "LLaMAForCausalLM"),  # the last in the first conversions
    wrappers=(
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
    ),
    text_types=("llama",),
    defaults={"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    gguf=GGUFFormat(names=("llama",), adjacent_pairs=True),
    max_positions=2048,
    mlp_bias=False,
)
ARCEE = Architecture(
    name="ArceeForCausalLM",
    model_type="arcee",
    models="AFM-4.5B",
    gguf=GGUFFormat(names=("arcee",), constants={"hidden_act": "relu2"}, adjacent_pairs=True),
    max_positions=4096,
    rms_norm_eps=1e-5,
    projections=Projections(gate_up=("mlp.up_proj",)),
    mlp_bias=False,
    activation="relu2",
)
JAIS2 = replace(
    ARCEE,
    name="Jais2ForCausalLM",
    model_type="jais2",
    models="Jais 2",
    gguf=GGUFFormat(names=("jais2",), constants={"hidden_act": "relu2"}),
    max_positions=8192,
    norm_eps="layer_norm_eps",
    centred=True,
)
CWM = Architecture(
    name="CwmForCausalLM",
    model_type="cwm",
    models="CWM",
    kv_heads=8,
    head_dim=128,
    max_positions=131072,
    rms_norm_eps=1e-5,
    mlp_bias=False,
    theta=1e6,
    windows=Windows.LISTED,
    sliding_window=8192,
)
HELIUM = Architecture(
    name="HeliumForCausalLM",
    model_type="helium",
    models="Helium 1",
    kv_heads=20,
    head_dim=128,
    max_positions=4096,
    rms_norm_eps=1e-8,
    theta=100_000.0,
    qkv_bias=("attention_bias", False),
    output_bias=False,
    adjacent_pairs=True,
)
SEED_OSS = Architecture(
    name="SeedOssForCausalLM",
    model_type="seed_oss",
    models="Seed-OSS-36B",
    gguf=GGUFFormat(names=("seed_oss",), tensors={"post_attention_norm": "post_attention_layernorm"}),
    head_dim=128,
    max_positions=524288,
    qkv_bias=("attention_bias", True),
    output_bias=False,
    mlp_bias=False,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Mistral Small 3, text of Pixtral",
    aliases=("MinistralForCausalLM",),
    wrappers=("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    text_types=("mistral",),
    defaults={"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    kv_heads=8,
    max_positions=131072,
    windows=Windows.ALL_UNLESS_LISTED,
    sliding_window=4096,
    output_bias=False,
)
MINISTRAL3 = Architecture(
    name="Ministral3ForCausalLM",
    model_type="ministral3",
    models="Ministral 3; Mistral Small 3 as GGUF",
    wrappers=("Mistral3ForConditionalGeneration",),
    text_types=("ministral3",),
    gguf=GGUFFormat(names=("mistral3",), adjacent_pairs=True),
    kv_heads=8,
    head_dim=128,
    max_positions=262144,
    rms_norm_eps=1e-5,
    theta=1e6,
    output_bias=False,
    windows=Windows.ALL,
    temperature=True,
)
