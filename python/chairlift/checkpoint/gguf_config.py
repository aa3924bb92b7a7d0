"""Converts the metadata of a GGUF file to Hugging Face's config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from chairlift.architectures import (
    ENCODER_GGUF,
    GGUF,
    GGUF_MIXTURES,
    OLMO3,
    QWEN3,
    Architecture,
    EncoderArchitecture,
    GGUFFormat,
    Key,
    Mixture,
    Recurrence,
    Scores,
    Windows,
)
from chairlift.architectures.reranker import CLASSIFIER
from chairlift.checkpoint.gguf_encoder import encoder_config
from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.checkpoint.gguf_parts import NO_MODELS
from chairlift.errors import UnsupportedModel

_UNROTATED = 1e29
"""Divisors of frequencies from here on leave a pair where it is."""
GATING = {Scores.SOFTMAX: 1, Scores.SIGMOID: 2, Scores.LOGITS: 3}
"""llama.cpp's numbers of what makes scores of a router's logits."""
GLM_VOCABULARY = 154_880
"""Number of tokens of GLM-4.7-Flash."""
_F32 = 0
"""ggml's number of the type."""


def architecture_of(file: GGUFFile) -> tuple[Architecture | EncoderArchitecture, GGUFFormat]:
    """Returns the architecture of a file. Raises UnsupportedModel for one that there is no code for."""
    if (content := file.get("general.type", str)) in NO_MODELS:
        raise UnsupportedModel(f"{file.path} holds no model of text: its general.type is {content!r}")
    kind = file.get("general.architecture", str) or ""
    mixtures = GGUF_MIXTURES.get(kind, ()) if file.get(f"{kind}.expert_count", int) else ()
    gating = _gating(file, kind) if len(mixtures) > 1 else None
    mixture = next((known for known in mixtures if known.mixture and GATING[known.mixture.scores] == gating), next(iter(mixtures), None))
    architecture = mixture or GGUF.get(kind) or ENCODER_GGUF.get(kind)
    if kind == "olmo2" and file.value("olmo2.attention.sliding_window"):
        architecture = OLMO3
    if architecture is None:
        known = ", ".join((*GGUF, *ENCODER_GGUF))
        raise UnsupportedModel(f"{file.path} holds a model of architecture {kind!r}; those that can be read: {known}")
    assert architecture.gguf is not None
    return architecture, architecture.gguf


