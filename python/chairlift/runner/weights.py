"""Loads a model's tensors from safetensors or GGUF files, or generates them from a seed."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from chairlift import _core
from chairlift.checkpoint.gguf import LINK, GGUFTensors
from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner.memory.decision import gib

log = logging.getLogger("chairlift")

READABLE = {torch.float32, torch.bfloat16, torch.float16}
NEEDLESS = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""Suffixes of tensors that a model may ignore: old tables of rotary angles, and scales of a KV cache that is not in 8 bits."""


Part = tuple[str, int, NDArray[np.uint8] | tuple[_core.TensorFile, int], int]
"""A matrix as `_core.Linear` takes it.

Its fields are its dtype, its rows, its bytes or their position in a file, and the rows of a head whose rotary halves alternate, else 0.
"""


class SafetensorWeights:
    """The tensors of a directory's *.safetensors files, which are memory-mapped: tensors that are not used are not read."""

    def __init__(self, directory: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        """Opens model.safetensors, or the files that model.safetensors.index.json names."""
        self.directory, self.dtype, self.device = directory, dtype, device
        self.files: dict[str, Any] = {}
        for path in _files(directory):
            opened = _opened(path)
            self.files.update(dict.fromkeys(opened.keys(), opened))
        self.left = set(self.files)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of that name on the model's device, in the model's dtype, or in the file's dtype if the model has none.

        Raises UnsupportedModel if the tensor is missing or has another shape.
        """
        if name not in self.files:
            raise UnsupportedModel(f"{self.directory} has no tensor {name}: its weights do not belong to its config.json")
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        if tensor.shape != shape:
            raise UnsupportedModel(f"tensor {name} is {list(tensor.shape)} where config.json asks for {list(shape)}")
        if tensor.dtype not in READABLE:
            raise UnsupportedModel(f"tensor {name} is {tensor.dtype} (supported: float32, bfloat16, float16)")
        self.left.discard(name)
        return tensor.to(self.device, self.dtype or tensor.dtype)

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """Returns the scales of that name, fp32 [heads]; None if the checkpoint has none. A single scale applies to all heads.

        Raises UnsupportedModel if their number or a value is invalid.
        """
        if name not in self.files:
            return None
        found: torch.Tensor = self.files[name].get_tensor(name).flatten().to(self.device, torch.float32)
        if len(found) not in (1, heads) or not (found > 0).all():
            raise UnsupportedModel(f"tensor {name} must have a positive number, or one for each of {heads} KV heads")
        return found.expand(heads).contiguous()

    def part(self, name: str, rows: int, ins: int) -> Part:
        """Returns a matrix [rows, ins] in the checkpoint's dtype, for the CPU kernels."""
        return in_memory(self.take(name, rows, ins))

    def finish(self, model: ModelConfig) -> None:
        """Raises UnsupportedModel if a tensor was not used, except a tied head and the tensors of NEEDLESS."""
        ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
        extra = sorted(name for name in self.left - ignored if not name.endswith(NEEDLESS))
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise UnsupportedModel(f"{self.directory} has tensors that its config.json does not account for: {', '.join(extra[:3])}{more}")


def in_memory(tensor: torch.Tensor) -> Part:
    """Returns a tensor's rows for the CPU kernels."""
    rows, kind = len(tensor), str(tensor.dtype).removeprefix("torch.")
    return kind, rows, tensor.contiguous().view(-1).view(torch.uint8).numpy(), 0


def open_weights(
    config: EngineConfig, directory: Path, dtype: torch.dtype | None, device: torch.device, norm: float = 1.0
) -> SafetensorWeights | GGUFWeights | DummyWeights:
    """Opens the weights that the settings select: the directory's, or random ones, which are fp32 if `dtype` is None.

    `norm` is the value of a neutral norm weight in a checkpoint of this model.
    """
    if config.load_format == "dummy":
        return DummyWeights(config.seed, dtype or torch.float32, device, norm)
    if (directory / LINK).is_symlink():
        return GGUFWeights(directory / LINK, dtype, device)
    return SafetensorWeights(directory, dtype, device)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path} cannot be read as safetensors ({error}): is the download complete?") from None


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UnsupportedModel(f"{index} is not an index of safetensors files") from None
        paths = [directory / name for name in names]
        for path in paths:
            if not path.exists():
                raise ModelNotFound(f"{path} is missing, though {index.name} names it: is the download complete?")
        return paths
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelNotFound(f"{directory} holds no *.safetensors file: convert the weights to safetensors, or use --load-format dummy")
    return paths


