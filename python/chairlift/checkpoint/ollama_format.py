"""Gives GGUF files that Ollama converted itself the names of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.checkpoint.gguf_file import TensorEntry

Metadata = MutableMapping[str, Any]
Tensors = MutableMapping[str, "TensorEntry"]
_GEMMA3_DEFAULTS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_GEMMA3_OWN = ("gemma3.vision.", "gemma3.mm.", "gemma3.rope.global.", "gemma3.rope.local.")
"""Beginnings of the keys that Ollama alone writes."""
_IMAGES = ("v.", "mm.")
"""Beginnings of the names of an image encoder's tensors, which llama.cpp has in a file of their own."""
_LONG = 131_072
"""The context from which Gemma 3 has stretched positions."""


def adapt(metadata: Metadata, tensors: Tensors) -> None:
    """Changes the metadata and the tensors of a file of Gemma 3, gpt-oss or LFM2 that Ollama converted; other files stay as they are."""
    kind = metadata.get("general.architecture")
    if kind == "gemma3":
        _gemma3(metadata, tensors)
    elif kind == "gptoss":
        _gpt_oss(metadata, tensors)
    elif kind == "lfm2" and "output_norm.weight" in tensors and "token_embd_norm.weight" not in tensors:
        _rename(tensors, {"output_norm.weight": "token_embd_norm.weight"})
        # The metadata of older files have another size than the tensors.
        if (gate := tensors.get("blk.0.ffn_gate.weight")) is not None:
            metadata["lfm2.feed_forward_length"] = gate.shape[0]


def _gemma3(metadata: Metadata, tensors: Tensors) -> None:
    eps = "gemma3.attention.layer_norm_rms_epsilon"
    own = [key for key in metadata if key.startswith(_GEMMA3_OWN)]
    if not own and eps in metadata and not any(name.startswith(_IMAGES) for name in tensors):
        return
    for scope, key in (("global", "freq_base"), ("local", "freq_base_swa")):
        if (base := metadata.get(f"gemma3.rope.{scope}.freq_base")) is not None:
            metadata.setdefault(f"gemma3.rope.{key}", base)
    for key in own:
        del metadata[key]
    for key, value in _GEMMA3_DEFAULTS.items():
        metadata.setdefault(f"gemma3.{key}", value)
    context = metadata.get("gemma3.context_length")
    if isinstance(context, int) and context >= _LONG:
        metadata.setdefault("gemma3.rope.scaling.type", "linear")
        metadata.setdefault("gemma3.rope.scaling.factor", 8.0)
    for name in [name for name in tensors if name.startswith(_IMAGES)]:
        del tensors[name]
    if (embedding := tensors.get("token_embd.weight")) is not None:
        for key in ("tokens", "scores", "token_type"):  # which also have tokens of images
            if isinstance(listed := metadata.get(f"tokenizer.ggml.{key}"), list):
                metadata[f"tokenizer.ggml.{key}"] = listed[: embedding.shape[0]]


def _gpt_oss(metadata: Metadata, tensors: Tensors) -> None:
    metadata["general.architecture"] = "gpt-oss"
    for key in [key for key in metadata if key.startswith("gptoss.")]:
        metadata[f"gpt-oss.{key.removeprefix('gptoss.')}"] = metadata.pop(key)
    if (gate := tensors.get("blk.0.ffn_gate_exps.weight")) is not None:
        metadata.setdefault("gpt-oss.expert_feed_forward_length", gate.shape[-2])
    for name in list(tensors):
        to = name.replace(".attn_out.", ".attn_output.").replace(".ffn_norm.", ".post_attention_norm.")
        _rename(tensors, {name: f"{to}.weight" if to.endswith(".attn_sinks") else to})


def _rename(tensors: Tensors, names: dict[str, str]) -> None:
    for name, to in names.items():
        tensors[to] = replace(tensors.pop(name), name=to)
