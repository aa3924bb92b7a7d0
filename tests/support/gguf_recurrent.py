"""Tiny hybrid models, and their GGUF files as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import gguf_experts
import numpy as np
import torch
from gguf_files import byte_level_metadata, finish, multipliers_of, quantized, sizes_of, tiny_model, writer_of
from transformers import PreTrainedModel

NAMES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
    "granitemoehybrid_dense": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe",
}
"""The names of kinds of models in GGUF files."""
TYPES = {"granitemoehybrid_dense": "granitemoehybrid", "nemotron_h_moe": "nemotron_h"}
"""transformers' names of the types of kinds, where they differ."""
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
DELTA = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_conv_kernel_dim": 3}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
SPACE = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
SPACE |= {"mamba_n_groups": 2, "mamba_chunk_size": 8, "shared_intermediate_size": 64, "embedding_multiplier": 12.0}
SPACE |= {"attention_multiplier": 0.2, "residual_multiplier": 0.25, "logits_scaling": 8.0}
MIXERS = {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16}
MIXERS |= {"n_groups": 2, "chunk_size": 8, "n_routed_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MIXERS |= {"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1, "tie_word_embeddings": True},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "rope_parameters": ROPE},
    "qwen3_5_text": {**DELTA, "rope_parameters": ROPE},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "rope_parameters": ROPE},
    "granitemoehybrid": {**SPACE, "num_local_experts": 11, "num_experts_per_tok": 3, "intermediate_size": 32},
    "granitemoehybrid_dense": {**SPACE, "num_local_experts": 0},
    "nemotron_h": {**MIXERS, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mlp_bias": True},
    "nemotron_h_moe": MIXERS,
}
"""Settings of a tiny model of each type."""