def _gating(file: GGUFFile, kind: str) -> int | None:
    """Returns llama.cpp's number of what makes scores of a router's logits. None if the file does not say."""
    # As in llama.cpp: the first files of GLM-4.7-Flash have no such key.
    silent = file.size(f"{kind}.block_count") in (47, 48) and file.vocab_size == GLM_VOCABULARY
    return file.get(f"{kind}.expert_gating_func", int) or (GATING[Scores.SIGMOID] if silent else None)


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the file's configuration in the format of Hugging Face's config.json."""
    architecture, layout = architecture_of(file)
    if isinstance(architecture, EncoderArchitecture):
        return encoder_config(file, architecture)
    kind = file.get("general.architecture", str)
    assert kind is not None
    experts = _num_experts(file, kind, architecture)
    hidden, layers = file.size(f"{kind}.embedding_length"), num_layers(file, kind)
    counts = _by_layer(file, f"{kind}.attention.head_count", layers, least=0 if architecture.recurrence else 1)
    if not (heads := max(counts)):
        raise UnsupportedModel(f"{file.path}: {kind}.attention.head_count is 0 for all layers")
    head_dim, rotary, latent = _head_sizes(file, kind, architecture, hidden // heads)
    vocab_size = file.vocab_size
    epsilon = file.get(f"{kind}.attention.layer_norm_epsilon", float) if architecture.centred else None
    inner, kv_heads = _sizes_by_layer(file, kind, architecture, counts)
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": max(inner) if architecture.single else inner[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else max(kv_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.context_length,
        architecture.norm_eps: file.number(f"{kind}.attention.layer_norm_rms_epsilon", epsilon),
        "rope_theta": file.number(f"{kind}.rope.freq_base", 10000.0),
        "partial_rotary_factor": rotary / head_dim,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_biases(file, architecture),
        **_parallel(file, kind, architecture),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in file.tensors),
        "dtype": "float32",
        **latent,
        **({"norm_topk_prob": False} if experts else {}),
        **layout.constants,
    }
    if architecture.multipliers:
        config["attention_multiplier"] = head_dim**-0.5  # unless the file has another
    config |= _parts(file, kind, architecture, kv_heads, inner, experts) | _named(file, kind, layout)
    if architecture.windows is Windows.LISTED:
        types = _layer_types(file, f"{kind}.attention.sliding_window_pattern", architecture, layers)
        config["layer_types"] = types if config.get("sliding_window", architecture.sliding_window) else ["full_attention"] * layers
    if layout.largest_layers is not None:
        config["query_pre_attn_scalar"] = hidden // heads if layers == layout.largest_layers else head_dim
    if architecture.global_head_dim is not None:
        config |= _variants(file, kind, config, inner, kv_heads)
    if architecture is QWEN3:
        config |= _classifier(file, kind)
    own = {usual: name for name, usual in architecture.entries.items()}
    found = config | _positions(file, kind, architecture, layout) | _token_ids(file, vocab_size)
    return {own.get(name, name): value for name, value in found.items()}


def _biases(file: GGUFFile, architecture: Architecture) -> dict[str, bool]:
    """Returns the entries of config.json that say which linear layers have biases."""
    attention = not file.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
    if architecture.biases:
        return {architecture.biases[0]: attention}
    own = {architecture.qkv_bias[0]: attention} if architecture.qkv_bias else {}
    return {"attention_bias": attention, "mlp_bias": any(name.endswith(".ffn_up.bias") for name in file.tensors), **own}


def _parallel(file: GGUFFile, kind: str, architecture: Architecture) -> dict[str, bool]:
    """Returns the entry of config.json that says whether MLPs read what attention reads, if the architecture has one."""
    if isinstance(architecture.parallel, bool):
        return {}
    stated = file.get(f"{kind}.use_parallel_residual", bool)
    # Files of StableLM always have the key, and those of parallel models lack the norm.
    own = architecture.norms.parallel is not None
    return {architecture.parallel[0]: stated is not False if own else "blk.0.ffn_norm.weight" not in file.tensors}


def _parts(
    file: GGUFFile, kind: str, architecture: Architecture, kv_heads: list[int], inner: list[int], experts: int | None
) -> dict[str, Any]:
    """Returns the entries of config.json that describe recurrent layers, layers of one part, and experts."""
    found: dict[str, Any] = {}
    mixture = architecture.mixture
    if architecture.recurrence:
        found |= _recurrence(file, kind, architecture.recurrence, kv_heads)
    if architecture.single:
        parts = zip(kv_heads, inner, strict=True)
        feed = "moe" if experts else "mlp"
        found["layers_block_type"] = ["full_attention" if heads else feed if size else "linear_attention" for heads, size in parts]
    if mixture and experts:
        found |= _experts(file, kind, mixture, len(inner))
    elif mixture and mixture.optional:
        found |= {mixture.count: 0, mixture.shared_inner: file.size(f"{kind}.expert_shared_feed_forward_length", max(inner))}
    return found


def _named(file: GGUFFile, kind: str, layout: GGUFFormat) -> dict[str, float]:
    """Returns the entries of config.json whose values the file's metadata has under other names."""
    for name in layout.unused:
        file.value(f"{kind}.{name}")  # counts as read
    names = {name: (f"{kind}.{key.name}", key) for name, key in layout.keys.items()}
    return {name: _entry(file, at, key) for name, (at, key) in names.items() if not key.optional or file.value(at) not in (None, 0)}


def _num_experts(file: GGUFFile, kind: str, architecture: Architecture) -> int | None:
    """Returns the number of experts of a layer. Raises UnsupportedModel unless the architecture has experts where the file has them."""
    experts, mixture = file.get(f"{kind}.expert_count", int), architecture.mixture
    if bool(experts) != (mixture is not None) and not (mixture and (mixture.optional or mixture.switch)):
        found = f"is a mixture of {experts} experts" if experts else f"has no {kind}.expert_count"
        raise UnsupportedModel(f"{file.path} {found}, which cannot be read for the architecture {kind!r}")
    return experts


