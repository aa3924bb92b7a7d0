import pytest
import torch

from chairlift.layers.linear import Linear, Quantised, dequantise, multiplied_out, quantise, stack, take_rows

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
    numbers, scale, *_ = quantise(weight, form)
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
    linear = Linear(quantise(weight, "int8"), bias if biased else None)
    numbers, scale, *_ = quantise(weight, "int8")
    expected = x.double() @ (numbers.double() * scale.double()).T + (bias.double() if biased else 0)
    found = linear(x)
    assert found.dtype == dtype
    assert ((found - expected).norm(dim=0) <= rounding * expected.norm(dim=0)).all()
    # All of it is in 8 bits, but for a scale of 4 bytes for each output.
    assert linear.weight.numbers.nbytes + linear.weight.scale.nbytes == OUTS * INS + 4 * OUTS


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_fp8_rounds_activations_row_by_row_too(dtype, rounding, biased):
    x, weight, bias = matrices(dtype)
    x = x * torch.logspace(-3, 3, ROWS)[:, None].to(dtype)
    found = Linear(quantise(weight, "fp8"), bias if biased else None, rounds_activations=True)(x)
    (a, a_scale, *_), (b, b_scale, *_) = quantise(x, "fp8"), quantise(weight, "fp8")
    expected = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).T + (bias.double() if biased else 0)
    assert found.dtype == dtype
    assert ((found - expected).norm(dim=0) <= rounding * expected.norm(dim=0)).all()
    whole = x.double() @ weight.double().T
    assert ((expected - (bias.double() if biased else 0) - whole).norm(dim=1) <= 0.2 * whole.norm(dim=1)).all()


def test_a_gpu_multiplies_activations_of_32_bits_by_a_weight_that_is_multiplied_out(monkeypatch):
    kernel = pytest.importorskip("chairlift.kernels.dequantise", reason="Triton is not made for this platform")
    x, weight, bias = matrices(torch.float32)
    linear = Linear(quantise(weight, "int8"), bias)
    expected = linear(x)
    monkeypatch.setattr(kernel, "dequantise", lambda *given: dequantise(Quantised(*given[:4]), given[5]))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert torch.equal(linear(x), expected)


def test_a_row_of_activations_is_rounded_alike_whoever_is_beside_it():
    x, weight, _ = matrices(torch.float32)
    linear = Linear(quantise(weight, "fp8"), rounds_activations=True)
    louder = torch.cat((x[:3], 1e4 * x[3:]))
    for other in (linear(louder)[2], linear(x[2:3])[0]):
        assert (other - linear(x)[2]).norm() <= 1e-5 * other.norm()


def test_scales_of_16_bits_are_widened_for_products_in_fp8():
    x, weight, _ = matrices(torch.bfloat16)
    packed = quantise(weight, "fp8")
    narrow = packed._replace(scale=packed.scale.bfloat16())
    expected = Linear(narrow._replace(scale=narrow.scale.float()), rounds_activations=True)(x)
    assert torch.equal(Linear(narrow, rounds_activations=True)(x), expected)


def test_a_matrix_that_is_multiplied_out_has_its_columns_in_the_order_of_the_inputs():
    x, weight, _ = matrices(torch.float32)
    packed = quantise(weight, "int8")
    assert torch.equal(multiplied_out(packed, torch.float32), dequantise(packed, torch.float32))
    scattered = packed._replace(order=torch.randperm(INS, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(x @ multiplied_out(scattered, torch.float32).T, Linear(scattered)(x), rtol=1e-4, atol=1e-3)
    assert multiplied_out(weight, torch.float32) is weight


def test_rows_are_taken_as_they_are_stored():
    _, weight, _ = matrices(torch.float32)
    rows = torch.arange(OUTS).flip(0)
    assert torch.equal(take_rows(weight, rows), weight.flip(0))
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 256, (OUTS, INS // 2), dtype=torch.uint8, generator=generator)
    zero = torch.randint(0, 16, (OUTS, 1), dtype=torch.uint8, generator=generator)
    for packed in (Quantised(pairs, torch.rand(OUTS, 1, generator=generator), zero), quantise(weight, "int8"), quantise(weight, "fp8")):
        assert torch.equal(dequantise(take_rows(packed, rows), torch.float32), dequantise(packed, torch.float32).flip(0))


def test_only_weights_that_are_quantised_alike_are_stacked():
    _, weight, _ = matrices(torch.float32)
    pairs = torch.zeros(OUTS, INS // 2, dtype=torch.uint8)
    scale, zero = torch.ones(OUTS, 1), torch.zeros(OUTS, 1, dtype=torch.uint8)
    int4, int8, fp8 = Quantised(pairs, scale, zero), quantise(weight, "int8"), quantise(weight, "fp8")
    for one in (int4, int8, fp8):
        both = stack([one, one])
        assert both.columns == INS
        assert torch.equal(both.numbers.float(), torch.cat([one.numbers.float()] * 2))
    ordered, other = (int4._replace(order=torch.randperm(INS, generator=torch.Generator().manual_seed(seed))) for seed in (0, 1))
    assert torch.equal(stack([ordered, ordered]).order, ordered.order)
    for others in ((weight, int8), (int8, fp8), (int4, int8), (int4, int4._replace(group=16)), (int4, ordered), (ordered, other)):
        with pytest.raises(ValueError, match="quantised in different ways"):
            stack(others)
