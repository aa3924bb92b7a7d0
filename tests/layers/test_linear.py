import pytest
import torch

from chairlift.layers.linear import Linear, quantise

ROWS, OUTS, INS = 5, 37, 50
"""Sides that are odd in every way."""


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, a weight whose rows differ in size by ten thousand, and a bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(ROWS, INS, generator=generator), torch.randn(OUTS, INS, generator=generator)
    return x.to(dtype), (weight * torch.logspace(-2, 2, OUTS)[:, None]).to(dtype), torch.randn(OUTS, generator=generator).to(dtype)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_each_row_is_rounded_to_its_own_scale(form):
    _, weight, _ = matrices(torch.float32)
    weight[3] = 0
    numbers, scale = quantise(weight, form)
    assert numbers.element_size() == 1
    assert scale.shape == (OUTS, 1)
    error = (numbers.float() * scale - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    # Half of a step of 1/127 of the largest; or of the 3 bits of a mantissa, and no less than half of the smallest number.
    bound = largest / 254 if form == "int8" else torch.maximum(weight.abs() / 16, largest / 448 / 1024)
    assert (error <= bound * 1.001).all()
    assert torch.equal(numbers.float().abs().amax(1) == 0, largest.flatten() == 0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_int8_is_the_product_with_what_the_weight_was_rounded_to(dtype, rounding, biased):
    x, weight, bias = matrices(dtype)
    linear = Linear(weight, bias if biased else None, "int8")
    numbers, scale = quantise(weight, "int8")
    expected = x.double() @ (numbers.double() * scale.double()).T + (bias.double() if biased else 0)
    found = linear(x)
    assert found.dtype == dtype
    assert ((found - expected).norm(dim=0) <= rounding * expected.norm(dim=0)).all()
    # All of it is in 8 bits, but for a scale of 4 bytes for each output.
    assert linear.weight.nbytes + linear.scale.nbytes == OUTS * INS + 4 * OUTS


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_fp8_rounds_activations_row_by_row_too(dtype, rounding, biased):
    x, weight, bias = matrices(dtype)
    x = x * torch.logspace(-3, 3, ROWS)[:, None].to(dtype)
    found = Linear(weight, bias if biased else None, "fp8")(x)
    (a, a_scale), (b, b_scale) = quantise(x, "fp8"), quantise(weight, "fp8")
    expected = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).T + (bias.double() if biased else 0)
    assert found.dtype == dtype
    assert ((found - expected).norm(dim=0) <= rounding * expected.norm(dim=0)).all()
    whole = x.double() @ weight.double().T
    assert ((expected - (bias.double() if biased else 0) - whole).norm(dim=1) <= 0.2 * whole.norm(dim=1)).all()


def test_a_row_of_activations_is_rounded_alike_whoever_is_beside_it():
    x, weight, _ = matrices(torch.float32)
    linear = Linear(weight, None, "fp8")
    louder = torch.cat((x[:3], 1e4 * x[3:]))
    for other in (linear(louder)[2], linear(x[2:3])[0]):
        assert (other - linear(x)[2]).norm() <= 1e-5 * other.norm()
