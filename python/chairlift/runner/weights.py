"""Where a model's tensors come from: safetensors files, or a seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from chairlift.checkpoint.gguf import BLOCKS_FILE
from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models.config import ModelConfig

READABLE = {torch.float32, torch.bfloat16, torch.float16}
NEEDLESS = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""How the names end of what a model may do without: old tables of rotary angles, and scales of a KV cache that is not in 8 bits."""


class SafetensorWeights:
    """The tensors of a directory's *.safetensors files, mapped rather than read: what is never touched costs nothing."""

    def __init__(self, directory: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        """Opens model.safetensors, or the files that model.safetensors.index.json names."""
        self.directory, self.dtype, self.device = directory, dtype, device
        self.files: dict[str, Any] = {}
        for path in _files(directory):
            opened = _opened(path)
            self.files.update(dict.fromkeys(opened.keys(), opened))
        self.block_file = _opened(directory / BLOCKS_FILE) if (directory / BLOCKS_FILE).exists() else None
        self.block_types: dict[str, str] = (self.block_file.metadata() or {}) if self.block_file else {}
        self.left = set(self.files)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name on the device of the model, in its dtype if it has one, and as it is otherwise.

        Raises UnsupportedModel if it is missing or misshapen.
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
        """The scales of that name, fp32 [heads], of which the checkpoint may have one for all; None if it has none.

        Raises UnsupportedModel if they are not so many, or none.
        """
        if name not in self.files:
            return None
        found: torch.Tensor = self.files[name].get_tensor(name).flatten().to(self.device, torch.float32)
        if len(found) not in (1, heads) or not (found > 0).all():
            raise UnsupportedModel(f"tensor {name} must have a positive number, or one for each of {heads} KV heads")
        return found.expand(heads).contiguous()

    def blocks(self, name: str, rows: int) -> tuple[str, np.ndarray[Any, np.dtype[np.uint8]]] | None:
        """The tensor's blocks [rows, bytes] as a GGUF file had them, after the number of their ggml type; None if it has none."""
        if self.block_file is None or name not in self.block_types:
            return None
        self.left.discard(name)
        blocks = self.block_file.get_tensor(name).numpy()
        if len(blocks) != rows:
            raise UnsupportedModel(f"tensor {name} has blocks of {len(blocks)} rows where config.json asks for {rows}")
        return self.block_types[name], blocks

    def finish(self, model: ModelConfig) -> None:
        """Raises UnsupportedModel if there are tensors that nobody took, but for a tied head and what is NEEDLESS."""
        ignored = {"lm_head.weight"} if model.tie_word_embeddings else set()
        extra = sorted(name for name in self.left - ignored if not name.endswith(NEEDLESS))
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise UnsupportedModel(f"{self.directory} has tensors that its config.json does not account for: {', '.join(extra[:3])}{more}")


def open_weights(
    config: EngineConfig, directory: Path, dtype: torch.dtype | None, device: torch.device, norm: float = 1.0
) -> SafetensorWeights | DummyWeights:
    """The weights that the settings ask for: those of the directory, or random ones, which are fp32 where no dtype is named.

    `norm` is how a checkpoint of this model has a norm that changes nothing.
    """
    if config.load_format == "dummy":
        return DummyWeights(config.seed, dtype or torch.float32, device, norm)
    return SafetensorWeights(directory, dtype, device)


def blocks_kept(directory: Path) -> tuple[int, int]:
    """Bytes of a GGUF file's blocks, and of the fp32 that its other tensors became; both 0 if no blocks were kept."""
    path = directory / BLOCKS_FILE
    if not path.exists():
        return 0, 0
    kept = set(_opened(path).keys())
    tensors = {name: opened for opened in map(_opened, _files(directory)) for name in opened.keys()}  # noqa: SIM118, it is no dict
    rest = sum(math.prod(opened.get_slice(name).get_shape()) for name, opened in tensors.items() if name not in kept)
    return path.stat().st_size, 4 * rest


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


class DummyWeights:
    """Random tensors of any shape, equal for equal seeds: to measure a model whose weights are not at hand.

    Matrices keep the scale of what they multiply, and embeddings are large enough that logits are not flat. All come from one
    pool of normal numbers, repeated: drawing billions of them would take minutes.
    """

    POOL = 1_048_573
    """A prime, so that no matrix has equal rows."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, norm: float = 1.0) -> None:
        self.dtype, self.device, self.norm = dtype, device, norm
        self.pool = torch.randn(self.POOL, generator=torch.Generator().manual_seed(seed))
        self.offset = 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A random tensor, small for biases; norms change nothing."""
        if name.endswith("norm.weight"):
            return torch.full(shape, self.norm, dtype=self.dtype, device=self.device)
        size = math.prod(shape)
        std = 0.1 if name.endswith("bias") else shape[-1] ** -0.5
        if "embed_tokens" in name or "lm_head" in name:
            std *= 4
        start, self.offset = self.offset, (self.offset + size) % self.POOL
        repeats = -(-(start + size) // self.POOL)
        pool = (self.pool * std).to(self.device, self.dtype)
        # A copy, which does not keep what is before and behind it.
        drawn: torch.Tensor = pool.repeat(repeats)[start : start + size].clone().view(shape)
        return drawn

    def scales(self, name: str, heads: int) -> None:
        """There are none."""

    def blocks(self, name: str, rows: int) -> None:
        """There are none."""

    def finish(self, model: ModelConfig) -> None:
        """Nothing can be left over."""
