"""Fused and transposed projections, as llama.cpp's converter writes them, and back as transformers reads them."""

from typing import Any

import numpy as np

from chairlift.runner.tensor_names import TensorNames

GPT2 = TensorNames.of(["transformer.wte.weight"])
NAMES_OF = {"attention.qkv_proj.": TensorNames.of(["gpt_neox.embed_in.weight"]), "attn.c_attn.": GPT2}
"""The names of transformers, by a projection that the model has."""


def stored(weights: dict[str, Any], config: Any) -> dict[str, Any]:
    """The tensors of a model of transformers in the order of a file; those of Phi-2 in one if the configuration says `fused`."""
    found = {name: tensor.numpy() for name, tensor in weights.items()}
    for name, whole in list(found.items()):
        if config.model_type == "gpt2" and name.endswith(GPT2.transposed):
            found[name] = whole.T
        if "query_key_value" in name:
            found[name] = whole.reshape(config.num_attention_heads, 3, -1, *whole.shape[1:]).swapaxes(0, 1).reshape(whole.shape)
        if "q_proj" in name and getattr(config, "fused", False):
            parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        if name.endswith("_layernorm.norms.0.weight"):
            stem, heads = name.removesuffix("0.weight"), [other for other in found if other.startswith(name.removesuffix("0.weight"))]
            found[f"{stem.removesuffix('.norms.')}.weight"] = np.stack([found.pop(f"{stem}{head}.weight") for head in range(len(heads))])
    return found


def join(weights: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a converted model as transformers reads them."""
    names = next((names for part, names in NAMES_OF.items() if any(part in name for name in weights)), None)
    joined = {}
    for name, whole in weights.items():
        if names and name.endswith(names.transposed):
            whole = whole.T
        if "attention.qkv_proj." in name:
            heads = config["num_attention_heads"]
            whole = whole.reshape(3, heads, -1, *whole.shape[1:]).swapaxes(0, 1).reshape(whole.shape)
            name = name.replace("qkv_proj", "query_key_value")
        if config["model_type"] == "phi" and "self_attn.qkv_proj." in name:
            joined |= {name.replace("qkv_proj", f"{part}_proj"): one for part, one in zip("qkv", np.split(whole, 3), strict=True)}
            continue
        if "_layernorm." in name and whole.ndim == 2:
            stem = name.removesuffix(".weight")
            joined |= {f"{stem}.norms.{head}.weight": row for head, row in enumerate(whole)}
            continue
        joined[names.stored(name) if names else name] = np.ascontiguousarray(whole)
    return joined
