"""The launches of a decoder layer on a GPU, counted on tensors without memory or device."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import numpy as np
import pytest
import tiny_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not made for this platform")

from chairlift.kernels import fp8_linear, launch_settings
from chairlift.layers.device_attention import DevicePlan, Work
from chairlift.layers.linear import Linear, Quantised, Rounded, Weight
from chairlift.models.config import load_shape
from chairlift.models.forward_batch import ForwardBatch
from chairlift.models.llama import Llama

KERNELS = (
    "act_mul",
    "fp8_linear",
    "paged_combine",
    "paged_decode",
    "paged_prefill",
    "quantise_rows",
    "quantised_linear",
    "rms_norm",
    "rope_write",
)
FREE = {"view", "_unsafe_view", "slice", "t", "transpose", "split", "split_with_sizes", "unsqueeze", "select", "detach"}
FREE |= {"device", "empty", "new_empty", "empty_like"}
"""Operations of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts launches by name: our kernels, which do not run, and torch's operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        limits = launch_settings.INTERPRETER
        monkeypatch.setattr(launch_settings, "device_limits", lambda device: limits)
        for name in KERNELS:
            module = import_module(f"chairlift.kernels.{name}")
            if hasattr(module, "device_limits"):
                monkeypatch.setattr(module, "device_limits", lambda device: limits)
            monkeypatch.setattr(module, f"_{name}_kernel", self.silent(name))

    def silent(self, name: str) -> object:
        counts = self.counts

        class Silent:
            def __getitem__(self, grid: object) -> object:
                return lambda *args, **kwargs: counts.update([name])

        return Silent()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.counts[name] += 1
        if name == "_scaled_mm":
            # The last argument, `use_fast_accum`, without which the product is much slower.
            assert args[-1] is True
        return func(*args, **(kwargs or {}))


class Empty:
    """Weights without numbers, of 16 bits or of 4, whose groups may be scattered."""

    def __init__(self, packed: bool = False, scattered: bool = False) -> None:
        self.packed, self.scattered = packed, scattered

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def matrix(self, layer: str, outs: int, ins: int) -> Weight:
        if not self.packed:
            return self.take(layer, outs, ins)
        numbers = torch.empty(outs, ins // 2, dtype=torch.uint8, device="cuda")
        scale = torch.empty(outs, ins // 16, dtype=torch.float16, device="cuda")
        order = torch.empty(ins, dtype=torch.int64, device="cuda") if self.scattered else None
        return Quantised(numbers, scale, scale.to(torch.uint8), 16, order)

    def scales(self, name: str, heads: int) -> None:
        return None


def layer(
    directory: object,
    monkeypatch: pytest.MonkeyPatch,
    *,
    split: bool = False,
    quantization: str | None = None,
    packed: bool = False,
    scattered: bool = False,
) -> Counter[str]:
    """The launches of one more layer, in a decode step of four sequences, with contexts of one split or of several."""
    model = load_shape(directory, in_torch=True)
    found = []
    with FakeTensorMode():
        network = Llama(model, Empty(packed, scattered), quantization=quantization)
        ints = torch.empty(64, dtype=torch.int32, device="cuda")
        lengths = np.arange(5, dtype=np.int32), np.full(4, 9, dtype=np.int32)
        work = Work(ints, 8, 4 * split, 8 * split, 1)
        caches = [torch.empty(8, spec.kv_heads, 16, spec.head_dim, dtype=torch.bfloat16, device="cuda") for spec in model.kv_specs]
        layers = list(network.layers)
        for count in (1, 2):
            network.layers = layers[-count:]
            plan = DevicePlan(ints[:4], ints[:5], ints[:4], ints[:4], ints.view(8, 8), lengths, {None: work})
            with Launches(monkeypatch) as launches:
                network.forward(ForwardBatch(ints[:4], ints[:4], plan), list(zip(caches, caches, strict=True)))
            found.append(launches.counts)
    return found[1] - found[0]


@pytest.mark.parametrize("split", [False, True])
def test_a_decode_layer_is_four_products_and_six_kernels(split, tmp_path, monkeypatch):
    tiny_models.write("llama", tmp_path)
    found = layer(tmp_path, monkeypatch, split=split)
    expected = {"mm": 4, "rope_write": 1, "paged_decode": 1, "rms_norm": 2, "act_mul": 1}
    assert found == expected | ({"paged_combine": 1} if split else {})


def test_a_layer_in_8_bits_rounds_the_activations_of_attention_alone_and_copies_no_weight(tmp_path, monkeypatch):
    tiny_models.write("llama", tmp_path)
    rest = {"rope_write": 1, "paged_decode": 1, "rms_norm": 2, "act_mul": 1}
    assert layer(tmp_path, monkeypatch, quantization="int8") == rest | {"quantised_linear": 4}
    # Norms and the activation round what they write. The products take their operands as they are.
    assert layer(tmp_path, monkeypatch, quantization="fp8") == rest | {"quantise_rows": 1, "fp8_linear": 4}
    # A checkpoint of 4 bits is not multiplied out either.
    assert layer(tmp_path, monkeypatch, packed=True) == rest | {"quantised_linear": 4}
    # Tensors without numbers cannot be compared.
    monkeypatch.setattr(torch, "equal", lambda one, other: one.shape == other.shape)
    # The columns of its input are gathered if its groups are scattered, in one more launch for each product.
    assert layer(tmp_path, monkeypatch, packed=True, scattered=True) == rest | {"quantised_linear": 4, "index_select": 4}


def test_more_rows_in_fp8_are_one_product_of_torch(monkeypatch):
    rows = fp8_linear.MAX_ROWS + 1
    with FakeTensorMode():
        numbers, scale = torch.empty(512, 256, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(512, 1, device="cuda")
        layer = Linear(Quantised(numbers, scale), rounds_activations=True)
        with Launches(monkeypatch) as launches:
            layer(Rounded(numbers[:rows], scale[:rows], torch.bfloat16))
    assert {name: count for name, count in launches.counts.items() if count} == {"_scaled_mm": 1}