def _head_sizes(file: GGUFFile, kind: str, architecture: Architecture, usual: int) -> tuple[int, int, dict[str, Any]]:
    """Returns the size of a head, how much of it is rotated, and the entries of config.json for attention to latents, if any."""
    head_dim = file.size(f"{kind}.attention.key_length", usual)
    rotary = file.size(f"{kind}.rope.dimension_count", head_dim)
    value = file.size(f"{kind}.attention.value_length", head_dim)
    if architecture.latent:
        return rotary, rotary, _latent(file, kind, rotary, head_dim, value)
    if value != head_dim or (rotary != head_dim and architecture.rotary is None and not architecture.single):
        raise UnsupportedModel(f"{file.path}: rotary or value dimensions that differ from the head's {head_dim} cannot be read")
    return head_dim, rotary, {}


def _latent(file: GGUFFile, kind: str, rotary: int, key: int, value: int) -> dict[str, Any]:
    """Returns the entries of config.json that describe attention to latents.

    `key` and `value` are the sizes of a head's keys and values; they are those of latents in files that have keys for the heads' sizes.
    """
    key, value = file.size(f"{kind}.attention.key_length_mla", key), file.size(f"{kind}.attention.value_length_mla", value)
    if key <= rotary:
        raise UnsupportedModel(f"{file.path}: the keys of a head have {key} numbers, which must be more than the {rotary} that are rotated")
    sizes = {"kv_lora_rank": file.size(f"{kind}.attention.kv_lora_rank"), "qk_rope_head_dim": rotary}
    query = file.get(f"{kind}.attention.q_lora_rank", int) or None
    return sizes | {"q_lora_rank": query, "qk_nope_head_dim": key - rotary, "v_head_dim": value}


def _sizes_by_layer(file: GGUFFile, kind: str, architecture: Architecture, heads: list[int]) -> tuple[list[int], list[int]]:
    """Returns the inner size of each layer and its number of KV heads. `heads` are those of queries."""
    layers = len(heads)
    key = f"{kind}.feed_forward_length"
    if architecture.mixture and file.value(key) in (None, 0) and file.value(f"{kind}.expert_feed_forward_length"):
        key = f"{kind}.expert_feed_forward_length"  # of a mixture without MLPs, such as Qwen 3.5
    inner = _by_layer(file, key, layers, least=0 if architecture.single else 1)
    kv_heads = _by_layer(file, f"{kind}.attention.head_count_kv", layers, max(heads), least=0 if architecture.recurrence else 1)
    sizes = {"attention.head_count": heads, "feed_forward_length": inner, "attention.head_count_kv": kv_heads}
    for name, values in sizes.items():
        if (architecture.global_head_dim is None or values is heads) and len(set(values) - {0}) != 1:
            raise UnsupportedModel(f"{file.path}: {kind}.{name} differs by layer, which cannot be read for the architecture {kind!r}")
    return inner, kv_heads


def _classifier(file: GGUFFile, kind: str) -> dict[str, Any]:
    """Returns the entries of config.json that describe the classifier of a reranker; none for other models."""
    answers = file.tensors.get("cls.output.weight")
    if answers is None:
        return {}
    if (labels := file.value(f"{kind}.classifier.output_labels")) not in (None, ["yes", "no"]):
        raise UnsupportedModel(f"{file.path}: a reranker's labels must be yes and no, got {labels!r:.200}")
    return {"architectures": [CLASSIFIER], "num_labels": answers.shape[0] if len(answers.shape) > 1 else 1}


