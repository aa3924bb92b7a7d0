"""Loads a model's tensors from safetensors or GGUF files, or generates them from a seed."""

from __future__ import annotations

import itertools
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.checkpoint.gguf import BLOCK_TYPES, GGUFTensors
from chairlift.checkpoint.safetensors_file import DTYPES, PACKED_DTYPES, Array, SafetensorsFile, as_array, as_float32, tensor_files
from chairlift.checkpoint.weight_files import gguf_link
from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.encoder import EncoderConfig
from chairlift.models.experts import MXFP4_BLOCKS
from chairlift.models.quantization import QuantizationScheme
from chairlift.models.shape import ModelShape
from chairlift.runner.expanded_matrix import EXPANDED, expand
from chairlift.runner.file_pages import FilePages
from chairlift.runner.gguf_grids import provide_grids
from chairlift.runner.memory.decision import gib
from chairlift.runner.memory.precision import BYTES
from chairlift.runner.quantised_matrix import TENSORS, QuantisedMatrix, multiply_out, read_quantised
from chairlift.runner.tensor_names import WRAPPED_PREFIXES, TensorNames, saved_as

log = logging.getLogger("chairlift")

OTHER_PARTS = ("mtp.", "model.mtp_layers.", "visual.")
"""What the names of tensors begin with that predict tokens beyond the next one, or encode images beside a decoder without a prefix."""
NEEDLESS = (
    *("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point"),
    *("_proj.output_scale", "attn.prob_output_scale", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
)
"""Suffixes of tensors that a model may ignore: old tables of rotary angles and masks, scales of activations and of a KV cache in 8 bits."""
BYTE_DTYPES = {"U8": PACKED_DTYPES["U8"]}

Part = tuple[str, int, NDArray[np.uint8] | tuple[_core.TensorFile, int] | Callable[[], NDArray[np.uint8]], int]
"""A matrix as `_core.Linear` takes it.

Its fields are its dtype, its rows, its bytes, their position in a file or what makes them, and the rows of a head whose rotary halves
alternate, else 0.
"""


class Weights(ABC):
    """The tensors of a checkpoint, by their Hugging Face names. The defaults are those of one without files of safetensors."""

    @abstractmethod
    def take(self, name: str, *shape: int) -> Array:
        """Returns a tensor. Raises UnsupportedModel if it is missing or has another shape."""

    @abstractmethod
    def has(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of this name, and of this shape if one is given."""

    def find(self, name: str, *shape: int) -> tuple[SafetensorsFile, str] | None:
        """Returns the file that has a tensor as `take` returns it, and its name there; None if no file has it so.

        Raises UnsupportedModel as `take` does.
        """
        return None

    def is_quantised(self, layer: str) -> bool:
        """Whether the weight of a linear layer is quantised, and not dequantised when it is taken."""
        return False

    def matrix(self, layer: str, outs: int, ins: int) -> Array | QuantisedMatrix:
        """Returns the weight [outs, ins] of a linear layer, quantised as in the checkpoint. Raises UnsupportedModel as `take` does."""
        return self.take(f"{layer}.weight", outs, ins)

    def scales(self, name: str, heads: int) -> Array | None:
        """Returns the scales of that name, fp32 [heads]; None if the checkpoint has none. A single scale applies to all heads.

        Raises UnsupportedModel if their number or a value is invalid.
        """
        return None

    @abstractmethod
    def part(self, name: str, *shape: int) -> Part:
        """Returns a tensor for the CPU kernels as a matrix, whose columns are the last dimension."""

    def packed(self, name: str, *shape: int, index: int | None = None) -> NDArray[np.uint8]:
        """Returns a tensor of bytes, or entry `index` of its first dimension alone. Raises UnsupportedModel as `take` does."""
        raise UnsupportedModel(f"there is no tensor of bytes {name}")

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of a checkpoint whose blocks the CPU kernels use, and the fp32 bytes of its other tensors.

        Zeros if it has no blocks.
        """
        return 0, 0

    def release(self) -> None:  # noqa: B027 (without files there is nothing to do)
        """Says that all matrices that `part` returned have been packed."""

    @abstractmethod
    def finish(self, model: ModelShape) -> None:
        """Raises UnsupportedModel if the checkpoint has a tensor that was not used and that the model may not ignore."""


class SafetensorWeights(Weights):
    """The tensors of a directory's *.safetensors files. Tensors that are not used are not read."""

    def __init__(self, directory: Path, scheme: QuantizationScheme | None = None) -> None:
        """Opens the files of the weights. `scheme` is that of quantised layers. Raises ModelNotFound or UnsupportedModel."""
        self.directory, self._scheme = directory, scheme
        self._files = tensor_files(directory)
        self._kernel_files: dict[Path, _core.TensorFile] = {}
        self._pages = FilePages({file.path for file in self._files.values()})
        self._unused = set(self._files)
        self._names = TensorNames.of(self._files)

    def _stored(self, name: str) -> str:
        """A tensor's name in the files."""
        stored = self._names.stored(name)
        others = saved_as(stored) if stored not in self._files else ()
        return next((other for other in others if other in self._files), stored)

    def take(self, name: str, *shape: int) -> Array:
        """Returns a tensor in the file's dtype."""
        if self._is_transposed(name):
            return np.ascontiguousarray(as_array(*self._find(name, *shape[::-1])).T)
        return as_array(*self._find(name, *shape))

    def find(self, name: str, *shape: int) -> tuple[SafetensorsFile, str] | None:
        """Returns the file of a tensor, and its name there."""
        return None if self._is_transposed(name) else self._find(name, *shape)

    def _is_transposed(self, name: str) -> bool:
        return name.endswith(self._names.transposed)

    def _find(self, name: str, *shape: int, dtypes: dict[str, tuple[str, int]] = DTYPES) -> tuple[SafetensorsFile, str]:
        name = self._stored(name)
        file = self._check(name, shape, dtypes=dtypes)
        self._unused.discard(name)
        self._note(name)
        return file, name

    def _note(self, name: str) -> None:
        """Notes that a tensor is going to be read."""
        entry = self._files[name].tensors[name]
        self._pages.add(self._files[name].path, entry.start, entry.size)

    def has(self, name: str, *shape: int) -> bool:
        """Whether a file has a tensor of this name, and of this shape if one is given."""
        name = self._stored(name)
        return name in self._files and (not shape or self._files[name].tensors[name].shape == shape)

    def is_quantised(self, layer: str) -> bool:
        """Whether a linear layer has tensors of the scheme."""
        kinds = ("weight_scale", "weight_scale_inv", "qweight", "weight.absmax", "biases")
        return self._scheme is not None and any(self.has(f"{layer}.{kind}") for kind in kinds)

    def matrix(self, layer: str, outs: int, ins: int) -> Array | QuantisedMatrix:
        """Returns the weight of a linear layer."""
        if self._scheme is None or not self.is_quantised(layer):
            return self.take(f"{layer}.weight", outs, ins)
        stored = self._stored(f"{layer}.weight").removesuffix(".weight")

        def has(kind: str) -> bool:
            return f"{stored}.{kind}" in self._files

        def read(kind: str, *shapes: tuple[int, ...]) -> Array:
            name = f"{stored}.{kind}"
            any_shape = () if shapes or name not in self._files else (self._files[name].tensors[name].shape,)
            file = self._check(name, *shapes, *any_shape, dtypes=DTYPES | PACKED_DTYPES)
            self._note(name)
            return as_array(file, name)

        found = (expand if self._scheme.kind else read_quantised)(self._scheme, read, has, outs, ins)
        self._unused -= {f"{stored}.{kind}" for kind in (*TENSORS, *EXPANDED)}
        return found

    def scales(self, name: str, heads: int) -> Array | None:
        """Returns the scales of that name, fp32 [heads]."""
        name = self._stored(name)
        if name not in self._files:
            return None
        file = self._files[name]
        self._check(name, file.tensors[name].shape)
        scales = as_float32(as_array(file, name)).reshape(-1)
        if len(scales) not in (1, heads) or not (scales > 0).all():
            raise UnsupportedModel(f"tensor {name} must have a positive number, or one for each of {heads} KV heads")
        return np.broadcast_to(scales, heads).copy()

    def packed(self, name: str, *shape: int, index: int | None = None) -> NDArray[np.uint8]:
        """Returns a tensor of bytes, or an entry of it."""
        return as_array(*self._find(name, *shape, dtypes=BYTE_DTYPES), index)

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of all files if experts have blocks of MXFP4."""
        blocks = any(name.endswith(MXFP4_BLOCKS) for name in self._files)
        return (sum(path.stat().st_size for path in {file.path for file in self._files.values()}), 0) if blocks else (0, 0)

    def part(self, name: str, *shape: int) -> Part:
        """Returns a matrix in the checkpoint's dtype, for the kernels to read from the file; a quantised one in fp32 when it is packed."""
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and self.is_quantised(layer):  # a tensor of all experts is not quantised
            return made("float32", shape[0], lambda: self._multiplied_out(layer, *shape))
        if self._is_transposed(name):
            return in_memory(self.take(name, *shape))
        file, stored = self._find(name, *shape)
        if file.path not in self._kernel_files:
            self._kernel_files[file.path] = _core.TensorFile(file.path)
        entry = file.tensors[stored]
        return DTYPES[entry.dtype][0], math.prod(shape[:-1]), (self._kernel_files[file.path], entry.start), 0

    def _multiplied_out(self, layer: str, outs: int, ins: int) -> Array:
        """Returns the quantised weight of a linear layer in fp32."""
        found = self.matrix(layer, outs, ins)
        return multiply_out(found) if isinstance(found, QuantisedMatrix) else found

    def release(self) -> None:
        """Drops the pages of matrices that have been packed, if the files are large."""
        self._pages.drop()

    def finish(self, model: ModelShape) -> None:
        """Raises UnsupportedModel if a tensor of the decoder was not used, except a tied head and the tensors of NEEDLESS."""
        ignored = {self._stored("lm_head.weight")} if isinstance(model, ModelConfig) and model.tie_word_embeddings else set()
        # With a prefix there are other parts beside the decoder, such as an image encoder.
        own = self._names.prefix if self._names.prefix in WRAPPED_PREFIXES else ""
        unused = (name for name in self._unused - ignored if name.startswith(own) and not _is_shared(name, model))
        unused = (name for name in unused if not name.startswith(OTHER_PARTS) and not _is_later(name, model))
        extra = sorted(name for name in unused if not name.endswith(NEEDLESS) and not self._is_empty_bias(name) and _matters(name, model))
        if extra:
            raise UnsupportedModel(f"{self.directory} has tensors that its config.json does not account for: {_some(extra)}")

    def _is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of zeros that AutoGPTQ writes for layers without a bias."""
        return self._scheme is not None and name.endswith(".bias") and not as_array(self._files[name], name).any()

    def _check(self, name: str, *shapes: tuple[int, ...], dtypes: dict[str, tuple[str, int]] = DTYPES) -> SafetensorsFile:
        """Returns the file of a tensor. Raises UnsupportedModel if it is missing, or has none of these shapes or dtypes."""
        if name not in self._files:
            raise UnsupportedModel(f"{self.directory} has no tensor {name}: its weights do not belong to its config.json")
        entry = self._files[name].tensors[name]
        if entry.shape not in shapes:
            asked = " or ".join(str(list(shape)) for shape in shapes)
            raise UnsupportedModel(f"tensor {name} is {list(entry.shape)} where config.json asks for {asked}")
        if entry.dtype not in dtypes:
            raise UnsupportedModel(f"tensor {name} is {entry.dtype} (supported: {', '.join(name for name, _ in DTYPES.values())})")
        return self._files[name]


def in_memory(array: Array) -> Part:
    """Returns a matrix for the CPU kernels. As in `as_array`, bfloat16 numbers are their bits."""
    return (
        array.dtype.name.replace("uint16", "bfloat16"),
        math.prod(array.shape[:-1]),
        _bytes_of(array),
        0,
    )


def made(kind: str, rows: int, make: Callable[[], Array]) -> Part:
    """Returns a matrix of dtype `kind` for the CPU kernels. `make` makes its numbers when it is packed."""
    return kind, rows, lambda: _bytes_of(make()), 0


def _bytes_of(array: Array) -> NDArray[np.uint8]:
    """Returns the bytes of a tensor, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def split_rows(part: Part, count: int, ins: int) -> list[Part]:
    """Splits a matrix of `ins` columns into `count` matrices with equal numbers of rows."""
    return slices(part, [part[1] // count] * count, ins)


def slices(part: Part, rows: list[int], ins: int) -> list[Part]:
    """Splits a matrix of `ins` columns into matrices with these numbers of rows."""
    kind, _, data, interleaved = part
    if callable(data):
        data = data()
    elements, size = (1, BYTES[kind]) if kind in BYTES else BLOCK_TYPES[int(kind)][1:]
    starts = [0, *itertools.accumulate(count * ins // elements * size for count in rows)]
    if isinstance(data, np.ndarray):
        return [(kind, count, data[start:end], interleaved) for count, (start, end) in zip(rows, itertools.pairwise(starts), strict=True)]
    file, first = data
    return [(kind, count, (file, first + start), interleaved) for count, start in zip(rows, starts[:-1], strict=True)]


def open_weights(config: EngineConfig, directory: Path, norm: float = 1.0, scheme: QuantizationScheme | None = None) -> Weights:
    """Opens the weights that the settings select: the directory's, or random ones.

    `norm` is the value of a neutral norm weight in a checkpoint of this model, `scheme` that of its quantised layers.
    """
    if config.load_format == "dummy":
        return DummyWeights(config.seed, norm)
    if (source := gguf_link(directory)) is not None:
        return GGUFWeights(source)
    return SafetensorWeights(directory, scheme)


class GGUFWeights(Weights):
    """The tensors of a GGUF file, read from the file and dequantised when they are taken."""

    FLOATS: ClassVar = {0: "float32", 1: "float16", 30: "bfloat16"}
    """ggml's numbers of the unquantised types."""

    def __init__(self, path: Path) -> None:
        """Opens the file and its parts.

        Raises ModelNotFound if it is missing, UnsupportedModel if it cannot be read or has types of tensors whose grids are missing.
        """
        if not path.is_file():
            raise ModelNotFound(f"{path} is gone: name the model's file again")
        self.tensors = GGUFTensors(path)
        self._files = {file: _core.TensorFile(file) for file in {entry.file for entry in self.tensors.entries.values()}}
        provide_grids((entry.kind for entry in self.tensors.entries.values()), path)
        self._block_types = set(_core.block_types())
        self._pages = FilePages(self._files)
        self._unused = set(self.tensors.entries)

    def take(self, name: str, *shape: int) -> Array:
        """Returns a tensor, dequantised to fp32."""
        self._check(name, shape)
        return self.tensors.values(name).reshape(shape)

    def has(self, name: str, *shape: int) -> bool:
        """Whether the file has a tensor of this name, and of this shape if one is given."""
        return name in self.tensors.entries and (not shape or tuple(self.tensors.entries[name].shape) == shape)

    def part(self, name: str, *shape: int) -> Part:
        """Returns a matrix in the file's type, or in fp32 if the kernels do not support that type or it has a factor."""
        self._check(name, shape)
        entry = self.tensors.entries[name]
        if not self._is_kept(name):
            return in_memory(self.tensors.values(name))
        self._pages.add(entry.file, entry.start, entry.size)
        kind = self.FLOATS.get(entry.kind, str(entry.kind))
        return kind, math.prod(shape[:-1]), (self._files[entry.file], entry.start), self.tensors.interleaved(name)

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of tensors in types that the CPU kernels support, and the fp32 bytes of the others.

        Logs which tensors become larger.
        """
        kept, expanded, types = 0, 0, set()
        for name, entry in self.tensors.entries.items():
            if self._is_kept(name):
                kept += entry.size
            else:
                expanded += 4 * math.prod(entry.shape)
                types.add(self.tensors.type_name(name))
        if expanded:
            log.warning(
                "%s: tensors of type %s are not computed with as they are, and take %s as float32; "
                "a file of type Q4_K_M or Q8_0 takes less",
                self.tensors.path.name,
                ", ".join(sorted(types)),
                gib(expanded),
            )
        return kept, expanded

    def release(self) -> None:
        """Drops the pages of matrices that have been packed, if the file is large."""
        self._pages.drop()

    def finish(self, model: ModelShape) -> None:
        """Raises UnsupportedModel if a tensor was not used."""
        if extra := sorted(name for name in self._unused if not _is_shared(name, model) and _matters(name, model)):
            raise UnsupportedModel(f"{self.tensors.path} has tensors that its metadata does not account for: {_some(extra)}")

    def _is_kept(self, name: str) -> bool:
        kind = self.tensors.entries[name].kind
        return (kind in self.FLOATS or kind in self._block_types) and self.tensors.factor(name) is None

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.tensors.entries.get(name)
        # GGUF files leave out dimensions of 1, and may have a vector in rows.
        same = entry is not None and [size for size in shape if size > 1] == [size for size in entry.shape if size > 1]
        if entry is None or not (same or shape == (math.prod(entry.shape),)):
            found = "missing" if entry is None else list(entry.shape)
            raise UnsupportedModel(f"{self.tensors.path}: tensor {name} is {found} where the configuration asks for {list(shape)}")
        self._unused.discard(name)


def _is_shared(name: str, model: ModelShape) -> bool:
    """Whether a tensor makes keys or values in a layer that uses those of another one."""
    found = re.search(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    if not isinstance(model, ModelConfig) or found is None or int(found[1]) >= model.num_layers:
        return False
    return model.source_of(int(found[1])) != int(found[1])


def _matters(name: str, model: ModelShape) -> bool:
    """Whether a tensor changes results. Encoders have layers for their training after the last one."""
    return not isinstance(model, EncoderConfig) or model.layout.layer.partition("{")[0] in name


def _is_later(name: str, model: ModelShape) -> bool:
    """Whether a tensor is one of the layers after the last, which predict tokens beyond the next one."""
    found = re.search(r"layers\.(\d+)\.", name)
    return isinstance(model, ModelConfig) and found is not None and 0 <= int(found[1]) - model.num_layers < model.later_layers


def _some(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class DummyWeights(Weights):
    """Random tensors of any shape, equal for equal seeds, to benchmark a model without its weights.

    Matrices preserve the scale of their input, and embeddings are large enough that logits are not flat. All tensors are slices of one
    repeated pool of normal numbers, because drawing billions of numbers would take minutes.
    """

    POOL = 1_048_573
    """A prime, so that no matrix has equal rows."""

    def __init__(self, seed: int, norm: float = 1.0) -> None:
        self.norm = norm
        self.pool = np.random.default_rng(seed).standard_normal(self.POOL, dtype=np.float32)
        self._offset = 0

    @staticmethod
    def is_norm(name: str) -> bool:
        """Whether a tensor is the weight of a norm."""
        return re.search(r"(norm|norm_f|ln_\w)\.weight$", name) is not None

    def draw(self, name: str, size: int, columns: int) -> tuple[int, float]:
        """Returns the place in the repeated pool of the next `size` numbers, and the factor of these numbers."""
        start, self._offset = self._offset, (self._offset + size) % self.POOL
        std = 0.1 if name.endswith("bias") else columns**-0.5
        return start, std * 4 if "embed_tokens" in name or "lm_head" in name else std

    def take(self, name: str, *shape: int) -> Array:
        """Returns a random tensor. Biases are small, norms are neutral."""
        if self.is_norm(name):
            # Nothing is added to the norm of a delta rule's heads.
            return np.full(shape, 1.0 if "linear_attn." in name else self.norm, dtype=np.float32)
        size = math.prod(shape)
        start, std = self.draw(name, size, shape[-1])
        return (np.resize(np.roll(self.pool, -start), size) * np.float32(std)).reshape(shape)

    def has(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of this name: random weights have all of any shape but blocks of MXFP4."""
        return not name.endswith(MXFP4_BLOCKS)

    def part(self, name: str, *shape: int) -> Part:
        """Returns a random matrix for the CPU kernels."""
        return in_memory(self.take(name, *shape))

    def finish(self, model: ModelShape) -> None:
        """Does nothing: no tensor can be left over."""
