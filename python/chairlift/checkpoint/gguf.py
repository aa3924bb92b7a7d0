"""Converts GGUF to the Hugging Face layout: config.json, tokenizer.json, and the tensors under their Hugging Face names."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.checkpoint.cache import LINK, writing_to
from chairlift.checkpoint.gguf_file import GGUFFile, TensorEntry
from chairlift.checkpoint.gguf_keys import check_keys
from chairlift.checkpoint.gguf_tokenizer import end_token_ids, write_tokenizer
from chairlift.checkpoint.safetensors_file import Array, as_float32
from chairlift.errors import UnsupportedModel

log = logging.getLogger("chairlift")

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
"""Supported values of `general.architecture`. Mistral and SmolLM2 files say `llama`; Granite 3 and dense Granite 4 say `granite`."""
_INTERLEAVED = {"llama", "smollm3", "granite"}
"""Architectures whose rotary rows llama.cpp stores in another order."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma has an additional norm after attention and after the MLP, and other names for the norms before them."""
_IGNORED = ("rope_freqs.weight", ".attn_rot_embd.weight")
"""Tensors that are not weights: frequencies that follow from the configuration."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
"""Recommended sampling settings: keys below `general.sampling`, and the names in generation_config.json."""
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
"""llama.cpp's numbers of ways to combine the states of a text, and the names in sentence-transformers' configuration."""
_CACHED_BYTES = 1 << 16
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Name of ggml's types, and elements and bytes of a block, for those that the CPU kernels use.

The gguf package, slow to import, knows the others.
"""

_FLOATS = {0: np.float32, 1: np.float16, 30: np.uint16}


