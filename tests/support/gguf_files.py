"""GGUF files for the tests: the default one, and tiny ones written the way llama.cpp's converter does."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import gguf_experts
import gguf_fused
import gguf_latent
import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from chairlift.checkpoint.cache import LINK, cache_dir
from chairlift.checkpoint.gguf import GGUFTensors, open_gguf
from chairlift.checkpoint.gguf_tokenizer import write_tokenizer
from chairlift.checkpoint.pull import pull_default

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
CONTROLS = ("<|end|>", "<|user|>")
FLOATS = {
    "layer_norm_rms_epsilon",
    "layer_norm_epsilon",
    "freq_base",
    "freq_base_swa",
    "factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
FLOATS |= {"scale", "embedding_scale", "residual_scale", "logit_scale", "temperature_scale", "attn_factor"}
FLOATS |= {"yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier", "yarn_attn_factor"}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 5, "tie_word_embeddings": True}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.25, "logits_scaling": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA4 = {"global_head_dim": 32, "sliding_window": 5, "tie_word_embeddings": True, "num_hidden_layers": 5, "final_logit_softcapping": 4.0}
GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
GEMMA4 |= {"vocab_size_per_layer_input": 320}
EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 11, "top_k_experts": 3, "moe_intermediate_size": 32}
TEMPERATURE = {"original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "beta_fast": 8.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0]}
GPT_OSS = {"rope_parameters": {"rope_theta": 500.0, **YARN, "truncate": False}, "initializer_range": 0.2}
GLM = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
GLM |= {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}
SOLAR = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5}
SOLAR |= {"first_k_dense_replace": 0}
ERNIE = {"moe_num_experts": 11, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
ERNIE |= {"head_dim": 16, "pad_token_id": 0}
MINIMAX = {"num_local_experts": 11, "num_experts_per_tok": 3, "head_dim": 16}
MINIMAX |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
OLMO3_ROPES = {"full_attention": {"rope_theta": 5e5, **YARN}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
DOTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1}
DOTS |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
EXAONE = {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 5, "num_shared_experts": 2, "pad_token_id": 0}
AFMOE = {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 5, "num_shared_experts": 2, "mup_enabled": True, "route_scale": 2.5}
AFMOE |= {"pad_token_id": 0}
TINY: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    ("arcee", {"hidden_act": "relu2"}),
    ("qwen2", {}),
    ("gemma", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 8, "rope_parameters": {"rope_theta": 500.0, **YARN}}),
    ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "num_key_value_heads": 1}),
    ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    ("granite", MULTIPLIERS),
    ("mixtral", {"num_local_experts": 11, "num_experts_per_tok": 3}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    ("olmoe", {"num_experts": 11, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    ("gpt_oss", {**GPT_OSS, "num_local_experts": 11, "num_experts_per_tok": 3, "sliding_window": 5}),
    ("granitemoe", {**MULTIPLIERS, "num_local_experts": 11, "num_experts_per_tok": 3}),
    ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32}),
    ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", {**GEMMA4, **EXPERTS_BESIDE, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}),
    ("phi3", {"pad_token_id": 0, "sliding_window": 5, "original_max_position_embeddings": 8, "rope_parameters": LONGROPE}),
    ("ministral3", {"rope_parameters": {"rope_theta": 500.0, **YARN, **TEMPERATURE}}),
    ("glm4_moe", GLM),
    ("solar_open", SOLAR),
    ("seed_oss", {"mlp_bias": True}),
    ("glm4", {"pad_token_id": 0, "attention_bias": True}),
    ("ernie4_5", {"pad_token_id": 0}),
    ("ernie4_5_moe", ERNIE),
    ("minimax_m2", MINIMAX),
    ("starcoder2", {"sliding_window": None, "norm_epsilon": 1e-5}),
    ("phi", {}),
    ("phi", {"num_key_value_heads": 4, "fused": True}),
    ("gpt_neox", {"num_key_value_heads": 4}),
    ("gpt_neox", {"num_key_value_heads": 4, "use_parallel_residual": False}),
    ("gpt2", {"num_key_value_heads": 4, "intermediate_size": 256, "tie_word_embeddings": True}),
    ("stablelm", {"use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("nemotron", {}),
    ("jais2", {}),
    ("dots1", DOTS),
    ("exaone_moe", EXAONE),
    ("afmoe", AFMOE),
    ("olmo2", {"pad_token_id": 0}),
    ("olmo3", {"sliding_window": 9, "num_hidden_layers": 4, "pad_token_id": 0, "rope_parameters": OLMO3_ROPES}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    ("exaone4", {"sliding_window": 5, "num_hidden_layers": 4}),
    ("hunyuan_v1_dense", {"pad_token_id": 0}),
    ("hunyuan_v1_moe", {"num_experts": 11, "moe_topk": 3, "pad_token_id": 0}),
    ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True}),
    ("cohere2", {"tie_word_embeddings": True, "logit_scale": 0.5, "sliding_window": 5, "num_hidden_layers": 4}),
    *gguf_latent.TINY,
]
"""Arguments of `tiny_model` for every architecture that is read from GGUF files."""


def default_file() -> Path:
    return pull_default(cache_dir(), progress=False)


def write_safetensors(directory: Path) -> None:
    """Writes the weights of a converted model as transformers reads them."""
    tensors = GGUFTensors(directory / LINK)
    weights = gguf_latent.join(gguf_experts.join({name: tensors.values(name) for name in tensors.entries}))
    weights = gguf_fused.join(weights, json.loads((directory / "config.json").read_text()))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def byte_tokens() -> list[str]:
    """GPT-2's alphabet: the 256 bytes as visible characters, in the order of the bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def tiny_model(kind: str, **settings: Any) -> PreTrainedModel:
    """A random model of two layers with a vocabulary of 320."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    defaults = {"vocab_size": 320, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 256}
    config = AutoConfig.for_model(kind, **{**sizes, "head_dim": 16, **defaults, "rms_norm_eps": 1e-5, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        if kind == "gemma4_text":  # whose scores are not divided by the size of a head: rounding would show
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.div_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model.eval()


def gguf_name(kind: str) -> str:
    """The name of a model type of transformers in GGUF files."""
    names = {"ministral3": "mistral3", "granitemoehybrid": "granite", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
    names |= {
        "hunyuan_v1_dense": "hunyuan-dense",
        "phi": "phi2",
        "gpt_neox": "gptneox",
        "hunyuan_v1_moe": "hunyuan-moe",
        "exaone_moe": "exaone-moe",
        "gpt_oss": "gpt-oss",
        "mixtral": "llama",
        "glm4_moe": "glm4moe",
    }
    names |= {"cohere": "command-r", "olmo3": "olmo2", "solar_open": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "minimax_m2": "minimax-m2"}
    names |= {kind: gguf_latent.KIND for kind, _ in gguf_latent.TINY}
    return names.get(kind, kind.removesuffix("_text"))


def gguf_of(
    model: PreTrainedModel,
    path: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    tokenizer: str = "gpt-2",
    replaced: dict[str, Any] | None = None,
    frequencies: np.ndarray | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    factors: dict[str, list[float]] | None = None,
    split: int = 0,
) -> None:
    """Writes `model`, its matrices quantized; `replaced` metadata differ from what it says, and None is left out.

    `kinds` names the types of some matrices, by their Hugging Face names without `.weight`. Some matrices are divided by `factors`, by
    their names in the file without `.weight`, which the file then has. With `split` there are that many tensors in each part.
    """
    config, kind = model.config, gguf_name(model.config.model_type)
    rope = getattr(config, "rope_parameters", {"rope_theta": 1e4, "rope_type": "default"})
    rope = rope.get("full_attention", rope)
    local = config.per_layer_config["sliding_attention"] if kind == "gemma4" else config
    head_dim = getattr(local, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        **sizes_of(config, kind),
        f"{kind}.attention.head_count_kv": local.num_key_value_heads,
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": rope["rope_theta"],
        **byte_level_metadata(tokenizer),
    }
    if kind.startswith(("glm4", "minimax", "stablelm", "nemotron", "phi2", "gptneox")):
        values |= {f"{kind}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0))}
    if kind in ("command-r", "cohere2", "stablelm", "nemotron", "jais2", "starcoder2", "phi2", "gptneox", "gpt2"):
        values[f"{kind}.attention.layer_norm_epsilon"] = values.pop(f"{kind}.attention.layer_norm_rms_epsilon")
    if kind in ("stablelm", "gptneox"):
        values |= {f"{kind}.use_parallel_residual": kind == "stablelm" or config.use_parallel_residual}
    if kind in ("command-r", "cohere2"):
        values |= {f"{kind}.logit_scale": config.logit_scale, f"{kind}.rope.scaling.type": "none"}
    if config.model_type in ("cohere2", "olmo3", "exaone4", "exaone_moe", "afmoe"):
        values |= {f"{kind}.attention.sliding_window": config.sliding_window}
    if config.model_type == "olmo3":
        values |= {f"{kind}.rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"]}
    if kind.startswith("exaone") and config.sliding_window:
        values |= {f"{kind}.attention.sliding_window_pattern": [entry == "sliding_attention" for entry in config.layer_types]}
    if kind == "phi3":
        del values[f"{kind}.attention.key_length"]
        values |= {f"{kind}.rope.dimension_count": int(head_dim * rope["partial_rotary_factor"])}
        values |= {f"{kind}.attention.sliding_window": config.sliding_window or 0}
    if kind.startswith("gemma") and kind != "gemma":
        values |= {f"{kind}.attention.sliding_window": config.sliding_window}
        caps = {name: getattr(config, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        values |= {f"{kind}.{name}": cap for name, cap in caps.items() if cap is not None}
    if kind == "gemma4":
        windows, full = [entry == "sliding_attention" for entry in config.layer_types], config.per_layer_config["full_attention"]
        values |= {f"{kind}.attention.key_length": full.head_dim, f"{kind}.attention.value_length": full.head_dim}
        values |= {f"{kind}.attention.key_length_swa": head_dim, f"{kind}.attention.value_length_swa": head_dim}
        kv_heads = [local.num_key_value_heads if window else full.num_key_value_heads for window in windows]
        inner = [config.intermediate_size * (1 + (config.use_double_wide_mlp and mode == "reuse")) for mode in config.kv_sharing_modes]
        values |= {f"{kind}.attention.head_count_kv": kv_heads, f"{kind}.feed_forward_length": inner}
        values |= {f"{kind}.attention.sliding_window_pattern": windows, f"{kind}.attention.shared_kv_layers": config.num_kv_shared_layers}
        values |= {f"{kind}.embedding_length_per_layer_input": config.hidden_size_per_layer_input}
        rotated = int(full.head_dim * rope["partial_rotary_factor"] / 2)
        frequencies = np.array([1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated), dtype=np.float32)
    if config.pad_token_id is not None:
        values["tokenizer.ggml.padding_token_id"] = config.pad_token_id
    if kind in ("glm4moe", "dots1"):
        values |= gguf_latent.routed(config, kind)
    values |= gguf_latent.metadata(config) if kind == gguf_latent.KIND else gguf_experts.metadata(config, kind)
    if config.model_type == "granitemoehybrid":
        values |= {"granite.feed_forward_length": config.shared_intermediate_size}
        values |= {"granite.rope.scaling.finetuned": config.position_embedding_type == "rope"}
    if kind.startswith("granite"):
        values |= multipliers_of(config, kind)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {f"{kind}.rope.scaling.type": rope["rope_type"], f"{kind}.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values[f"{kind}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values |= {f"{kind}.rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow") if key in rope}
    if kind == "mistral3":
        values |= {f"{kind}.attention.temperature_scale": rope["llama_4_scaling_beta"]}
        values |= {f"{kind}.rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
    if rope["rope_type"] == "longrope":
        context = rope["original_max_position_embeddings"]
        scale = math.sqrt(1 + math.log(config.max_position_embeddings / context) / math.log(context))
        values |= {f"{kind}.rope.scaling.original_context_length": context, f"{kind}.rope.scaling.attn_factor": scale}
    if rope["rope_type"] == "llama3":
        frequencies = _llama3_divisors(rope, head_dim)
    writer = writer_of(path, values | (replaced or {}), split)
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, weights in gguf_fused.stored(model.state_dict(), config).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        if suffix == "layer_scalar":
            writer.add_tensor(f"blk.{stem.split('.')[2]}.layer_output_scale.weight", weights)
            continue
        if "shared_mlp.input_linear" in stem:
            for part, half in zip(("ffn_gate", "ffn_up"), weights.reshape(2, -1, weights.shape[-1]), strict=True):
                writer.add_tensor(f"blk.{stem.split('.')[2]}.{part}.weight", np.ascontiguousarray(half))
            continue
        stem = stem.replace("shared_mlp.output_linear", "mlp.down_proj")
        if kind in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            weights = weights + np.float32(1)
        if kind in ("llama", "arcee", "smollm3", "granite", "granitemoe", "mistral3") and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            weights = weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
        pieces = gguf_latent.split(name, weights, config, replaced or {}) or gguf_experts.split(kind, name, weights)
        if not pieces:
            known = names.get_name(stem) or names.get_name(f"{stem}.layer") or {"score": "cls.output"}[stem]
            pieces = {f"{known}.{suffix}": weights.reshape(weights.shape[weights.shape[0] == 1 :])}  # a dimension of 1 is left out
        for name, piece in pieces.items():
            if factor := (factors or {}).get(name.removesuffix(".weight")):
                writer.add_tensor(name.removesuffix("weight") + "scale", np.array(factor, np.float32))
                writer.add_tensor(name.removesuffix("weight") + "input_scale", np.ones(1, np.float32))
                piece = piece / np.array(factor, np.float32).reshape(-1, *[1] * (piece.ndim - 1))
            plain = piece.ndim == 1 or name.endswith(("bias", "_norm.weight")) or "ffn_gate_inp" in name
            used = gguf.GGMLQuantizationType.F32 if plain else (kinds or {}).get(stem, quantization)
            writer.add_tensor(name, quantized(np.ascontiguousarray(piece), used), raw_dtype=used)
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    if rope["rope_type"] == "longrope":
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    finish(writer)


def sizes_of(config: Any, kind: str) -> dict[str, Any]:
    """The keys that describe the shape of any model."""
    return {
        "general.architecture": kind,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": getattr(config, "hidden_dim", None) or config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
    }


def multipliers_of(config: Any, kind: str) -> dict[str, float]:
    """The keys of Granite's factors."""
    names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
    return {f"{kind}.{key}": float(getattr(config, name)) for key, name in names.items()}


