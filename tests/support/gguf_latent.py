"""Attention to latents, as llama.cpp's converter writes it, and back as transformers reads it."""

from typing import Any

import numpy as np

KIND = "deepseek2"
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
LATENT |= {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
DENSE = {name: LATENT[name] for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 0.707}
TINY: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": {"rope_theta": 500.0, **YARN}}),
    ("deepseek_v3", {**LATENT, **GROUPS, "rope_parameters": {"rope_theta": 500.0, **YARN}}),
    ("youtu", {**DENSE, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("glm4_moe_lite", {**LATENT, "num_hidden_layers": 3, "routed_scaling_factor": 1.8}),
]


def metadata(config: Any) -> dict[str, Any]:
    """The keys that describe attention to latents and the experts of such models."""
    rope, key = config.rope_parameters, config.qk_nope_head_dim + config.qk_rope_head_dim
    values = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if rope["rope_type"] == "yarn":
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return {f"{KIND}.{name}": value for name, value in values.items()} | routed(config, KIND)


def routed(config: Any, kind: str) -> dict[str, Any]:
    """The keys that describe the experts of DeepSeek's models and of those like them."""
    if not hasattr(config, "n_routed_experts"):
        values = {"leading_dense_block_count": config.num_hidden_layers, "expert_feed_forward_length": config.intermediate_size}
        return {f"{kind}.{name}": value for name, value in values.items()} | {f"{kind}.expert_shared_count": 0}
    values = {
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob or None,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
    }
    return {f"{kind}.{name}": value for name, value in values.items()}


def split(name: str, weights: np.ndarray, config: Any, replaced: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of the file for one of transformers that makes keys and values or corrects the scores of experts; none for another.

    Old files, without the sizes of a head, have one tensor of keys and values.
    """
    block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
    if name.endswith("kv_b_proj.weight") and replaced.get(f"{KIND}.attention.key_length_mla", "") is None:
        return {f"{block}.attn_kv_b.weight": weights}
    if name.endswith("kv_b_proj.weight"):
        keys, values = np.split(weights.reshape(config.num_attention_heads, -1, weights.shape[-1]), [config.qk_nope_head_dim], 1)
        return {f"{block}.attn_k_b.weight": keys.swapaxes(1, 2), f"{block}.attn_v_b.weight": values}
    if name.endswith(("e_score_correction_bias", "mlp.expert_bias")):
        return {f"{block}.exp_probs_b.bias": weights}
    return {}


def join(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a converted model with one tensor of keys and values in each layer."""
    joined = {name: whole for name, whole in weights.items() if not name.endswith(("k_b_proj.weight", "v_b_proj.weight"))}
    for name in weights.keys() - joined.keys():
        if name.endswith("k_b_proj.weight"):
            both = [weights[name].swapaxes(1, 2), weights[name.replace("k_b_proj", "v_b_proj")]]
            joined[name.replace("k_b_proj", "kv_b_proj")] = np.concatenate(both, 1).reshape(-1, both[1].shape[-1])
    return joined
