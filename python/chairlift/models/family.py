"""Finds the architecture of a config.json, and what it asks for that there is no code for."""

from __future__ import annotations

from typing import Any

from chairlift.architectures import ALIASES, ARCHITECTURES, HEADLESS, PLAIN, WRAPPED, Architecture, Windows
from chairlift.models.fields import NoNativeModel, parse_names
from chairlift.models.quantization import QuantizationScheme, UnsupportedScheme, parse_quantization

_RENAMED = ("exaone", "sarvam_moe")
"""Values of `model_type` of files with the name of an architecture here, in which transformers has renamed the tensors."""


def find_family(raw: dict[str, Any]) -> tuple[dict[str, Any], Architecture]:
    """Returns the configuration of the model of text, and its architecture. Raises NoNativeModel for others."""
    if raw.get("model_type") in _RENAMED:
        raise NoNativeModel(f"the names that {raw['model_type']} gives tensors have no code of ours")
    names, text = parse_names(raw, "architectures") or [], raw.get("text_config")
    names = [name for name in names if name != "PeftModelForCausalLM"]  # a merged adapter, whose model_type is that of the base
    for name in names or [known.name for known in ARCHITECTURES.values() if known.model_type == raw.get("model_type")]:
        own = text if isinstance(text, dict) else raw  # the first configurations of Qwen2-VL have no text_config
        if known := WRAPPED.get((name, str(own.get("model_type")))):
            shared = ("tie_word_embeddings", "quantization_config", "quantization", "dtype", "torch_dtype")
            return {**known.defaults, **own, **{key: raw[key] for key in shared if key in raw}}, known
        if known := ARCHITECTURES.get(name) or ALIASES.get(name):
            return raw, known
        if name in HEADLESS and text is None:
            return raw | {"tie_word_embeddings": True}, HEADLESS[name]
    named = ", ".join(names) or f"model_type {raw.get('model_type')!r}, and no architectures,"
    raise NoNativeModel(f"{named} has no code of ours (docs/models.md lists what has)")


def parse_activation(raw: dict[str, Any], family: Architecture) -> str:
    """Returns the activation of MLPs. Raises NoNativeModel for another than the architecture's, or than any that needs no gate."""
    word = family.activation
    for name, known in family.activations.items():
        if (word := raw.get(name) or family.activation) not in (*known, family.activation):
            raise NoNativeModel(f"{name} {word!r} has no code of ours (there is for {', '.join(known)})")
    if family.gated:
        return family.activation
    raw.get("activation_function")  # StarCoder2's published files have it too, and transformers does not read it
    return PLAIN[word]


def check_supported(raw: dict[str, Any], family: Architecture) -> QuantizationScheme | None:
    """Returns how layers are quantised. Raises NoNativeModel for features that the architecture allows but the native code lacks."""
    window = raw.get("use_sliding_window") and raw.get("sliding_window", 1)
    lacking = {
        "biases of gated attention have": family.gated_attention and raw.get("attention_bias"),
        # "vision" is about tokens of images alone.
        "attention to later tokens has": raw.get("use_bidirectional_attention") not in (None, False, "vision")
        or raw.get("is_causal") is False,
        "attention beside the MLP (use_parallel_residual) in this architecture has": raw.get("use_parallel_residual")
        and not isinstance(family.parallel, tuple),
        "layer norms of queries and keys have": family.centred
        and not family.qk_norm
        and (raw.get("use_qk_norm") or raw.get("qk_layernorm")),
        "attention scores of other scales than by the size of a head have": raw.get("scale_attn_by_inverse_layer_idx")
        or raw.get("scale_attn_weights") is False,
        "attention to another model's states (add_cross_attention) has": raw.get("add_cross_attention"),
        "norms after blocks, as in OPT 350M, have": raw.get("do_layer_norm_before") is False,
        "norms without weights have": raw.get("layer_norm_elementwise_affine") is False,
        "embeddings of another size, as in OPT 350M, have": raw.get("word_embed_proj_dim") not in (None, raw.get("hidden_size")),
        "clipped queries, keys and values have": raw.get("clip_qkv") is not None,
        # Qwen's mixtures can have windows. Which layers have one follows another rule than in Qwen2.
        f"sliding windows in {family.name} have": family.mixture and family.windows is Windows.NONE and window,
    }
    if found := next((what for what, asked in lacking.items() if asked), None):
        raise NoNativeModel(f"{found} no code of ours")
    quantization = raw.get("quantization_config") or raw.get("quantization")  # the second is MLX's name
    if family.sinks and isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        return None  # the experts of gpt-oss alone, whose tensors have names of their own
    try:
        return parse_quantization(quantization)
    except UnsupportedScheme as reason:
        raise NoNativeModel(str(reason)) from None