def _positions(file: GGUFFile, kind: str, architecture: Architecture, layout: GGUFFormat) -> dict[str, Any]:
    """Returns the entries of config.json that describe positions, but those of `_variants`."""
    found: dict[str, Any] = {}
    if architecture.global_head_dim is None:
        scaling = _rope_scaling(file, kind, architecture)
        if scaling and not layout.truncates_yarn:
            scaling["truncate"] = False
        if architecture.temperature and (beta := file.get(f"{kind}.attention.temperature_scale", float)):
            scaling = (scaling or {"rope_type": "default"}) | {"llama_4_scaling_beta": beta}
        found["rope_scaling"] = scaling
    if original := file.get(f"{kind}.rope.scaling.original_context_length", int):
        found["original_max_position_embeddings"] = original
    if architecture.position_type is not None:
        # For Granite this key is a switch. Nemotron's models of `single` parts never have rotary positions.
        rotary = file.get(f"{kind}.rope.scaling.finetuned", bool) is not False and not architecture.single
        found["position_embedding_type"] = "rope" if rotary else "nope"
    return found


def _token_ids(file: GGUFFile, vocab_size: int) -> dict[str, int]:
    """Returns the tokens with a role that are in the vocabulary."""
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.get(f"tokenizer.ggml.{role}_token_id", int) for name, role in roles.items()}
    return {name: token for name, token in found.items() if token is not None and token < vocab_size}


def _experts(file: GGUFFile, kind: str, mixture: Mixture, layers: int) -> dict[str, Any]:
    """Returns the entries of config.json that describe experts."""

    def size(key: str, default: int | None = None) -> int:
        """A number that is one for all layers, or a list with an entry for each."""
        found = file.value(f"{kind}.{key}")
        if not isinstance(found, list):
            return file.size(f"{kind}.{key}", default)
        if len(found) != layers or len(set(found)) != 1 or not isinstance(found[0], int) or found[0] < 1:
            raise UnsupportedModel(f"{file.path}: {kind}.{key} must be one positive number for all {layers} layers, got {found!r:.200}")
        return found[0]

    gating = file.get(f"{kind}.expert_gating_func", int) or GATING[mixture.scores]
    if gating != GATING[mixture.scores]:
        raise UnsupportedModel(f"{file.path}: {kind}.expert_gating_func is {gating}, which cannot be read for the architecture {kind!r}")
    found: dict[str, Any] = {mixture.count: size("expert_count"), mixture.used: size("expert_used_count")}
    inner = None if mixture.inner == "moe_intermediate_size" else size("feed_forward_length")
    found[mixture.inner] = size("expert_feed_forward_length", inner)
    if (normalised := file.get(f"{kind}.expert_weights_norm", bool)) not in (None, mixture.normalised):
        found[mixture.normalised[0] if isinstance(mixture.normalised, tuple) else "norm_topk_prob"] = normalised
    if mixture.switch:
        found[mixture.switch] = True
    if mixture.choice_bias:
        found["use_expert_bias"] = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    if mixture.shared_count:
        file.value(f"{kind}.expert_shared_feed_forward_length")  # counts as read: it follows from the number of shared experts
    elif mixture.shared and mixture.shared_inner != "intermediate_size":
        found[mixture.shared_inner] = size("expert_shared_feed_forward_length")
    return found


def _entry(file: GGUFFile, name: str, key: Key) -> float:
    if key.kind is float:
        return file.number(name, key.default)
    return file.size(name, None if key.default is None else int(key.default))


def num_layers(file: GGUFFile, kind: str) -> int:
    """Returns the number of layers, without those that predict tokens beyond the next one. Raises UnsupportedModel for wrong numbers."""
    layers, beyond = file.size(f"{kind}.block_count"), file.get(f"{kind}.nextn_predict_layers", int) or 0
    if layers > len(file.tensors):
        raise UnsupportedModel(f"{file.path} says it has {layers} layers, and holds {len(file.tensors)} tensors")
    if not 0 <= beyond < layers:
        raise UnsupportedModel(f"{file.path}: {kind}.nextn_predict_layers is {beyond}, and there are {layers} layers in all")
    return layers - beyond


def _by_layer(file: GGUFFile, key: str, layers: int, default: int | None = None, least: int = 1) -> list[int]:
    """Returns a number of at least `least` for each layer. Raises UnsupportedModel for a list of another length."""
    values = file.value(key)
    if not isinstance(values, list):
        return [file.size(key, default)] * layers
    if len(values) < layers or not all(type(value) is int and least <= value < 2**31 for value in values[:layers]):
        raise UnsupportedModel(f"{file.path}: {key} must be one positive number, or one for each of {layers} layers, got {values!r:.200}")
    return values[:layers]


