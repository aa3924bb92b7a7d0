"""Linear layers in 8 bits: the kernels beside torch."""

import pytest
import torch
from interpreted import DTYPES, assert_close

from chairlift.kernels.int8_linear import MAX_ROWS, int8_linear
from chairlift.kernels.quantise_rows import quantise_rows
from chairlift.layers.linear import MIN_ABSMAX, quantise


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 37, 50), (17, 32, 256), (MAX_ROWS, 70, 130), (0, 8, 16)])
def test_int8_is_the_product_with_the_weight_multiplied_out(rows, outs, ins, dtype, biased):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, ins, generator=generator).to(dtype), torch.randn(outs, ins, generator=generator)
    numbers, scale = quantise(weight * torch.logspace(-2, 2, outs)[:, None], "int8")
    bias = torch.randn(outs, generator=generator).to(dtype) if biased else None
    expected = x.double() @ (numbers.double() * scale.double()).T + (0 if bias is None else bias.double())
    if rows:
        assert_close(int8_linear(x, numbers, scale, bias), expected.to(dtype))


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