def split_gguf_of(model: PreTrainedModel, path: Path, tensors: int, **options: Any) -> list[Path]:
    """Writes `model` in parts of so many tensors, as path-00001-of-0000N.gguf; returns the parts."""
    path.parent.mkdir(exist_ok=True)
    gguf_of(model, path, split=tensors, **options)
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def quantized(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Weights in a type; those that the package can only read become random blocks of it."""
    try:
        return gguf.quantize(weights, kind)
    except NotImplementedError:
        return random_blocks(kind, *weights.shape)


def random_blocks(kind: gguf.GGMLQuantizationType, *shape: int, seed: int = 0) -> np.ndarray:
    """Any codes and factors, [rows, bytes of a row]; the scales are small, of either sign, and finite."""
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (math.prod(shape) // elements, size), dtype=np.uint8)
    scales = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "MXFP4": [], "IQ1_M": [], "TQ1_0": [52], "TQ2_0": [64]}.get(kind.name, [0])
    usual = 0.0002 if kind.name == "IQ3_S" else 0.001  # codes of IQ3_S are up to 15 times 31
    for at in scales + ([2] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else []):
        blocks[:, at : at + 2] = (random.standard_normal((len(blocks), 1)) * usual).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = random.integers(110, 124, len(blocks))
    if kind.name == "IQ1_M":
        words = blocks[:, 48:].view(np.uint16)  # the digits of the scale are in the highest bits of four words
        scale = (random.standard_normal((len(blocks), 1)) * 0.001).astype(np.float16).view(np.uint16)
        words[:] = words & 0xFFF | (scale >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    return blocks.reshape(*shape[:-1], -1)


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A vocabulary of bytes, a few merges, control tokens, and a word that no merges lead to; padded to 320."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ h", "1 2", "12 3", "Ġ 1", "Ċ Ċ", "Ã ©", "e Ì", "eÌ ģ"]
    tokens = [*byte_tokens(), *CONTROLS, "<think>", *("".join(merge.split(" ")) for merge in merges), "xyz"]
    kinds = [NORMAL] * 256 + [CONTROL] * 2 + [USER_DEFINED] + [NORMAL] * (len(merges) + 1)
    padding = [f"[PAD{index}]" for index in range(320 - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.token_type": kinds + [5] * len(padding),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 256,
    }


def tokenizer_of_bytes(directory: Path) -> None:
    """Writes the tokenizer of `byte_level_metadata` as transformers does, with a chat template."""
    values = byte_level_metadata("gpt-2")
    vocabulary = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}"
    roles = {"bos_token": CONTROLS[1], "eos_token": CONTROLS[0], "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary as SentencePiece makes them: bytes, pieces with scores (not in their order), no merges; padded to 320."""
    pieces = ["\u2581", *"helowrdab\n", "he", "ll", "\u2581he", "hell", "\u2581hell", "hello", "\u2581hello", "\u2581\u2581", "lo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    padding = [f"[PAD{index}]" for index in range(320 - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.scores": [0.0] * 259 + [float(rank) for rank in range(len(pieces))] + [-1.0] * len(padding),
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * len(pieces) + [5] * len(padding),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_vocabulary(directory: Path, metadata: dict[str, Any]) -> Path:
    """Writes a GGUF file of these metadata without tensors, and its tokenizer, to the directory, which it returns."""
    directory.mkdir(exist_ok=True)
    finish(writer_of(directory / "tiny.gguf", {"general.architecture": "llama", "llama.context_length": 128} | metadata))
    write_tokenizer(open_gguf(directory / "tiny.gguf"), directory)
    return directory


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What the converter stores for Llama 3: by how much each frequency is divided."""
    divisors = []
    for frequency in rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim):
        length = 2 * np.pi / frequency
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (context / length - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        divisors.append(1.0 if length < context / high else rope["factor"] if length > context / low else between)
    return np.array(divisors, dtype=np.float32)


def writer_of(path: Path, values: dict[str, Any], split: int = 0) -> gguf.GGUFWriter:
    """A writer with these metadata, without those that are None."""
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"), split_max_tensors=split)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float) or key.rsplit(".", 1)[1] in FLOATS:
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
