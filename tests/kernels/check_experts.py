"""The products of a mixture's experts: the kernels beside torch."""

import pytest
import torch
from interpreted import assert_close

from chairlift.kernels.act_mul import act_mul
from chairlift.kernels.expert_linear import expert_linear
from chairlift.kernels.sort_experts import BLOCK, sort_experts
from chairlift.layers.experts import Rows, clamped
from chairlift.layers.linear import Quantised, quantise

KINDS = ("16 bits", "int8", "fp8 in blocks", "int4", "int4 by row", "mxfp4")
SIZES = [(1, 8, 3, 40, 64), (7, 3, 1, 70, 96), (9, 4, 2, 33, 288), (65, 2, 2, 70, 64)]
"""Tokens, experts, those that a token uses, outputs and inputs. Rows of an expert are few, none, and a tile of each size."""


def draw(kind: str, experts: int, outs: int, ins: int) -> torch.Tensor | Quantised:
    """The weights of all experts, with all numbers of their kind."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, 0, outs)[:, None]
    if kind == "16 bits":
        return (torch.randn(experts, outs, ins, generator=random) * sizes).half()
    if kind == "int8":
        rounded = [quantise(torch.randn(outs, ins, generator=random) * sizes, "int8") for _ in range(experts)]
        return Quantised(torch.stack([one.numbers for one in rounded]), torch.stack([one.scale for one in rounded]))
    numbers = torch.randint(0, 256, (experts, outs, ins), generator=random, dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(117, 127, (experts, outs, ins // 32), generator=random, dtype=torch.uint8)
        return Quantised(numbers[..., : ins // 2].contiguous(), exponents, None, 32)
    group = {"fp8 in blocks": 128, "int4": 32, "int4 by row": 0, "int4 of 16": 16}[kind]
    scale = sizes * (0.5 + torch.rand(experts, outs, -(-ins // group) if group else 1, generator=random))
    if kind == "fp8 in blocks":
        numbers[numbers & 0x7F == 0x7F] = 0  # NaN
        return Quantised(numbers.view(torch.float8_e4m3fn), scale / 100, None, group)
    zero = torch.randint(0, 16, scale.shape, generator=random, dtype=torch.uint8)
    return Quantised(numbers[..., : ins // 2].contiguous(), (scale / 10).half(), zero, group)


@pytest.mark.parametrize(("tokens", "experts", "used"), [(1, 5, 5), (30, 4, 1), (BLOCK // 2 + 3, 3, 2)])
def test_choices_are_sorted_by_expert_and_then_by_token(tokens, experts, used):
    choices = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(used).indices
    choices[choices == 1] = 0  # an expert without rows
    expected = Rows.sort(choices, experts)
    order, ends = sort_experts(choices, experts)
    assert torch.equal(order, expected.order)
    assert torch.equal(ends, expected.ends)


@pytest.mark.parametrize(
    ("tokens", "experts", "used", "outs", "ins", "kind"),
    [*((*sizes, kind) for sizes in SIZES for kind in KINDS), (7, 3, 1, 40, 64, "int4 of 16")],
)
def test_products_are_those_of_the_experts_one_by_one(tokens, experts, used, outs, ins, kind):
    random = torch.Generator().manual_seed(1)
    choices = torch.rand(tokens, experts, generator=random).topk(used).indices
    weight, rows = draw(kind, experts, outs, ins), Rows.sort(choices, experts)
    bias = torch.randn(experts, outs, generator=random).half()
    stored = (weight, None, None, 0) if isinstance(weight, torch.Tensor) else weight.stored
    for spread, offset in ((True, None), (False, bias)):
        x = torch.randn(tokens if spread else tokens * used, ins, generator=random).half()
        whole = weight.float() if isinstance(weight, torch.Tensor) else weight
        expected = rows.linear(x.float(), whole, None if offset is None else offset.float(), spread=spread)
        found = expert_linear(x, stored, offset, (rows.order, rows.ends), used, spread=spread)
        assert_close(found, expected.half())


def test_a_clamped_gate_is_that_of_torch():
    gate_up = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 6
    assert_close(act_mul(gate_up, "silu", clamp=(1.702, 7.0)), clamped(gate_up, 1.702, 7.0))
