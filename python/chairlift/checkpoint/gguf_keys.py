"""Checks that each metadata key of a GGUF file is used, changes nothing, or is reported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import UnsupportedModel

_DESCRIPTIVE = re.compile(
    r"general\..*|quantize\..*|split\..*|imatrix\..*|tokenizer\.chat_template(s|\..*)?|tokenizer\.huggingface\.json"
    r"|tokenizer\.ggml\.(model|pre|tokens|token_type|token_type_count|scores|merges|eos_token_ids|add_space_prefix)"
    r"|tokenizer\.ggml\.((bos|eos|eot|eom|unknown|seperator|padding|cls|mask|fim_\w+|prefix|suffix|middle)_token_id|add_(bos|eos|sep)_token)"
    r"|[\w-]+\.(vocab_size|tensor_data_layout|context_length|embedding_length_out|features_length|hidden_activation|rope\.scaling\.yarn_(log_multiplier|beta_\w+|attn_factor)"
    r"|attention\.layer_norm_epsilon|rope\.scaling\.original_context_length|pooling_type|decoder_start_token_id|classifier\..*)"
)
"""Keys that change no answer of the architectures that can be read, or that the tokenizer's reader uses."""
_CHANGES = re.compile(
    r"[\w-]+\.(attention\.(clamp_kqv|max_alibi_bias|scale|output_scale|value_scale|temperature_\w+|causal|sliding_window\w*|key_length_\w+"
    r"|value_length_\w+|\w*lora_rank\w*|recurrent_layers|shared_kv_layers|rope_pattern|indexer\..*|relative_buckets_count|compress_\w+)"
    r"|expert_\w+|experts_per_group|moe_\w+|leading_dense_block_count|interleave_moe_layer_step|logit_scale|residual_scale|embedding_scale"
    r"|\w*softcapping|swin_norm|use_parallel_residual|swiglu_\w+|activation.*|ssm\..*|shortcut\..*|shortconv\..*|wkv\..*|kda\..*"
    r"|altup\..*|embedding_length_per_layer_input|full_attention_interval|token_shift_count|rescale_every_n_layers|num_loops"
    r"|rope\.(freq_base_swa|dimension_sections|dimension_count_swa|scale_linear|scaling\.(alpha|attn_factor|finetuned|yarn_ext_factor))|hyper_connection\..*"
    r"|adapters\..*|ple\..*|hrm\..*|posnet\..*|convnext\..*|deepstack_mapping|n_deepstack_layers)"
)
"""Keys that change answers, unless their value is neutral."""
_COUNTS = (".expert_group_count", ".expert_group_used_count", ".interleave_moe_layer_step", ".moe_every_n_layers", ".num_loops")
"""Ends of keys of numbers of which one changes nothing."""


def check_keys(path: Path, unread: Mapping[str, Any], head_dim: int, context: int) -> list[str]:
    """Returns the keys that nothing here knows. Raises UnsupportedModel for one that would change answers.

    `unread` are the metadata of the file `path` that its configuration was not made of. `head_dim` is the size of an attention head, and
    `context` the longest context in tokens.
    """
    unknown = []
    for key, value in unread.items():
        if _DESCRIPTIVE.fullmatch(key) or _is_neutral(key, value, head_dim, context):
            continue
        if _CHANGES.fullmatch(key):
            raise UnsupportedModel(f"{path}: {key} is {value!r:.100}, which the code for this architecture cannot compute")
        unknown.append(key)
    return unknown


def _is_neutral(key: str, value: Any, head_dim: int, context: int) -> bool:
    """Whether the value of a key is the one that changes nothing."""
    if key.endswith(".attention.scale") and isinstance(value, int | float):
        return value == 0 or math.isclose(value, head_dim**-0.5, rel_tol=1e-5)
    if key.endswith(".attention.sliding_window") and isinstance(value, int):
        return value == 0 or value >= context
    if key.endswith((".attention.causal", ".rope.scaling.finetuned")):
        return value is True
    if key.endswith((".key_length_swa", ".value_length_swa")) and value == head_dim:
        return True
    if key.endswith(("_scale", "_factor", ".scale_linear", *_COUNTS)):
        return value in (0, 1)
    return not value or (isinstance(value, list) and not any(value))
