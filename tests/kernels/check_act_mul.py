import pytest
import torch
from interpreted import DTYPES, assert_close

from chairlift.kernels.act_mul import act_mul, act_mul_reference
from chairlift.kernels.quantise_rows import quantise_rows
from chairlift.layers.linear import MIN_ABSMAX


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_is_activated_and_multiplied(activation, dtype):
    generator = torch.Generator().manual_seed(0)
    # Below, at, and above a program's columns.
    for rows, columns in ((1, 3), (3, 48), (2, 1024), (2, 1100)):
        gate_up = torch.randn(rows, 2 * columns, generator=generator).to(dtype)
        found = act_mul(gate_up, activation)
        assert_close(found, act_mul_reference(gate_up, activation))
        assert torch.equal(found[-1:], act_mul(gate_up[-1:], activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_out_are_open_or_shut(activation):
    # So far that an exponential overflows.
    assert act_mul(torch.tensor([[-1e4, 1e4, 2.0, 2.0]]), activation).tolist() == [[0.0, 2e4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rounded_rows_are_those_of_two_kernels(activation, dtype):
    gate_up = torch.randn(3, 2200, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate_up[0] = 0
    numbers, scale = act_mul(gate_up, activation, least=MIN_ABSMAX)
    expected = quantise_rows(act_mul(gate_up, activation), MIN_ABSMAX)
    assert torch.equal(numbers.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])