def _recurrence(file: GGUFFile, kind: str, names: Recurrence, kv_heads: list[int]) -> dict[str, Any]:
    """Returns the entries of config.json that describe recurrent layers: those without KV heads, those of a list, or all but every n-th."""
    listed, interval = file.value(f"{kind}.attention.recurrent_layers"), file.size(f"{kind}.full_attention_interval", 4)
    if 0 in kv_heads or names.interval is None:
        recurrent = [count == 0 for count in kv_heads]
    elif isinstance(listed, list):
        recurrent = _recurrent_layers(file, kind, listed, len(kv_heads))
    else:
        recurrent = [(layer + 1) % interval != 0 for layer in range(len(kv_heads))]
    found: dict[str, Any] = {"layer_types": [names.types[0] if entry else "full_attention" for entry in recurrent]}
    if names.interval and (tiled := file.get(f"{kind}.ssm.heads_tiled", bool)) is not None:  # which ollama_format.py sets
        found["linear_heads_tiled"] = tiled
    if names.value_size and names.count:
        inner, heads = file.size(f"{kind}.ssm.inner_size"), file.size(f"{kind}.ssm.time_step_rank")
        if inner % heads:
            raise UnsupportedModel(f"{file.path}: {kind}.ssm.inner_size is {inner}, which is no multiple of {heads} heads")
        found[names.value_size[0]] = inner // heads
    tensors = [name.removeprefix("blk.").partition(".")[2] for name in file.tensors]
    for entry, name in (
        (names.conv_bias, ("ssm_conv1d.bias", "shortconv.conv.bias")),
        (names.bias, ("ssm_in.bias", "shortconv.in_proj.bias")),
    ):
        if entry:
            found[entry[0]] = any(tensor in tensors for tensor in name)
    return found


def _recurrent_layers(file: GGUFFile, kind: str, listed: list[Any], layers: int) -> list[bool]:
    """Returns a list's first entries, one for each layer. Raises UnsupportedModel for a shorter one, and for other entries than 0 and 1."""
    key = f"{kind}.attention.recurrent_layers"
    if len(listed) < layers:
        raise UnsupportedModel(f"{file.path}: {key} has {len(listed)} entries for {layers} layers")
    if not all(entry in (0, 1) for entry in listed):
        raise UnsupportedModel(f"{file.path}: {key} must be 0 or 1 for each layer, got {listed!r:.100}")
    return [bool(entry) for entry in listed[:layers]]


def _variants(file: GGUFFile, kind: str, config: dict[str, Any], inner: list[int], kv_heads: list[int]) -> dict[str, Any]:
    """Returns Gemma 4's additional entries of config.json: what differs from layer to layer."""
    layers, windows = len(inner), [entry == "sliding_attention" for entry in config["layer_types"]]
    shared = file.get(f"{kind}.attention.shared_kv_layers", int) or 0
    head_dim, local = config["head_dim"], file.size(f"{kind}.attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if file.size(f"{kind}.{name}", local) != local:
            raise UnsupportedModel(f"{file.path}: {kind}.{name} differs from the size of a head, {local}, and cannot be read")
    groups = {window: {kv_heads[layer] for layer in range(layers) if windows[layer] == window} for window in (True, False)}
    wide = len(set(inner)) > 1
    doubled = [inner[0] * (2 if wide and layer >= layers - shared else 1) for layer in range(layers)]
    if any(len(group) > 1 for group in groups.values()) or inner != doubled:
        raise UnsupportedModel(f"{file.path}: its lists of KV heads or inner sizes by layer are not those of Gemma 4, and cannot be read")
    full = windows.index(False) if False in windows else 0
    divisors = _divisors(file, "rope_freqs") or [1.0] * (head_dim // 2)
    rotated = divisors.count(1.0)
    if divisors[:rotated] != [1.0] * rotated or any(divisor < _UNROTATED for divisor in divisors[rotated:]):
        raise UnsupportedModel(f"{file.path}: tensor rope_freqs.weight must be 1 for the first pairs, and 1e30 for the others")
    base, local_base = config["rope_theta"], file.number(f"{kind}.rope.freq_base_swa", 10000.0)
    rope = {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / head_dim, "rope_theta": base}
    return {
        "head_dim": local,
        "global_head_dim": head_dim,
        "num_key_value_heads": max(groups[True], default=kv_heads[0]),
        "num_global_key_value_heads": max(groups[False], default=kv_heads[0]),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": file.get(f"{kind}.embedding_length_per_layer_input", int) or 0,
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local_base}},
    }


