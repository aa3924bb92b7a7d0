"""Tiny random models of every supported family, written by transformers with weights that make logits far from flat."""

import copy
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from chairlift.architectures import ARCHITECTURES, Code

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ROPES = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
ROPES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}

MELLUM = {"head_dim": 16, "sliding_window": 9, "layer_types": GEMMA["layer_types"]}

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.5, 3.0], "long_factor": [1.0, 3.0, 8.0]}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 8.0}
DENSE = {"num_local_experts": 0, "shared_intermediate_size": 72, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 8}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
ORIGINAL = {"original_max_position_embeddings": 4}
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LOCAL_EXPERTS = {"num_local_experts": 11, "num_experts_per_tok": 3, "intermediate_size": 40}
PHI = {"pad_token_id": 0, "tie_word_embeddings": True}
LONG = {**ORIGINAL, "rope_parameters": {**LONGROPE, **ORIGINAL}}
SHORT = {**LONGROPE, "original_max_position_embeddings": 256, "attention_factor": 1.3}

GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "num_hidden_layers": 5, "final_logit_softcapping": 3.0}
GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
GEMMA4 |= {"vocab_size_per_layer_input": 199, "pad_token_id": 0}
EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 11, "top_k_experts": 3, "moe_intermediate_size": 40}
GEMMA4_TEXT = {**GEMMA4, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16}
VISION4 = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "patch_size": 8}
TEMPERATURE = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "truncate": True}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 16, "pad_token_id": 0}
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16, "linear_num_value_heads": 4}
DELTA |= {"initializer_range": 0.15, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
DELTA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
DELTA_EXPERTS = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 72}
SPACE = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2}
SPACE |= {"mamba_chunk_size": 8, "mamba_proj_bias": True, "shared_intermediate_size": 72}
MIXERS = {"layers_block_type": ["mamba", "attention", "moe", "mlp", "mamba"], "head_dim": 16, "mlp_bias": False, "mamba_num_heads": 6}
MIXERS |= {"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 11, "num_experts_per_tok": 3}
MIXERS |= {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 72, "routed_scaling_factor": 2.5, "chunk_size": 8}
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DENSE_LATENT = dict(LATENT)
LATENT |= {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1}
GLM = {"head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
GLM |= {"attention_bias": True, "routed_scaling_factor": 2.5}
SOLAR = {"head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ERNIE = {"moe_num_experts": 11, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
ERNIE |= {"head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": True}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
DENSE_GLM = {"head_dim": 16, "pad_token_id": 0, "rope_parameters": HALF}
MINIMAX = {**LOCAL_EXPERTS, "head_dim": 16, "rope_parameters": HALF}
LATENT_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "truncate": True}
DOTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 2.5}
AFMOE = {**EXPERTS, "head_dim": 16, "sliding_window": 9, "layer_types": GEMMA["layer_types"]}
EXAONE = {**EXPERTS, "head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 3, "pad_token_id": 0}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
OLMO3 = {"sliding_window": 9, "layer_types": GEMMA["layer_types"], "pad_token_id": 0}
OLMO3 |= {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
VISION35 = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "depth": 1, "out_hidden_size": 48}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 8}
VISION |= {"depth": 1, "out_hidden_size": 48, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
PIXTRAL = {"model_type": "pixtral", **SIGLIP}
MISTRAL = {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
MINISTRAL = {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN | TEMPERATURE}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}

FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama3-rope": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "longrope": ("Qwen3", {"head_dim": 6, "rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0}, **ORIGINAL}),
    "mistral": ("Mistral", {"sliding_window": 13, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "mlp_bias": True}),
    "glm": ("Glm", DENSE_GLM),
    "glm4": ("Glm4", DENSE_GLM),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": ("Olmo3", OLMO3),
    "exaone4": ("Exaone4", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 3}),
    "exaone4-whole": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "pad_token_id": 0, "rope_parameters": ALPHA}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "pad_token_id": 0}),
    "cohere2": ("Cohere2", {"attention_bias": True, "sliding_window": 9, "sliding_window_pattern": 3, "pad_token_id": 0}),
    "cohere-norms": ("Cohere", {"logit_scale": 0.25, "pad_token_id": 0, "use_qk_norm": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 13}),
    "phi": ("Phi", {"rope_parameters": HALF}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": HALF}),
    "gpt-neox-serial": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 64}),
    "gpt2-gelu": ("GPT2LMHeadModel", {"n_inner": 64, "activation_function": "gelu", "tie_word_embeddings": False}),
    "gptj": ("GPTJ", {"n_inner": 64, "rotary_dim": 4, "tie_word_embeddings": False}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": HALF}),
    "stablelm-12b": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "rope_parameters": HALF}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "jais2": ("Jais2", {"tie_word_embeddings": True}),
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": 9, "layer_types": GEMMA["layer_types"]}),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True, "pad_token_id": 0}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": ROPES, "final_logit_softcapping": 3.0}),
    "smollm3": ("SmolLM3", {"head_dim": 16, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-sliding": ("SmolLM3", {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 9, "pad_token_id": 0}),
    "granite": ("Granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
    "granite4": ("GraniteMoeHybrid", {**MULTIPLIERS, **DENSE, "position_embedding_type": "rope"}),
    "granite4-nope": ("GraniteMoeHybrid", {**MULTIPLIERS, **DENSE, "attention_bias": True}),
    "mixtral": ("Mixtral", {**LOCAL_EXPERTS, "sliding_window": 13}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 72, "num_key_value_heads": 3}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mellum": ("Mellum", {**EXPERTS, **MELLUM, "rope_parameters": ROPES, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm4-moe": ("Glm4Moe", {**GLM, "use_qk_norm": True}),
    "glm4-moe-air": ("Glm4Moe", {**GLM, "use_qk_norm": False}),
    "solar-open": ("SolarOpen", {**SOLAR, "routed_scaling_factor": 2.5}),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 11, "moe_topk": 3, "head_dim": 16, "intermediate_size": 40, "pad_token_id": 0}),
    "afmoe": ("Afmoe", {**AFMOE, "mup_enabled": True, "route_scale": 2.5, "pad_token_id": 0}),
    "exaone-moe": ("ExaoneMoe", EXAONE),
    "dots1": ("Dots1", {**DOTS, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "flex-olmo": ("FlexOlmo", {**EXPERTS, "intermediate_size": 40, "pad_token_id": 0}),
    "gpt-oss": ("GptOss", {**LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 9, "rope_parameters": {**YARN, "truncate": False}}),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 40, "pad_token_id": 0}),
    "granite-moe": ("GraniteMoe", {**MULTIPLIERS, **LOCAL_EXPERTS}),
    "granite-moe-shared": ("GraniteMoeShared", {**MULTIPLIERS, **LOCAL_EXPERTS, "shared_intermediate_size": 72}),
    "gemma4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16}),
    "gemma4-large": ("Gemma4", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0}),
    "gemma4-moe": ("Gemma4", {**GEMMA4, **EXPERTS_BESIDE, "hidden_size_per_layer_input": 0}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": YARN | TEMPERATURE}),
    "gemma3-images": ("Gemma3ForConditionalGeneration", {"text_config": {**GEMMA, "rope_parameters": ROPES}, "vision_config": SIGLIP}),
    "mistral3-images": (
        "Mistral3ForConditionalGeneration",
        {"text_config": MISTRAL, "vision_config": PIXTRAL, "tie_word_embeddings": False},
    ),
    "ministral3-images": ("Mistral3ForConditionalGeneration", {"text_config": MINISTRAL, "vision_config": PIXTRAL}),
    "gemma4-images": ("Gemma4ForConditionalGeneration", {"text_config": GEMMA4_TEXT, "vision_config": VISION4}),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {"text_config": {"head_dim": 16, "rope_parameters": MROPE}, "vision_config": VISION}),
    "lfm2": ("Lfm2", CONVOLUTIONS),
    "lfm2-moe": ("Lfm2Moe", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "qwen3-next": ("Qwen3Next", {**DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", DELTA_EXPERTS),
    "qwen3.5-images": ("Qwen3_5ForConditionalGeneration", {"text_config": DELTA, "vision_config": VISION35}),
    "qwen3.5-moe-images": ("Qwen3_5MoeForConditionalGeneration", {"text_config": DELTA_EXPERTS, "vision_config": VISION35}),
    "granite4-hybrid": ("GraniteMoeHybrid", {**MULTIPLIERS, **SPACE, "num_local_experts": 0}),
    "granite4-moe": ("GraniteMoeHybrid", {**MULTIPLIERS, **SPACE, **LOCAL_EXPERTS}),
    "nemotron-h": ("NemotronH", {**MIXERS, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mlp_bias": True}),
    "nemotron-h-moe": ("NemotronH", MIXERS),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek-v2-groups": ("DeepseekV2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": 24}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, **GROUPS, "q_lora_rank": 24, "rope_parameters": LATENT_YARN | {"mscale": 1.0}}),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, "q_lora_rank": 24, "rope_interleave": False, "routed_scaling_factor": 1.8}),
    "youtu": ("Youtu", {**DENSE_LATENT, "q_lora_rank": 24, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 13}),
    "phi4-mini": ("Phi3", {**PHI, **LONG}),
    "phi4-mini-short": ("Phi3", {**PHI, "original_max_position_embeddings": 256, "rope_parameters": SHORT}),
}

SIGLIP2 = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16, "patch_size": 8}
CLIP = {"model_type": "clip_vision_model", **SIGLIP, "projection_dim": 32}
INTERN = SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]}
QWEN2_VL = {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 8}
QWEN2_5_VL = VISION35 | {"fullatt_block_indexes": [0]}
UNIFIED = {"patch_size": 8, "mm_embed_dim": 48, "mm_posemb_size": 16, "output_proj_dims": 48}
UNIFIED_TEXT = {name: value for name, value in GEMMA4.items() if name != "vocab_size_per_layer_input"} | {"num_kv_shared_layers": 1}
GLM4V = {"head_dim": 8, "pad_token_id": 0, "rope_parameters": {**HALF, "mrope_section": [1, 1]}}
VISION_GLM = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 48, "patch_size": 8}
MROPE2 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "SmolVLM": ("SmolVLMForConditionalGeneration", {"model_type": "llama"}, SIGLIP),
    "Idefics3": ("Idefics3ForConditionalGeneration", {"model_type": "llama"}, SIGLIP),
    "LLaVA": ("LlavaForConditionalGeneration", {"model_type": "llama"}, CLIP),
    "Pixtral": ("LlavaForConditionalGeneration", MISTRAL, PIXTRAL),
    "LLaVA-NeXT": ("LlavaNextForConditionalGeneration", MISTRAL, CLIP),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", {"rope_parameters": MROPE2}, QWEN2_VL),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": MROPE2}, QWEN2_5_VL),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        {**EXPERTS, "head_dim": 16, "rope_parameters": MROPE},
        VISION,
    ),
    "InternVL3": ("InternVLForConditionalGeneration", {"model_type": "qwen2"}, INTERN),
    "InternVL3.5": ("InternVLForConditionalGeneration", {"model_type": "qwen3", "head_dim": 16}, INTERN),
    "Gemma 4 12B": ("Gemma4UnifiedForConditionalGeneration", UNIFIED_TEXT, UNIFIED),
    "GLM-4.1V": ("Glm4vForConditionalGeneration", GLM4V, VISION_GLM),
    "GLM-4.6V-Flash": ("Glm46VForConditionalGeneration", GLM4V, VISION_GLM),
    "GLM-4.5V": ("Glm4vMoeForConditionalGeneration", {**GLM, "rope_parameters": {**HALF, "mrope_section": [2, 1, 1]}}, VISION_GLM),
    "LFM2-VL": ("Lfm2VlForConditionalGeneration", {"model_type": "lfm2", **CONVOLUTIONS}, SIGLIP2),
}
"""Classes of models that also read images, whose text is computed as one of FAMILIES, and settings of their two parts."""