def convert(path: Path, out: Path, sampling: Mapping[str, float] | None = None) -> None:
    """Writes the model of a GGUF file, except its weights, to the new directory `out`, completely or not at all.

    The directory gets the configuration, the tokenizer and a link to the file: weights are read from the file itself, see `GGUFTensors`. A
    `tokenizer.json` beside the file replaces the file's own vocabulary. If another process created `out` meanwhile, its result stays.
    `sampling` are recommended settings for generation_config.json. Raises UnsupportedModel, with the reason, for a file that cannot be
    read.
    """
    file = open_gguf(path)
    config = model_config(file)
    if unknown := check_keys(path, file.unread(), config["head_dim"], config["max_position_embeddings"]):
        log.warning("%s has metadata that is not known here and not used: %s", path.name, ", ".join(unknown))
    with writing_to(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            _write(file, config, partial, sampling or {})
            try:
                partial.rename(out)
            except OSError:
                if not out.is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write(file: GGUFFile, config: dict[str, Any], out: Path, sampling: Mapping[str, float]) -> None:
    write_tokenizer(file, out)
    _write_json(out / "config.json", config)
    generation = {key: value for key, value in config.items() if key in ("bos_token_id", "pad_token_id")}
    generation |= {"eos_token_id": end_token_ids(file)} | _recommended_sampling(file) | dict(sampling)
    _write_json(out / "generation_config.json", generation)
    if (pooling := file.value(f"{file.get('general.architecture', str)}.pooling_type")) in _POOLINGS:
        _write_json(out / "modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
        (out / "1_Pooling").mkdir()
        _write_json(out / "1_Pooling" / "config.json", {"pooling_mode": _POOLINGS[pooling]})
    for _ in _matched(file, config):
        pass  # checks that all tensors exist and have the right shapes
    (out / LINK).symlink_to(file.path.absolute())
    out.chmod(0o755)


class GGUFTensors:
    """The tensors of a GGUF file under Hugging Face's names and in the row order of Hugging Face's models."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises UnsupportedModel if the file is damaged or its model is not supported."""
        self.path = path
        self.file = open_gguf(path, vocabulary=False)
        self._config = model_config(self.file)
        self.entries = dict(_matched(self.file, self._config))

    def interleaved(self, name: str) -> int:
        """Returns the rows of a head if the halves of its rotary rows alternate in the file (see `_halves`), else 0."""
        return self._config["head_dim"] if _is_rotary(self._config, name) else 0

    def values(self, name: str) -> Array:
        """Returns the tensor's values in fp32, as dequantised by the gguf package."""
        rows = _dequantize(self.file, self.entries[name])
        if is_gemma(self._config) and name.endswith("norm.weight"):
            rows = rows - np.float32(1)  # Hugging Face's norms multiply by 1 + weight, llama.cpp's by the stored weight
        return _halves(rows, rows.shape[0] // self._config["head_dim"]) if _is_rotary(self._config, name) else rows

    def type_name(self, name: str) -> str:
        """Returns ggml's name of the tensor's type."""
        kind = self.entries[name].kind
        return BLOCK_TYPES[kind][0] if kind in BLOCK_TYPES else str(_constants().GGMLQuantizationType(kind).name)


def open_gguf(path: Path, *, vocabulary: bool = True) -> GGUFFile:
    """Reads the header of a file and of its parts, as `GGUFFile` does. Raises UnsupportedModel."""
    try:
        file = GGUFFile(path, _block_size, vocabulary=vocabulary)
        file.read_parts()
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return file


def _block_size(kind: int) -> tuple[int, int] | None:
    if kind in BLOCK_TYPES:
        return BLOCK_TYPES[kind][1:]
    sizes: tuple[int, int] | None = {int(known): sizes for known, sizes in _constants().GGML_QUANT_SIZES.items()}.get(kind)
    return sizes


def _constants() -> Any:
    """Imports the gguf package's table of types. Raises UnsupportedModel if the package is not installed."""
    try:
        from gguf import constants
    except ImportError:
        raise UnsupportedModel("reading this GGUF file's types of tensors needs one more package: pip install gguf") from None
    return constants


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the file's configuration in the format of Hugging Face's config.json."""
    kind = file.get("general.architecture", str)
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{file.path} holds a model of architecture {kind!r}; those that can be read: {known}")
    if file.get(f"{kind}.expert_count", int):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which cannot be read from GGUF")
    hidden, heads = file.size(f"{kind}.embedding_length"), file.size(f"{kind}.attention.head_count")
    head_dim = file.size(f"{kind}.attention.key_length", file.size(f"{kind}.rope.dimension_count", hidden // heads))
    if {file.size(f"{kind}.{key}", head_dim) for key in ("rope.dimension_count", "attention.value_length")} != {head_dim} or head_dim % 2:
        raise UnsupportedModel(f"{file.path}: rotary or value dimensions that differ from the head's {head_dim} cannot be read")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel(f"{file.path} holds no model: tensor token_embd.weight is missing")
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": file.size(f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.size(f"{kind}.context_length"),
        "rms_norm_eps": file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{kind}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, kind, head_dim),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": "float32",
    }
    if is_gemma(config):
        config |= _gemma_config(file, kind, config)
    if kind == "granite":
        config |= _granite_config(file)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None and token < embedding.shape[0]:
            config[f"{name}_token_id"] = token
    return config


def is_gemma(config: dict[str, Any]) -> bool:
    """Whether a configuration is Gemma 2's or 3's."""
    return str(config["model_type"]).startswith("gemma")


def _gemma_config(file: GGUFFile, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns Gemma's additional entries of config.json."""
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    # The files do not contain this: models with 27 billion parameters scale attention scores by hidden size / heads, not by the head size.
    largest = (kind, layers) in (("gemma2", 46), ("gemma3", 62))
    found: dict[str, Any] = {
        "model_type": {"gemma3": "gemma3_text"}.get(kind, kind),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if largest else config["head_dim"],
        "sliding_window": file.size(f"{kind}.attention.sliding_window", 4096),
        "layer_types": _layer_types(file, f"{kind}.attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}[kind], layers),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if kind == "gemma2" or file.value(f"{kind}.{name}") is not None:
            found[name] = file.number(f"{kind}.{name}", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}[name])
    if kind == "gemma3":
        found["rope_local_base_freq"] = file.number(f"{kind}.rope.freq_base_swa", 10000.0)
    return found


def _granite_config(file: GGUFFile) -> dict[str, Any]:
    """Returns Granite's additional entries of config.json."""
    if file.get("granite.rope.scaling.finetuned", bool) is False:
        raise UnsupportedModel(f"{file.path} has no rotary positions, which Granite's code here needs")
    names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    names |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    return {name: file.number(f"granite.{key}", 1.0) for name, key in names.items()}


def _recommended_sampling(file: GGUFFile) -> dict[str, Any]:
    """Returns the sampling settings that the file recommends, by their names in generation_config.json."""
    found = {name: file.value(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    settings = {
        name: float(str(np.float32(value))) if isinstance(value, float) else value for name, value in found.items() if value is not None
    }
    others = [key for key in ("mirostat", "xtc_probability") if file.value(f"general.sampling.{key}")]
    if others:
        log.warning("%s recommends sampling with %s, which is not supported", file.path, " and ".join(others))
    return settings


def _layer_types(file: GGUFFile, key: str, default: int, layers: int) -> list[str]:
    """Returns the attention type of each layer. Every n-th layer has full attention, or a list names the layers with a window."""
    pattern = file.value(key)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise UnsupportedModel(f"{file.path}: {key} has {len(pattern)} entries for {layers} layers")
        windows = [bool(entry) for entry in pattern]
    else:
        every = file.size(key, default)
        windows = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _rope_scaling(file: GGUFFile, kind: str, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, file.number(f"{kind}.rope.freq_base", 10000.0), head_dim)
    scaling = file.get(f"{kind}.rope.scaling.type", str) or "linear"
    named = [key for key in (f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear") if file.get(key, float)]
    factor = file.number(named[0]) if named else 1.0
    if scaling == "none" or factor == 1.0:
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        context = file.size(f"{kind}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    raise UnsupportedModel(f"{file.path}: rope scaling of type {scaling!r} cannot be read; known are linear and yarn")


def _llama3_scaling(file: GGUFFile, base: float, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's scaling. The file holds only its result: the divisor of each frequency."""
    divisors = _dequantize(file, file.tensors["rope_freqs.weight"])
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    turns = context * base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: its rope frequencies are not those of Llama 3, and cannot be read")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _hf_name(name: str, config: dict[str, Any]) -> str | None:
    """Returns Hugging Face's name of a tensor; None if it is unknown."""
    names = _LAYER | _GEMMA_LAYER if is_gemma(config) else _LAYER
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP and suffix == "weight":
        return f"{_TOP[stem]}.{suffix}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or not block.isdecimal() or rest not in names or suffix not in ("weight", "bias"):
        return None
    return f"model.layers.{block}.{names[rest]}.{suffix}"


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor of a model with this configuration, biases included."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    biased = [f"mlp.{name}" for name in mlp] if config["mlp_bias"] else []
    if config["attention_bias"]:
        # Qwen2 always has biases on its attention projections except the output projection.
        biased += [f"self_attn.{name}" for name in attention if (config["model_type"], name) != ("qwen2", "o_proj")]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        blocks = {f"self_attn.{name}": shape for name, shape in attention.items()} | {f"mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in blocks.items()}
        shapes |= {f"{prefix}.{name}.bias": blocks[name][:1] for name in biased}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if is_gemma(config):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in norms}
        if config["model_type"] in ("qwen3", "gemma3_text"):
            shapes |= {f"{prefix}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _matched(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, TensorEntry]]:
    """Yields each tensor with its Hugging Face name. Raises if the file's tensors are not exactly those of the configuration."""
    if config["num_hidden_layers"] > len(file.tensors):
        raise UnsupportedModel(f"{file.path} says it has {config['num_hidden_layers']} layers but holds {len(file.tensors)} tensors")
    expected = _expected_shapes(config)
    for entry in file.tensors.values():
        if entry.name.endswith(_IGNORED):
            continue
        name = _hf_name(entry.name, config)
        if name is None or expected.pop(name, None) != entry.shape:
            raise UnsupportedModel(f"{file.path}: tensor {entry.name} of shape {list(entry.shape)} does not belong to its configuration")
        yield name, entry
    if expected:
        raise UnsupportedModel(f"{file.path} lacks {len(expected)} tensors, {next(iter(expected))} among them")


def _is_rotary(config: dict[str, Any], name: str) -> bool:
    """Whether llama.cpp reorders the tensor's rows: it does for the rotated projections of Llama-like models."""
    return bool(config["model_type"] in _INTERLEAVED and name.rsplit(".", 2)[1] in ("q_proj", "k_proj"))


def _halves(weights: Array, heads: int) -> Array:
    """Undoes llama.cpp's order of rotary rows: its pairs (2i, 2i+1) become Hugging Face's (i, i + half)."""
    return weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _dequantize(file: GGUFFile, entry: TensorEntry) -> Array:
    """Returns the tensor's values in fp32, with shape `entry.shape`."""
    data = file.data(entry)
    if entry.kind in _FLOATS:
        return as_float32(data.view(_FLOATS[entry.kind])).reshape(entry.shape)
    constants = _constants()
    from gguf.quants import dequantize

    kind = constants.GGMLQuantizationType(entry.kind)
    block = constants.GGML_QUANT_SIZES[kind][1]
    # Blocks are independent. Chunks that stay in the processor's cache take half the time of whole tensors.
    step = max(1, _CACHED_BYTES // block) * block
    try:
        values: Array = np.concatenate([dequantize(data[at : at + step], kind) for at in range(0, data.size, step)])
    except NotImplementedError:
        raise UnsupportedModel(f"{file.path}: tensor {entry.name} is of type {kind.name}, which the gguf package cannot read") from None
    return values.astype(np.float32, copy=False).reshape(entry.shape)


def _write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
