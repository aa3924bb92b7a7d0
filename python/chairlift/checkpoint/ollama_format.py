"""Gives GGUF files that Ollama converted itself the names of llama.cpp's converter.

The differences are those that Ollama removes itself when its llama-server reads such files (llama/compat/llama-ollama-compat.cpp).
"""

from __future__ import annotations

import base64
import re
from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.checkpoint.gguf_file import TensorEntry

Metadata = MutableMapping[str, Any]
Tensors = MutableMapping[str, "TensorEntry"]
_KINDS = {"gptoss": "gpt-oss", "qwen25vl": "qwen2vl", "glm4moelite": "deepseek2", "olmo3": "olmo2", "nemotron_h_omni": "nemotron_h_moe"}
"""Ollama's names of architectures, and llama.cpp's."""
_KEYS = {
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling.extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "rope.scaling_beta": "attention.temperature_scale",
    "norm_top_k_prob": "expert_weights_norm",
}
"""Ollama's keys below the architecture, and llama.cpp's."""
_OTHER_KEYS = re.compile(r"(vision|audio|mm)\..*|(image|vision)_\w+|spatial_merge_size|(rope\.)?mrope_\w+|ssm\.v_head_reordered")
"""Keys that only Ollama writes, and that do not matter for text or are used here."""
_OTHER_PARTS = ("v.", "mm.", "a.", "s.", "model.vision_tower.", "mtp.")
"""Beginnings of the names of tensors that encode images and sounds, or predict tokens beyond the next one: llama.cpp's files lack them."""
_PRE = {"gptoss": "gpt-4o", "glm4moelite": "glm4"}
"""Pre-tokenizers by Ollama's names of architectures, whose files name wrong ones."""
_MISSING_PRE = {"lfm2": "lfm2", "lfm2moe": "lfm2", "mistral3": "tekken", "llama": "llama-bpe"}
"""Pre-tokenizers of files that name none; of Llama they need Llama 3's vocabulary."""
_LLAMA3_END = 128_009
"""Llama 3's id of <|eot_id|>."""
_GEMMA3_DEFAULTS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_LONG = 131_072
"""The context from which Gemma 3 has stretched positions."""


def adapt(metadata: Metadata, tensors: Tensors) -> None:
    """Changes the metadata and the tensors of a file that Ollama converted; other files stay as they are."""
    named = str(metadata.get("general.architecture"))
    kind = _KINDS.get(named, named)
    is_gemma3 = kind == "gemma3" and _is_ollamas_gemma3(metadata, tensors)
    if kind == "gemma3" and "dense.0.weight" in tensors:
        kind = "gemma-embedding"
    is_grouped = kind.startswith("qwen35") and _has_grouped_heads(metadata, kind)
    _rename_keys(metadata, named, kind)
    for name in [name for name in tensors if name.startswith(_OTHER_PARTS)]:
        del tensors[name]
    if kind == "gemma-embedding" and named != kind:
        _embedder(metadata, tensors)
    elif is_gemma3:
        _gemma3(metadata, tensors)
    elif kind == "gemma4":
        _gemma4(metadata, tensors)
    elif named == "gptoss":
        _gpt_oss(metadata, tensors)
    elif named == "glm4moelite":
        _glm4_moe_lite(metadata)
    elif kind.startswith("lfm2") and "output_norm.weight" in tensors and "token_embd_norm.weight" not in tensors:
        _lfm2(metadata, tensors, kind)
    elif kind.startswith("qwen3"):
        _rename(tensors, {name: f"{name}.bias" for name in tensors if name.endswith(".ssm_dt")})
        if is_grouped:
            metadata[f"{kind}.ssm.heads_tiled"] = False
    _name_pre_tokenizer(metadata, named)
    _decode_replacements(metadata)


def _is_ollamas_gemma3(metadata: Metadata, tensors: Tensors) -> bool:
    """Whether Ollama converted a Gemma 3."""
    eps = "gemma3.attention.layer_norm_rms_epsilon"
    own = ("gemma3.vision.", "gemma3.mm.", "gemma3.rope.global.", "gemma3.rope.local.")
    return eps not in metadata or any(key.startswith(own) for key in metadata) or any(name.startswith(_OTHER_PARTS) for name in tensors)


def _has_grouped_heads(metadata: Metadata, kind: str) -> bool:
    """Whether Ollama converted a Qwen 3.5 without llama.cpp's order of value heads."""
    own = any(key.startswith((f"{kind}.mrope_", f"{kind}.rope.mrope_")) for key in metadata)
    return own and metadata.get(f"{kind}.ssm.v_head_reordered") is not True


def _rename_keys(metadata: Metadata, named: str, kind: str) -> None:
    """Gives the keys below an architecture llama.cpp's names, and removes those that do not matter for text."""
    for key in [key for key in metadata if key.startswith(f"{named}.")]:
        own = key.removeprefix(f"{named}.")
        if _OTHER_KEYS.fullmatch(own) or (own == "rope.scaling.mscale" and metadata[key] == 1):
            del metadata[key]
        elif (to := f"{kind}.{_KEYS.get(own, own)}") != key:
            value = metadata.pop(key)
            metadata.setdefault(to, value)
    if named != kind:
        metadata["general.architecture"] = kind


