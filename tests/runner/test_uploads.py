"""Weights go to a device through page-locked buffers. The device of these tests copies as late as it may."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chairlift.errors import UnsupportedModel
from chairlift.models.quantization import parse_quantization
from chairlift.runner import uploads
from chairlift.runner.torch_weights import TorchWeights
from chairlift.runner.uploads import Uploads
from chairlift.runner.weights import SafetensorWeights

CPU = torch.device("cpu")


class LateDevice:
    """Copies when a test or the code waits for a copy, or at the end."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.copies = 0

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> "LateCopy":
        self.waiting.append(lambda: target.copy_(source))
        self.copies += 1
        return LateCopy(self, self.copies)

    def finish(self, count: int | None = None) -> None:
        done = self.copies - len(self.waiting)
        for _ in range(len(self.waiting) if count is None else count - done):
            self.waiting.pop(0)()


class LateCopy:
    def __init__(self, device: LateDevice, number: int) -> None:
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.finish(self._number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    monkeypatch.setattr(uploads, "PIECE", 64)
    return LateDevice()


def reader(data: bytes) -> uploads.Read:
    def read(view: memoryview, at: int) -> None:
        view[:] = data[at : at + len(view)]

    return read


@pytest.mark.parametrize("size", [1, 64, 65, 64 * uploads.BUFFERS, 5000])
def test_no_buffer_is_filled_again_before_the_device_has_taken_what_is_in_it(size: int, device: LateDevice) -> None:
    sent, random = Uploads(CPU, device.start_copy), np.random.default_rng(size)
    tensors = [random.bytes(size) for _ in range(3)]
    found = [sent.copy(size, reader(data)) for data in tensors]
    # The last copies are still to come: nothing waited for them.
    assert 0 < len(device.waiting) <= uploads.BUFFERS
    device.finish()
    assert [tensor.numpy().tobytes() for tensor in found] == tensors


def test_several_threads_read_at_once(device: LateDevice) -> None:
    together = threading.Barrier(uploads.READERS)

    def read(view: memoryview, at: int) -> None:
        together.wait(timeout=60)  # passes once all of them are here

    Uploads(CPU, device.start_copy).copy(64 * uploads.READERS, read)
    assert device.copies == uploads.READERS


def test_an_error_of_a_reader_is_raised_when_no_thread_reads_any_more(device: LateDevice) -> None:
    reading, sent = [], Uploads(CPU, device.start_copy)

    def read(view: memoryview, at: int) -> None:
        if at == 64:
            raise UnsupportedModel("shorter")
        reading.append(at)

    with pytest.raises(UnsupportedModel, match="shorter"):
        sent.copy(64 * uploads.BUFFERS, read)
    assert len(reading) == uploads.BUFFERS - 1
    assert sent.copy(3, reader(b"abc")).shape == (3,)


def test_weights_on_a_device_are_those_of_the_files(tmp_path: Path, device: LateDevice) -> None:
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    tensors = {str(kind): torch.randn(37, 48).to(kind) for kind in kinds}
    numbers = torch.randn(37, 48).to(torch.float8_e4m3fn)
    tensors |= {"layer.weight": numbers, "layer.weight_scale": torch.rand(37, 1), "codes": torch.arange(99, dtype=torch.uint8)}
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": scheme}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    files, sent = SafetensorWeights(tmp_path, parse_quantization(config)), Uploads(CPU, device.start_copy)
    found = {str(kind): TorchWeights(files, kind, CPU, sent).take(str(kind), 37, 48) for kind in kinds}
    weights = TorchWeights(files, torch.float32, CPU, sent)
    matrix = weights.matrix("layer", 37, 48)
    found |= {"layer.weight": matrix.numbers, "layer.weight_scale": matrix.scale, "codes": weights.packed("codes", 99)}
    device.finish()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    # The error names a file that lost its end.
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UnsupportedModel, match=r"cannot be read as safetensors .*became shorter"):
        weights.take("torch.float32", 37, 48)
