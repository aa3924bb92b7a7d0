"""The tensors of experts, as llama.cpp's converter writes them, and back as transformers reads them."""

from typing import Any

import numpy as np


def metadata(config: Any, kind: str) -> dict[str, Any]:
    """The keys that describe experts; none for other models."""
    experts = getattr(config, "num_experts", getattr(config, "num_local_experts", 0))
    if not experts:
        return {}
    used = config.top_k_experts if kind == "gemma4" else config.num_experts_per_tok
    values = {f"{kind}.expert_count": experts, f"{kind}.expert_used_count": used}
    keys = {"expert_feed_forward_length": "moe_intermediate_size", "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    values |= {f"{kind}.{key}": getattr(config, name) for key, name in keys.items() if hasattr(config, name)}
    if kind == "ernie4_5-moe":
        values |= {f"{kind}.interleave_moe_layer_step": 1, f"{kind}.leading_dense_block_count": config.moe_layer_start_index}
        values |= {f"{kind}.expert_shared_count": config.moe_num_shared_experts, f"{kind}.expert_shared_feed_forward_length": 64}
    if kind == "hunyuan-moe":
        values |= dict.fromkeys(
            (f"{kind}.expert_feed_forward_length", f"{kind}.expert_shared_feed_forward_length"), config.intermediate_size
        )
        values |= {f"{kind}.expert_shared_count": 1}
    if kind in ("exaone-moe", "afmoe"):
        dense, scale = ("first_k_dense_replace", "routed_scaling_factor") if kind == "exaone-moe" else ("num_dense_layers", "route_scale")
        counts = {"leading_dense_block_count": getattr(config, dense), "expert_shared_count": config.num_shared_experts}
        counts |= {"expert_weights_scale": float(getattr(config, scale)), "expert_weights_norm": True}
        counts |= {"expert_shared_feed_forward_length": config.num_shared_experts * config.moe_intermediate_size}
        values |= {f"{kind}.{key}": value for key, value in counts.items()}
    if kind == "minimax-m2":
        values |= {f"{kind}.expert_feed_forward_length": config.intermediate_size, f"{kind}.expert_gating_func": 2}
    return values | ({f"{kind}.attention.sliding_window": config.sliding_window} if kind == "gpt-oss" else {})


def split(kind: str, name: str, weights: np.ndarray) -> dict[str, np.ndarray]:
    """The file's tensors of one of transformers', if it belongs to experts or to gpt-oss alone."""
    stem, last = name.rsplit(".", 1)
    block, suffix = f"blk.{stem.split('.')[2]}" if "layers" in stem else "", "bias" if last.endswith("_bias") else "weight"
    if last in ("scale", "per_expert_scale"):
        return {f"{block}.{'ffn_gate_inp' if last == 'scale' else 'ffn_down_exps'}.scale": weights}
    if last == "sinks":
        return {f"{block}.attn_sinks.weight": weights}
    if ("experts" not in stem or "shared_experts" in stem) and weights.ndim < 3:
        return {}
    down = last.startswith("down_proj") or "output_linear" in stem
    if kind == "gpt-oss":
        if suffix == "weight":
            weights = weights.transpose(0, 2, 1)
        parts = [weights] if down else [weights[:, ::2], weights[:, 1::2]]
    elif kind in ("qwen2moe", "gemma4") and not down:
        return {f"{block}.ffn_gate_up_exps.weight": weights}
    elif kind == "nemotron_h_moe" and not down:
        return {f"{block}.ffn_up_exps.weight": weights}
    else:
        parts = [weights] if down else np.split(weights, 2, 1)
    return dict(zip([f"{block}.ffn_{part}.{suffix}" for part in (["down_exps"] if down else ["gate_exps", "up_exps"])], parts, strict=True))


def join(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a converted model as transformers reads them: one for each expert, or fused ones of Granite and gpt-oss."""
    names = {name for name in weights if ".experts." in name}
    joined = {name: whole for name, whole in weights.items() if name not in names}
    for name in sorted(names):
        prefix, suffix = name.split("mlp.")[0], name.rsplit(".", 1)[1]
        up = name.replace("gate_proj", "up_proj")
        if name.split(".")[3] == "experts":  # Gemma 4
            joined[name.removesuffix(".weight")] = weights[name]
        elif f"{prefix}self_attn.sinks" in weights:
            ending = "_bias" if suffix == "bias" else ""
            both = np.stack([weights[name], weights[up]], 2).reshape(len(weights[name]), -1, *weights[name].shape[2:])
            fused = {"gate_proj": ("gate_up_proj", both), "down_proj": ("down_proj", weights[name])}.get(name.split(".")[-2])
            if fused:
                joined[f"{prefix}mlp.experts.{fused[0]}{ending}"] = fused[1] if ending else fused[1].transpose(0, 2, 1)
        elif f"{prefix}block_sparse_moe.router.layer.weight" in weights:
            if "gate_proj" in name:
                joined[f"{prefix}block_sparse_moe.input_linear.weight"] = np.concatenate([weights[name], weights[up]], 1)
        elif "gate_up_proj" in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(weights[name], 2, 1), strict=True):
                renamed = name.replace("gate_up_proj", part)
                joined |= {renamed.replace(".experts.", f".experts.{index}."): one for index, one in enumerate(half)}
        else:
            joined |= {name.replace(".experts.", f".experts.{index}."): one for index, one in enumerate(weights[name])}
    shared = {name: whole.reshape(1, -1) for name, whole in joined.items() if name.endswith("shared_expert_gate.weight")}
    return {name: np.ascontiguousarray(whole) for name, whole in (joined | shared).items()}