def _layer_types(file: GGUFFile, key: str, architecture: Architecture, layers: int) -> list[str]:
    """Returns the attention type of each layer. Every n-th layer has full attention, or a list names the layers with a window."""
    pattern = file.value(key)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise UnsupportedModel(f"{file.path}: {key} has {len(pattern)} entries for {layers} layers")
        windows = [bool(entry) for entry in pattern]
    else:
        every = file.size(key, architecture.window_interval)
        windows = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _rope_scaling(file: GGUFFile, kind: str, architecture: Architecture) -> dict[str, Any] | None:
    """Returns the rotary scaling. Divisors of frequencies, such as Llama 3's, become those of LongRoPE for any length."""
    prefix, context = f"{kind}.rope.scaling", file.context_length
    original = file.size(f"{prefix}.original_context_length", context)
    scaling, scale = file.get(f"{prefix}.type", str) or "linear", file.number(f"{prefix}.attn_factor", 1.0)
    if (short := _divisors(file, "rope_factors_short")) and (long := _divisors(file, "rope_factors_long")):
        return _longrope(short, long, original, scale)
    if scaling == "longrope":
        raise UnsupportedModel(f"{file.path}: rope scaling of type 'longrope' needs tensors rope_factors_short and rope_factors_long")
    if divisors := _divisors(file, "rope_freqs"):
        return _longrope(divisors, divisors, original, scale)
    named = [key for key in (f"{prefix}.factor", f"{kind}.rope.scale_linear") if file.get(key, float)]
    factor = file.number(named[0]) if named else 1.0
    if scale != 1.0 and (scaling != "yarn" or factor == 1.0):
        raise UnsupportedModel(f"{file.path}: {prefix}.attn_factor is {scale}, which can be read with factors of yarn and longrope alone")
    if scaling == "none" or factor == 1.0:
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return _yarn(file, prefix, factor, scale, original, architecture)
    raise UnsupportedModel(f"{file.path}: rope scaling of type {scaling!r} cannot be read; known are linear, yarn and longrope")


def _yarn(file: GGUFFile, prefix: str, factor: float, scale: float, original: int, architecture: Architecture) -> dict[str, Any]:
    """Returns YaRN's parameters.

    `yarn_attn_factor` replaces what transformers computes from the factor, and `attn_factor` multiplies it. Attention to latents has a
    factor for its scores instead; files have a tenth of its weight.
    """
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if (weight := file.get(f"{prefix}.yarn_log_multiplier", float)) and factor > 1:
        usual /= 0.1 * weight * math.log(factor) + 1.0
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": file.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{prefix}.yarn_beta_slow", 1.0),
    }
    if architecture.latent and weight:
        return found | dict.fromkeys(("mscale", "mscale_all_dim"), 10 * weight)
    return found | {"attention_factor": file.number(f"{prefix}.yarn_attn_factor", usual) * scale}


def _longrope(short: list[float], long: list[float], original: int, scale: float) -> dict[str, Any]:
    factors = {"short_factor": short, "long_factor": long}
    return {"rope_type": "longrope", **factors, "original_max_position_embeddings": original, "attention_factor": scale}


def _divisors(file: GGUFFile, name: str) -> list[float] | None:
    """Returns the divisors of the frequencies in a tensor; None if the file has no such tensor."""
    entry = file.tensors.get(f"{name}.weight")
    if entry is None:
        return None
    if entry.kind != _F32 or len(entry.shape) != 1:
        raise UnsupportedModel(f"{file.path}: tensor {entry.name} must be a vector of type F32")
    divisors = file.data(entry).view(np.float32)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise UnsupportedModel(f"{file.path}: tensor {entry.name} must hold positive numbers")
    return [float(divisor) for divisor in divisors]
