"""A checkpoint's tensors in torch, on the model's device."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch

from chairlift.checkpoint.safetensors_file import DTYPES, Array
from chairlift.config import EngineConfig
from chairlift.layers.linear import Quantised, Weight
from chairlift.models.quantization import QuantizationScheme
from chairlift.runner.quantised_matrix import QuantisedMatrix
from chairlift.runner.uploads import Uploads
from chairlift.runner.weights import DummyWeights, Weights, open_weights


class TorchWeights:
    """A `WeightSource` that converts tensors to the model's dtype and moves them to its device."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, uploads: Uploads | None = None) -> None:
        """`uploads` copies to the device, by default to a CUDA device alone."""
        self.weights, self.dtype, self.device = weights, dtype, device
        self._uploads = Uploads(device) if uploads is None and device.type == "cuda" else uploads

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor. Raises UnsupportedModel if it is missing or has another shape."""
        return self._read(name, shape).to(self.dtype)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor in fp32. Raises UnsupportedModel as `take` does."""
        return self._read(name, shape).float()

    def packed(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor of bytes. Raises UnsupportedModel as `take` does."""
        return self._sent(self.weights.packed(name, *shape))

    def has(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of this name, and of this shape if one is given."""
        return self.weights.has(name, *shape)

    def matrix(self, layer: str, outs: int, ins: int) -> Weight:
        """Returns the weight of a linear layer. A quantised one keeps its dtypes. Raises UnsupportedModel as `take` does."""
        if not self.weights.is_quantised(layer):
            return self.take(f"{layer}.weight", outs, ins)
        found = self.weights.matrix(layer, outs, ins)
        assert isinstance(found, QuantisedMatrix)
        numbers, scale = self._sent(found.numbers), self._sent(found.scale)
        if found.zero is None:
            return Quantised(numbers.view(torch.float8_e4m3fn), scale, None, found.group)
        order = None if found.order is None else self._sent(found.order)
        return Quantised(numbers, scale, self._sent(found.zero), found.group, order)

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """Returns the scales of KV heads, fp32 [heads]; None if the checkpoint has none. Raises UnsupportedModel."""
        scales = self.weights.scales(name, heads)
        return None if scales is None else torch.from_numpy(scales).to(self.device)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the checkpoint's dtype, read from its file to the device if a file has it so."""
        if self._uploads is None or (found := self.weights.find(name, *shape)) is None:
            return self._sent(self.weights.take(name, *shape))
        file, stored = found
        entry = file.tensors[stored]
        dtype: torch.dtype = getattr(torch, DTYPES[entry.dtype][0])
        return self._uploads.copy(entry.size, partial(file.read, stored)).view(dtype).view(shape)

    def _sent(self, array: Array) -> torch.Tensor:
        """An array of the host on the device."""
        tensor = _as_tensor(array)
        if self._uploads is None:
            return tensor
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

        def read(view: memoryview, at: int) -> None:
            view[:] = octets.data[at : at + len(view)]

        return self._uploads.copy(len(octets), read).view(tensor.dtype).view(tensor.shape)


class TorchDummyWeights(TorchWeights):
    """Random tensors, made on the device: large ones would take minutes on the host."""

    def __init__(self, dummy: DummyWeights, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dummy, dtype, device)
        self._dummy = dummy
        self._pool = torch.from_numpy(dummy.pool).to(device)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a random tensor."""
        if self._dummy.is_norm(name):
            return super().take(name, *shape)
        size = math.prod(shape)
        start, std = self._dummy.draw(name, size, shape[-1])
        repeats = -(-(start + size) // DummyWeights.POOL)
        # A copy does not keep the rest of the pool in memory.
        drawn: torch.Tensor = (self._pool * std).to(self.dtype).repeat(repeats)[start : start + size].clone().view(shape)
        return drawn

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a random tensor in fp32."""
        return self.take(name, *shape).float()


def _as_tensor(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def open_torch_weights(
    config: EngineConfig,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    norm: float = 1.0,
    scheme: QuantizationScheme | None = None,
) -> TorchWeights:
    """Opens the weights that the settings select (see `open_weights`)."""
    weights = open_weights(config, directory, norm, scheme)
    return TorchDummyWeights(weights, dtype, device) if isinstance(weights, DummyWeights) else TorchWeights(weights, dtype, device)
