import pytest
import torch
from interpreted import DTYPES, assert_close

from chairlift.kernels.quantise_rows import quantise_rows
from chairlift.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from chairlift.layers.linear import MIN_ABSMAX

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 48), (4, 577)])
def test_rows_have_root_mean_square_one(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) * 3).to(dtype), torch.randn(shape[-1], generator=generator)
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(expected.float(), torch.nn.functional.rms_norm(x.float(), shape[-1:], weight, 1e-5), rtol=1e-3, atol=1e-3)
    # Weights may be wider than what they multiply.
    for kept in (weight, weight.to(dtype)):
        assert_close(rms_norm(x, kept, 1e-5), rms_norm_reference(x, kept, 1e-5))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (5, 100)])
def test_the_sum_is_kept_and_normalised(shape, inner, dtype):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(2, *shape, generator=generator) * 3).to(dtype).unbind(0)
    weight, other = torch.randn(2, shape[-1], generator=generator).unbind(0)
    mine, theirs = residual.clone(), residual.clone()
    settings = {"inner": other} if inner else {}
    found, expected = add_rms_norm(x, mine, weight, 1e-5, **settings), add_rms_norm_reference(x, theirs, weight, 1e-5, **settings)
    assert_close(mine, theirs)
    assert_close(found, expected)
    if not inner:
        assert torch.equal(mine, residual + x)


def test_a_row_has_the_same_bits_alone(dtype):
    x, residual = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2)).to(dtype).unbind(0)
    whole = add_rms_norm(x, residual.clone(), x[0], 1e-5, inner=x[1])
    assert torch.equal(whole[2:3], add_rms_norm(x[2:3], residual[2:3].clone(), x[0], 1e-5, inner=x[1]))
    assert torch.equal(rms_norm(x, x[0], 1e-5)[2:3], rms_norm(x[2:3], x[0], 1e-5))


@pytest.mark.parametrize("shape", [(1, 8), (4, 577)])
def test_rounded_rows_are_those_of_two_kernels(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(2, *shape, generator=generator) * 3).to(dtype).unbind(0)
    weight, inner = torch.randn(2, shape[-1], generator=generator).unbind(0)
    # A row of zeros has a scale too.
    x[0], residual[0] = 0, 0
    for settings in ({}, {"inner": inner}):
        mine, theirs = residual.clone(), residual.clone()
        found = add_rms_norm(x, mine, weight, 1e-5, **settings, least=MIN_ABSMAX)
        assert_same(found, quantise_rows(add_rms_norm(x, theirs, weight, 1e-5, **settings), MIN_ABSMAX))
        assert torch.equal(mine, theirs)
    assert_same(rms_norm(x, weight, 1e-5, least=MIN_ABSMAX), quantise_rows(rms_norm(x, weight, 1e-5), MIN_ABSMAX))


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])
