"""Converts GGUF to the Hugging Face layout: config.json, tokenizer.json, and the tensors under their Hugging Face names."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.architectures import Architecture, GGUFFormat
from chairlift.checkpoint.cache import LINK, writing_to
from chairlift.checkpoint.gguf_config import architecture_of, model_config, num_layers
from chairlift.checkpoint.gguf_encoder import Modules, encoder_modules
from chairlift.checkpoint.gguf_file import GGUFFile, TensorEntry
from chairlift.checkpoint.gguf_keys import check_keys
from chairlift.checkpoint.gguf_tokenizer import end_token_ids, write_tokenizer
from chairlift.checkpoint.ollama_format import adapt
from chairlift.checkpoint.safetensors_file import Array, as_float32
from chairlift.errors import UnsupportedModel

log = logging.getLogger("chairlift")

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight", ".attn_rot_embd.weight", ".input_scale")
"""Tensors that are not weights: the configuration has their content, or they are of activations in 4 bits."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
"""Recommended sampling settings: keys below `general.sampling`, and the names in generation_config.json."""
_CACHED_BYTES = 1 << 16
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Name of ggml's types, and elements and bytes of a block, for those that the CPU kernels use.

The gguf package, slow to import, knows the others.
"""

_FEW_BITS = {41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18)}
"""The same for types that neither the CPU kernels nor all versions of the gguf package know."""
_KNOWN_TYPES = BLOCK_TYPES | _FEW_BITS
_FLOATS = {0: np.float32, 1: np.float16, 30: np.uint16}


def convert(path: Path, out: Path, sampling: Mapping[str, float] | None = None, stop: Collection[str] = ()) -> None:
    """Writes the model of a GGUF file, except its weights, to the new directory `out`, completely or not at all.

    The directory gets the configuration, the tokenizer and a link to the file: weights are read from the file itself, see `GGUFTensors`. A
    `tokenizer.json` beside the file replaces the file's own vocabulary. If another process created `out` meanwhile, its result stays.
    `sampling` are recommended settings for generation_config.json, and `stop` texts of control tokens that end an answer. Raises
    UnsupportedModel, with the reason, for a file that cannot be read.
    """
    file = open_gguf(path)
    config, modules = model_config(file), encoder_modules(file)
    with writing_to(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            _write(file, config, modules, partial, sampling or {}, stop)
            try:
                partial.rename(out)
            except OSError:
                if not out.is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write(
    file: GGUFFile, config: dict[str, Any], modules: Modules, out: Path, sampling: Mapping[str, float], stop: Collection[str]
) -> None:
    write_tokenizer(file, out)
    _write_json(out / "config.json", config)
    generation = {key: value for key, value in config.items() if key in ("bos_token_id", "pad_token_id")}
    if suppressed := file.get("tokenizer.ggml.suppress_tokens", list):
        generation["suppress_tokens"] = suppressed
    generation |= {"eos_token_id": end_token_ids(file, stop)} | _recommended_sampling(file) | dict(sampling)
    _write_json(out / "generation_config.json", generation)
    _write_modules(modules, out)
    _named(file, architecture_of(file)[1])  # checks that all layers are there
    if unknown := check_keys(file.path, file.unread(), config["head_dim"], file.context_length):
        log.warning("%s has metadata that is not known here and not used: %s", file.path.name, ", ".join(unknown))
    if file.value(f"{file.get('general.architecture', str)}.context_length") == 0:
        log.warning("%s says that its context length is 0: taking %d tokens", file.path.name, file.context_length)
    (out / LINK).symlink_to(file.path.absolute())
    out.chmod(0o755)


def _write_modules(modules: Modules, out: Path) -> None:
    """Writes the modules of sentence-transformers, if there are any."""
    if not modules:
        return
    paths = [f"{number}_{kind}" for number, (kind, _) in enumerate(modules, 1)]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, (kind, _) in zip(paths, modules, strict=True)]
    _write_json(out / "modules.json", listed)
    for path, (_, settings) in zip(paths, modules, strict=True):
        (out / path).mkdir()
        _write_json(out / path / "config.json", settings)


class GGUFTensors:
    """The tensors of a GGUF file under Hugging Face's names and in the row order of Hugging Face's models."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises UnsupportedModel if the file is damaged or its model is not supported."""
        self.path = path
        self.file = open_gguf(path, vocabulary=False)
        architecture, self._layout = architecture_of(self.file)
        recurrence = architecture.recurrence if isinstance(architecture, Architecture) else None
        self._recurrent = f".{recurrence.prefix}" if recurrence else None
        self._head_dim = model_config(self.file)["head_dim"]
        self.entries = _named(self.file, self._layout)

    def interleaved(self, name: str) -> int:
        """Returns the rows of a head if the halves of its rotary rows alternate in the file (see `_halves`), else 0."""
        return self._head_dim if self._is_rotary(name) else 0

    def values(self, name: str) -> Array:
        """Returns the tensor's values in fp32, as dequantised by the gguf package."""
        rows, factor = read_float32(self.file, self.entries[name]), self.factor(name)
        if factor is not None:
            rows = rows * read_float32(self.file, factor).reshape(-1, *[1] * (rows.ndim - 1))
        if self._layout.stored_offset and name.endswith("norm.weight") and not (self._recurrent and self._recurrent in name):
            rows = rows - np.float32(self._layout.stored_offset)
        return _halves(rows, rows.shape[0] // self._head_dim) if self._is_rotary(name) else rows

    def factor(self, name: str) -> TensorEntry | None:
        """Returns the factor of a matrix, or those of its experts, as files of type NVFP4 have; None if it has none."""
        stored, shape = self.entries[name].name.removesuffix("weight") + "scale", self.entries[name].shape
        if stored not in self.file.tensors or hf_name(stored, self._layout):
            return None
        if self.file.tensors[stored].shape != (shape[0] if len(shape) == 3 else 1,):
            raise UnsupportedModel(f"{self.path}: tensor {stored} must have one number for each matrix")
        return self.file.tensors[stored]

    def type_name(self, name: str) -> str:
        """Returns ggml's name of the tensor's type."""
        kind = self.entries[name].kind
        return _KNOWN_TYPES[kind][0] if kind in _KNOWN_TYPES else str(_constants().GGMLQuantizationType(kind).name)

    def _is_rotary(self, name: str) -> bool:
        return self._layout.adjacent_pairs and name.rsplit(".", 2)[1] in ("q_proj", "k_proj")


def open_gguf(path: Path, *, vocabulary: bool = True) -> GGUFFile:
    """Reads the header of a file and of its parts, as `GGUFFile` does. Raises UnsupportedModel."""
    try:
        file = GGUFFile(path, _block_size, vocabulary=vocabulary)
        file.read_parts()
        file.adapt(adapt)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return file


def _block_size(kind: int) -> tuple[int, int] | None:
    if kind in _KNOWN_TYPES:
        return _KNOWN_TYPES[kind][1:]
    sizes: tuple[int, int] | None = {int(known): sizes for known, sizes in _constants().GGML_QUANT_SIZES.items()}.get(kind)
    return sizes


def _constants() -> Any:
    """Imports the gguf package's table of types. Raises UnsupportedModel if the package is not installed."""
    try:
        from gguf import constants
    except ImportError:
        raise UnsupportedModel("reading this GGUF file's types of tensors needs one more package: pip install gguf") from None
    return constants


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


def hf_name(name: str, layout: GGUFFormat) -> str | None:
    """Returns Hugging Face's name of a tensor; None if it is unknown."""
    stem, _, suffix = name.rpartition(".")
    if stem in layout.top and suffix in ("weight", "bias"):
        return f"{layout.top[stem]}.{suffix}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if whole := layout.tensors.get(f"{rest}.{suffix}"):
        return f"model.layers.{block}.{whole}"
    known = layout.tensors.get(rest, _LAYER.get(rest))
    if not stem.startswith("blk.") or not block.isdecimal() or known is None or suffix not in ("weight", "bias"):
        return None
    return f"{layout.layer.format(block)}{known}.{suffix}"


def _named(file: GGUFFile, layout: GGUFFormat) -> dict[str, TensorEntry]:
    """Returns the tensors by their Hugging Face names. Raises UnsupportedModel if one is unknown, or if layers are missing.

    Whether each layer has the right tensors is checked when they are taken.
    """
    kind = file.get("general.architecture", str) or ""
    layers, found, seen = num_layers(file, kind), {}, set()
    beyond = tuple(f"blk.{layer}." for layer in range(layers, file.size(f"{kind}.block_count")))
    for entry in file.tensors.values():
        if entry.name.endswith(_IGNORED) or entry.name.startswith(beyond):
            continue
        name = hf_name(entry.name, layout)
        if name is None and entry.name.endswith(".scale") and entry.name.removesuffix("scale") + "weight" in file.tensors:
            continue  # a factor of this matrix
        if name is None:
            raise UnsupportedModel(f"{file.path}: tensor {entry.name} of shape {list(entry.shape)} does not belong to its architecture")
        found[name] = entry
        if entry.name.startswith("blk."):
            seen.add(int(entry.name.split(".")[1]))
    if (held := max(seen, default=-1) + 1) != layers or len(seen) != held:
        raise UnsupportedModel(f"{file.path} says it has {layers} layers, and holds tensors of {len(seen)}")
    return found


def _halves(weights: Array, heads: int) -> Array:
    """Undoes llama.cpp's order of rotary rows: its pairs (2i, 2i+1) become Hugging Face's (i, i + half)."""
    return weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def read_float32(file: GGUFFile, entry: TensorEntry) -> Array:
    """Returns the tensor's values in fp32, with shape `entry.shape`."""
    data = file.data(entry)
    if entry.kind in _FLOATS:
        return as_float32(data.view(_FLOATS[entry.kind])).reshape(entry.shape)
    if known := _FEW_BITS.get(entry.kind):
        decode, block = partial(_few_bits, *known[1:]), known[2]
    else:
        constants = _constants()
        from gguf.quants import dequantize

        kind = constants.GGMLQuantizationType(entry.kind)
        decode, block = partial(dequantize, qtype=kind), constants.GGML_QUANT_SIZES[kind][1]
    # Blocks are independent. Chunks that stay in the processor's cache take half the time of whole tensors.
    step = max(1, _CACHED_BYTES // block) * block
    try:
        values: Array = np.concatenate([decode(data[at : at + step]) for at in range(0, data.size, step)])
    except NotImplementedError:
        raise UnsupportedModel(f"{file.path}: tensor {entry.name} is of type {kind.name}, which the gguf package cannot read") from None
    return values.astype(np.float32, copy=False).reshape(entry.shape)


def _few_bits(elements: int, size: int, data: Array) -> Array:
    """Returns the numbers of blocks, each a scale in fp16 and codes of one bit for -1 and 1, or of two bits for -1, 0, 1 and 2."""
    blocks = data.reshape(-1, size)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), elements, -1)
    codes = np.packbits(bits, axis=2, bitorder="little")[..., 0].astype(np.float32)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return ((codes * (3 - bits.shape[2]) - 1) * scale).reshape(-1)


def _write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