def _name_pre_tokenizer(metadata: Metadata, named: str) -> None:
    """Names the pre-tokenizer of a file whose vocabulary has merges, and that names none or a wrong one."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    tokens = metadata.get("tokenizer.ggml.tokens")  # None if the texts of tokens were skipped
    is_llama3 = isinstance(tokens, list) and tokens[_LLAMA3_END : _LLAMA3_END + 1] == ["<|eot_id|>"]
    if named in _PRE:
        metadata["tokenizer.ggml.pre"] = _PRE[named]
    elif metadata.get("tokenizer.ggml.pre") in (None, "", "default") and named in _MISSING_PRE and (is_llama3 or named != "llama"):
        metadata["tokenizer.ggml.pre"] = _MISSING_PRE[named]


def _decode_replacements(metadata: Metadata) -> None:
    """Decodes a table of replacements that is a list of letters in base64."""
    key = "tokenizer.ggml.precompiled_charsmap"
    letters = metadata.get(key)
    if isinstance(letters, list) and letters and all(isinstance(letter, str) for letter in letters):
        try:
            metadata[key] = list(base64.b64decode("".join(letters), validate=True))
        except ValueError:
            metadata[key] = [0]  # which the tokenizer's reader refuses


def _gemma3(metadata: Metadata, tensors: Tensors) -> None:
    for key, value in _GEMMA3_DEFAULTS.items():
        metadata.setdefault(f"gemma3.{key}", value)
    context = metadata.get("gemma3.context_length")
    if isinstance(context, int) and context >= _LONG:
        metadata.setdefault("gemma3.rope.scaling.type", "linear")
        metadata.setdefault("gemma3.rope.scaling.factor", 8.0)
    _cut_vocabulary(metadata, tensors)


def _embedder(metadata: Metadata, tensors: Tensors) -> None:
    """EmbeddingGemma, which older versions of Ollama called a Gemma 3."""
    metadata.pop("gemma-embedding.attention.sliding_window_pattern", None)
    metadata.pop("gemma-embedding.attention.causal", None)
    for key, value in _GEMMA3_DEFAULTS.items():
        metadata.setdefault(f"gemma-embedding.{key}", value)
    _rename(tensors, {"dense.0.weight": "dense_2.weight", "dense.1.weight": "dense_3.weight", "norm.weight": "output_norm.weight"})
    _cut_vocabulary(metadata, tensors)


def _gemma4(metadata: Metadata, tensors: Tensors) -> None:
    if metadata.get("tokenizer.ggml.pre") == "gemma4":
        metadata["tokenizer.ggml.model"] = "gemma4"
    scales = [name for name in tensors if name.endswith(".ffn_gate_inp.per_expert_scale")]
    _rename(tensors, {name: name.replace(".ffn_gate_inp.per_expert_scale", ".ffn_down_exps.scale") for name in scales})


def _cut_vocabulary(metadata: Metadata, tensors: Tensors) -> None:
    """Removes the tokens of images, which have no embeddings."""
    if (embedding := tensors.get("token_embd.weight")) is not None:
        for key in ("tokens", "scores", "token_type"):
            if isinstance(listed := metadata.get(f"tokenizer.ggml.{key}"), list):
                metadata[f"tokenizer.ggml.{key}"] = listed[: embedding.shape[0]]


def _gpt_oss(metadata: Metadata, tensors: Tensors) -> None:
    metadata.setdefault("gpt-oss.rope.scaling.type", "yarn")
    if (gate := tensors.get("blk.0.ffn_gate_exps.weight")) is not None:
        metadata.setdefault("gpt-oss.expert_feed_forward_length", gate.shape[-2])
    for name in list(tensors):
        to = name.replace(".attn_out.", ".attn_output.").replace(".ffn_norm.", ".post_attention_norm.")
        _rename(tensors, {name: f"{to}.weight" if to.endswith(".attn_sinks") else to})


def _glm4_moe_lite(metadata: Metadata) -> None:
    """GLM-4.7-Flash: the lengths of keys and values are those of heads, and those of latents have the names of heads."""
    length = metadata.get("deepseek2.attention.key_length")
    for key in ("key_length_mla", "value_length_mla"):
        metadata[f"deepseek2.attention.{key}"] = length
    metadata.setdefault("deepseek2.expert_gating_func", 2)


def _lfm2(metadata: Metadata, tensors: Tensors, kind: str) -> None:
    _rename(tensors, {"output_norm.weight": "token_embd_norm.weight"})
    # The metadata of older files have another size than the tensors.
    if (gate := tensors.get("blk.0.ffn_gate.weight")) is not None:
        metadata[f"{kind}.feed_forward_length"] = gate.shape[0]


def _rename(tensors: Tensors, names: dict[str, str]) -> None:
    for name, to in names.items():
        if name in tensors:
            tensors[to] = replace(tensors.pop(name), name=to)