class GGUFWeights:
    """The tensors of a GGUF file, read from the file when they are taken."""

    FLOATS: ClassVar = {0: "float32", 1: "float16", 30: "bfloat16"}
    """ggml's numbers of the unquantised types."""

    def __init__(self, link: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        """Opens the file that `link` points to. Raises ModelNotFound if it is missing, UnsupportedModel if it cannot be read."""
        path = link.resolve()
        if not path.is_file():
            raise ModelNotFound(f"{path} is gone, though {link.parent} was made of it: name the model's file again")
        self.dtype, self.device = dtype, device
        self.tensors = GGUFTensors(path)
        self._file = _core.TensorFile(path)
        self._block_types = set(_core.block_types())

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of that name, dequantised, in fp32 if the model has no dtype.

        Raises UnsupportedModel if it has another shape.
        """
        self._check(name, shape)
        return torch.from_numpy(self.tensors.values(name)).to(self.device, self.dtype)

    def scales(self, name: str, heads: int) -> None:
        """Returns None: GGUF files have no scales."""

    def part(self, name: str, rows: int, ins: int) -> Part:
        """Returns a matrix [rows, ins] for the CPU kernels: in the file's type, or in fp32 if the kernels do not support that type."""
        self._check(name, (rows, ins))
        entry = self.tensors.entries[name]
        if not self._is_kept(entry.kind):
            return in_memory(torch.from_numpy(self.tensors.values(name)))
        kind = self.FLOATS.get(entry.kind, str(entry.kind))
        return kind, rows, (self._file, entry.start), self.tensors.interleaved(name)

    def sizes(self) -> tuple[int, int, list[str]]:
        """Returns the bytes of tensors in types that the CPU kernels support, the fp32 bytes of the others, and the types of the others."""
        kept, expanded, types = 0, 0, set()
        for name, entry in self.tensors.entries.items():
            if self._is_kept(entry.kind):
                kept += entry.size
            else:
                expanded += 4 * math.prod(entry.shape)
                types.add(self.tensors.type_name(name))
        return kept, expanded, sorted(types)

    def finish(self, model: ModelConfig) -> None:
        """Does nothing: the file's tensors were matched with its configuration when it was opened."""

    def _is_kept(self, kind: int) -> bool:
        return kind in self.FLOATS or kind in self._block_types

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.tensors.entries.get(name)
        if entry is None or entry.shape != shape:
            found = "missing" if entry is None else list(entry.shape)
            raise UnsupportedModel(f"{self.tensors.path}: tensor {name} is {found} where the configuration asks for {list(shape)}")


def gguf_sizes(directory: Path) -> tuple[int, int]:
    """Returns the bytes of a GGUF file's tensors in types that the CPU kernels support, and the fp32 bytes of the others.

    Both are 0 for other models. Logs which tensors become larger, before they are read.
    """
    if not (directory / LINK).is_symlink():
        return 0, 0
    weights = GGUFWeights(directory / LINK, None, torch.device("cpu"))
    kept, expanded, types = weights.sizes()
    if expanded:
        log.warning(
            "%s: tensors of type %s are not computed with as they are, and take %s as float32; a file of type Q4_K_M or Q8_0 takes less",
            weights.tensors.path.name,
            ", ".join(types),
            gib(expanded),
        )
    return kept, expanded


class DummyWeights:
    """Random tensors of any shape, equal for equal seeds, to benchmark a model without its weights.

    Matrices preserve the scale of their input, and embeddings are large enough that logits are not flat. All tensors are slices of one
    repeated pool of normal numbers, because drawing billions of numbers would take minutes.
    """

    POOL = 1_048_573
    """A prime, so that no matrix has equal rows."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, norm: float = 1.0) -> None:
        self.dtype, self.device, self.norm = dtype, device, norm
        self.pool = torch.randn(self.POOL, generator=torch.Generator().manual_seed(seed))
        self.offset = 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a random tensor. Biases are small, norms are neutral."""
        if name.endswith("norm.weight"):
            return torch.full(shape, self.norm, dtype=self.dtype, device=self.device)
        size = math.prod(shape)
        std = 0.1 if name.endswith("bias") else shape[-1] ** -0.5
        if "embed_tokens" in name or "lm_head" in name:
            std *= 4
        start, self.offset = self.offset, (self.offset + size) % self.POOL
        repeats = -(-(start + size) // self.POOL)
        pool = (self.pool * std).to(self.device, self.dtype)
        # A copy does not keep the rest of the pool in memory.
        drawn: torch.Tensor = pool.repeat(repeats)[start : start + size].clone().view(shape)
        return drawn

    def scales(self, name: str, heads: int) -> None:
        """Returns None: random weights have no scales."""

    def part(self, name: str, rows: int, ins: int) -> Part:
        """Returns a random matrix for the CPU kernels."""
        return in_memory(self.take(name, rows, ins))

    def finish(self, model: ModelConfig) -> None:
        """Does nothing: no tensor can be left over."""