def rounded_model(kind: str) -> PreTrainedModel:
    """A random model whose matrices have the numbers of Q8_0, so that its file loses nothing."""
    model = tiny_model(TYPES.get(kind, kind), **SETTINGS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_quantized(name, parameter.numpy()):
                rows = parameter.numpy().reshape(-1, parameter.shape[-1])
                numbers = gguf.dequantize(gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(numbers).reshape(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.normal_(std=0.1)
    return model


def is_quantized(name: str, weights: np.ndarray) -> bool:
    """Whether the converter's files have a tensor in blocks."""
    plain = ("conv", "norm", "gate_inp", ".gate.", "router", "A_log", "ssm_a", "ssm_d")
    return weights.ndim > 1 and not any(part in ".".join(name.rsplit(".", 3)[-3:]) for part in plain)


def write(model: PreTrainedModel, path: Path, *, replaced: dict[str, Any] | None = None, without: str = "") -> None:
    """Writes the file of a model, with some metadata replaced and without one tensor."""
    config, kind = model.config, NAMES[model.config.model_type]
    if kind == "nemotron_h" and "moe" in config.layer_types:
        kind = "nemotron_h_moe"
    writer = writer_of(path, _metadata(config, kind) | {f"{kind}.{key}": value for key, value in (replaced or {}).items()})
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        if kind.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name:
            weights = weights + np.float32(1)
        if kind == "qwen35" or kind == "qwen35moe":
            weights = _tiled(name, weights, config)
        if kind == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weights = weights.reshape(heads, 2, -1, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)
        pieces = _own(name, weights, config) or gguf_experts.split(kind, name, weights)
        if not pieces:
            stem, suffix = name.rsplit(".", 1)
            stem = stem.replace("model.", "backbone.", 1) if kind.startswith("nemotron") else stem
            known = names.get_name(stem) or names.get_name(f"{stem}.layer")
            pieces = {f"{known}.{suffix}": weights.reshape(weights.shape[weights.shape[0] == 1 :])}
        for own, piece in pieces.items():
            if own == without:
                continue
            used = gguf.GGMLQuantizationType.Q8_0 if is_quantized(own, piece) else gguf.GGMLQuantizationType.F32
            writer.add_tensor(own, quantized(np.ascontiguousarray(piece), used), raw_dtype=used)
    finish(writer)


def _metadata(config: Any, kind: str) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    recurrent = [name not in ("full_attention", "attention") for name in config.layer_types]
    values = {
        **sizes_of(config, kind),
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": 16,
        f"{kind}.attention.value_length": 16,
        f"{kind}.attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None)
        or getattr(config, "norm_eps", None)
        or config.layer_norm_epsilon,
        f"{kind}.rope.freq_base": rope["rope_theta"],
        **byte_level_metadata("gpt-2"),
        **({} if kind == "nemotron_h" else gguf_experts.metadata(config, kind)),
    }
    if not kind.startswith("qwen"):
        values[f"{kind}.attention.head_count_kv"] = [0 if entry else config.num_key_value_heads for entry in recurrent]
    if kind.startswith("lfm2"):
        values |= {f"{kind}.shortconv.l_cache": config.conv_L_cache}
    if kind == "lfm2moe":
        values |= {f"{kind}.leading_dense_block_count": config.num_dense_layers, f"{kind}.expert_gating_func": 2}
    if kind.startswith("qwen"):
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        sizes = config.linear_conv_kernel_dim, config.linear_key_head_dim, *heads, heads[1] * config.linear_value_head_dim
        values |= {f"{kind}.rope.dimension_count": int(16 * rope["partial_rotary_factor"])}
        values |= {f"{kind}.attention.recurrent_layers": recurrent, f"{kind}.full_attention_interval": 4}
    if kind.startswith("qwen35"):
        values[f"{kind}.rope.dimension_sections"] = [11, 11, 10, 0]
    if kind == "granitehybrid":
        sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads, 2 * config.hidden_size
        values |= multipliers_of(config, kind)
        values |= {f"{kind}.rope.scaling.finetuned": False, f"{kind}.expert_shared_feed_forward_length": config.shared_intermediate_size}
    if kind.startswith("nemotron"):
        sizes = config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads, 32 * config.mamba_num_heads
        inner = config.moe_intermediate_size if kind.endswith("moe") else config.intermediate_size
        values[f"{kind}.feed_forward_length"] = [inner if entry in ("moe", "mlp") else 0 for entry in config.layer_types]
        values |= {f"{kind}.rope.scaling.finetuned": False, f"{kind}.rope.dimension_count": 16}
        del values[f"{kind}.rope.freq_base"]
    if kind == "nemotron_h_moe":
        values |= {f"{kind}.expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size}
        values |= {f"{kind}.expert_weights_norm": True, f"{kind}.expert_weights_scale": config.routed_scaling_factor}
        values |= {f"{kind}.expert_shared_count": 1, f"{kind}.expert_group_count": 1}
    if not kind.startswith("lfm2"):
        keys = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
        values |= {f"{kind}.ssm.{key}": size for key, size in zip(keys, sizes, strict=True)}
    return values


def _own(name: str, weights: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """The file's tensors of one that only hybrid models have, or that they store in another way; none for others."""
    block, last = f"blk.{name.split('.')[2]}" if "layers" in name else "", name.rsplit(".", 2)[-2:]
    if name.endswith(".A_log"):
        return {f"{block}.ssm_a": -np.exp(weights).reshape(-1 if "linear_attn" in name else (-1, 1))}
    if name.endswith(".D"):
        return {f"{block}.ssm_d": weights.reshape(-1, 1)}
    if name.endswith("dt_bias"):
        return {f"{block}.ssm_dt.bias": weights}
    if name.endswith(("expert_bias", "e_score_correction_bias")):
        return {f"{block}.exp_probs_b.bias": weights}
    if last[0] in ("conv1d", "conv"):
        return {f"{block}.{'ssm_conv1d' if last[0] == 'conv1d' else 'shortconv.conv'}.{last[1]}": weights.squeeze()}
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return {f"{block}.ssm_norm.weight": weights.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)}
    if name.endswith("in_proj_qkvz.weight"):
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        parts = np.split(weights.reshape(keys, -1, weights.shape[-1]), [size, 2 * size, 2 * size + 2 * config.linear_value_head_dim], 1)
        q, k, v, z = (part.reshape(-1, weights.shape[-1]) for part in parts)
        return {f"{block}.attn_qkv.weight": np.concatenate([q, k, v]), f"{block}.attn_gate.weight": z}
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if "shared_mlp.input_linear" in name:
        return dict(zip((f"{block}.ffn_{part}{shared}.weight" for part in ("gate", "up")), np.split(weights, 2), strict=True))
    if "shared_mlp.output_linear" in name:
        return {f"{block}.ffn_down{shared}.weight": weights}
    return {}


def _tiled(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """Moves value head v of key head k from place (k, v) to (v, k)."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim

    def tiled(rows: np.ndarray, each: int) -> np.ndarray:
        return rows.reshape(keys, -1, each, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([weights[:first], tiled(weights[first:], size)])
    if name.endswith("in_proj_z.weight"):
        return tiled(weights, size)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tiled(weights, 1)
    return tiled(weights.T, size).T if name.endswith("linear_attn.out_proj.weight") else weights