def class_name(family: str) -> str:
    """The class of a family in transformers."""
    return family if family.endswith(("Generation", "HeadModel")) else f"{family}ForCausalLM"


IMAGES_IN_TORCH = ("gemma3-images", "mistral3-images", "ministral3-images", "qwen3-vl")
IN_TORCH = [
    name
    for name, (family, _) in FAMILIES.items()
    if name in IMAGES_IN_TORCH or ((known := ARCHITECTURES.get(class_name(family))) and known.code is Code.RUST_AND_TORCH)
]
"""Those that our model in torch computes too."""


_WRITTEN = TemporaryDirectory()
_written: dict[str, tuple[Path, torch.nn.Module, torch.Tensor]] = {}
"""By what it is made of: a model's files, the model, and the state of the random numbers behind it."""


def write(name: str, directory: Path, dtype: torch.dtype = torch.float32, **save: object) -> torch.nn.Module:
    """Writes the model to the directory, and returns it. One that was written before is copied."""
    made_of = repr((name, FAMILIES[name], SHAPE, dtype, save))
    if made_of not in _written:
        files = Path(_WRITTEN.name) / str(len(_written))
        _written[made_of] = files, _make(name, files, dtype, **save), torch.get_rng_state()
    files, model, random = _written[made_of]
    torch.set_rng_state(random)
    shutil.copytree(files, directory, dirs_exist_ok=True)
    return copy.deepcopy(model)


def _make(name: str, directory: Path, dtype: torch.dtype, **save: object) -> torch.nn.Module:
    family, settings = FAMILIES[name]
    model_class = getattr(transformers, class_name(family))
    nested = settings.get("text_config")
    shape = {**SHAPE, **settings} if nested is None else settings | {"text_config": SHAPE | nested}
    config = model_class.config_class(**shape, attn_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter_name, parameter in model.named_parameters():
        # Biases start at zero and norms at one, or at zero if one is added: a mistake with them would go unseen.
        if parameter_name.endswith(("bias", "router.scale", "per_expert_scale")) or "norm" in parameter_name:
            around_zero = family.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in parameter_name
            torch.nn.init.normal_(parameter, mean=0.0 if around_zero or parameter_name.endswith("bias") else 1.0, std=0.2)
        if "q_norm" in parameter_name and family.startswith("Gemma4"):
            # Scores are not divided by the size of a head: they would be so large that rounding shows.
            parameter.data /= 4
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            buffer.fill_(0.75)
        if buffer_name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.normal_(std=0.2)
    model.to(dtype).save_pretrained(directory, **save)
    return type(model).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
