"""Linear layers with quantised weights: the kernels beside torch."""

import pytest
import torch
from interpreted import DTYPES, assert_close

from chairlift.kernels import fp8_linear as in_fp8
from chairlift.kernels import launch_settings
from chairlift.kernels.dequantise import dequantise
from chairlift.kernels.fp8_linear import fp8_linear
from chairlift.kernels.quantise_rows import quantise_rows
from chairlift.kernels.quantised_linear import MAX_ROWS, counters, quantised_linear
from chairlift.layers import linear
from chairlift.layers.linear import MIN_ABSMAX, Quantised, quantise

WEIGHTS = ("int8", "fp8", "fp8 in blocks", "int4", "int4 by row")
SHAPES = [(1, 37, 50), (17, 32, 256), (MAX_ROWS, 70, 130), (3, 40, 320), (0, 8, 16)]
"""Rows, outputs and inputs. No side is a multiple of a tile's in some of them."""
LIMITS = launch_settings.INTERPRETER._replace(multiprocessors=2)
"""Of a device on which up to four programs sum parts of a product, if its inputs are several tiles."""


def draw(kind: str, outs: int, ins: int) -> Quantised:
    """A weight with all numbers of its kind, subnormal ones too, and rows that differ in size by a thousand."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 0, outs)[:, None]
    if kind == "int8":
        return quantise(torch.randn(outs, ins, generator=generator) * sizes, "int8")
    group = {"fp8": 0, "fp8 in blocks": 128, "int4": 32, "int4 by row": 0, "int4 of 16": 16}[kind]
    groups = -(-ins // group) if group else 1
    scale = sizes * (0.5 + torch.rand(outs, groups, generator=generator))
    numbers = torch.randint(0, 256, (outs, ins), generator=generator, dtype=torch.uint8)
    if kind.startswith("fp8"):
        numbers[numbers & 0x7F == 0x7F] = 0  # NaN
        return Quantised(numbers.view(torch.float8_e4m3fn), scale, None, group)
    zero = torch.randint(0, 16, (outs, groups), generator=generator, dtype=torch.uint8)
    return Quantised(numbers[:, : ins // 2].contiguous(), scale.half(), zero, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outs", "ins", "kind"), [*((*shape, kind) for shape in SHAPES for kind in WEIGHTS), (3, 40, 72, "int4 of 16")]
)
def test_a_product_is_that_with_the_weight_multiplied_out(rows, outs, ins, kind, dtype, monkeypatch):
    monkeypatch.setattr("chairlift.kernels.quantised_linear.device_limits", lambda device: LIMITS)
    weight = draw(kind, outs, ins)
    whole = linear.dequantise(weight, torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(rows, ins, generator=generator).to(dtype), torch.randn(outs, generator=generator).to(dtype)
    arrived = counters(weight.numbers)
    for offset in (None, bias):
        expected = x.double() @ whole.T + (0 if offset is None else offset.double())
        if rows:
            assert_close(quantised_linear(x, *weight.stored, offset, arrived), expected.to(dtype))
            # As it was before, for the next launch.
            assert not arrived.any()


@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 48, 64), (17, 32, 256), (in_fp8.MAX_ROWS, 80, 144)])
def test_a_product_in_fp8_is_that_of_the_same_numbers_in_fp32(rows, outs, ins):
    weight, x = draw("fp8", outs, ins), quantise(torch.randn(rows, ins, generator=torch.Generator().manual_seed(1)), "fp8")
    bias = torch.randn(outs)
    for offset in (None, bias):
        expected = linear.dequantise(x, torch.float64) @ linear.dequantise(weight, torch.float64).T + (0 if offset is None else bias)
        found = fp8_linear(x.numbers, x.scale, weight.numbers, weight.scale, offset, torch.float32)
        assert_close(found, expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_is_multiplied_out_as_torch_does(kind, dtype):
    for outs, ins in ((37, 50), (32, 256), (33, 320)):
        weight = draw(kind, outs, ins)
        assert torch.equal(dequantise(*weight.stored, ins, dtype), linear.dequantise(weight, dtype))


@pytest.mark.parametrize("columns", [7, 64, 300])
def test_rows_are_rounded_as_torch_does(columns):
    # Numbers of 8 bits, because the interpreter rounds to 8 bits wrongly, times the scale that each row will have.
    drawn = torch.randn(5, columns).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    drawn[:, 0] = 448
    x = drawn * torch.tensor([1.0, 2.0**-9, 2.0**5, 0.0, 1.0])[:, None]
    numbers, scale = quantise_rows(x, MIN_ABSMAX)
    expected = quantise(x, "fp8")
    assert torch.equal(scale, expected.scale)
    assert torch.equal(numbers.float(), expected.numbers.float())
    assert torch.equal(numbers.float() * scale, x)
