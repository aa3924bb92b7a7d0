"""LoRA adapters on linear layers: the product with merged weights, in fp64, for the rows that have one."""

import pytest
import torch

from chairlift.layers.linear import Linear, dequantise, quantise, round_rows
from chairlift.layers.lora import AdapterRows, LowRankUpdate, adapted

INPUTS, OUTPUTS, RANK, ROWS = 48, {"q": 32, "k": 16, "v": 16}, 3, 11
GROUPS = [torch.tensor([7, 1, 4]), torch.tensor([0, 9, 10, 3])]
"""The rows of two adapters; the others have none."""


def adapter(linear: Linear, seed: int, columns: list[slice]) -> dict[Linear, list[LowRankUpdate]]:
    random = torch.Generator().manual_seed(seed)
    return {
        linear: [
            LowRankUpdate(part, torch.randn(RANK, INPUTS, generator=random), torch.randn(part.stop - part.start, RANK, generator=random))
            for part in columns
        ]
    }


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("rounded", [False, True])
def test_rows_have_the_product_with_their_merged_weight(quantization: str | None, rounded: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(sum(OUTPUTS.values()), INPUTS), torch.randn(sum(OUTPUTS.values())), torch.randn(ROWS, INPUTS)
    linear = Linear(weight if quantization is None else quantise(weight, quantization), bias)
    if quantization is not None:
        weight = dequantise(linear.weight, torch.float32)
    # One changes all of the merged projections, the other the second only.
    adapters = [adapter(linear, 1, [slice(0, 32), slice(32, 48), slice(48, 64)]), adapter(linear, 2, [slice(32, 48)])]
    rows = AdapterRows(list(zip(adapters, GROUPS, strict=True)))
    if rounded:
        out, (numbers, scale, _) = linear(x), round_rows(x)
        rows.add(linear, round_rows(x), out)
        inputs = numbers.double() * scale.double()
    else:
        out, inputs = adapted(linear, x, rows), x.double()
    for row in range(ROWS):
        expected = linear(x)[row].double()
        for one, group in zip(adapters, GROUPS, strict=True):
            if row in group.tolist():
                for columns, a, b in one[linear]:
                    merged = weight[columns].double() + b.double() @ a.double()
                    expected[columns] += (merged - weight[columns].double()) @ inputs[row]
        assert (out[row].double() - expected).abs().max() < 1e-4
    for row in (2, 5, 6, 8):
        assert torch.equal(out[row], linear(x)[row])


def test_an_adapter_of_other_layers_and_none_change_nothing() -> None:
    linear, other = (Linear(torch.randn(8, INPUTS)) for _ in range(2))
    x = torch.randn(ROWS, INPUTS)
    rows = AdapterRows([(adapter(other, 0, [slice(0, 8)]), torch.arange(ROWS))])
    assert torch.equal(adapted(linear, x, rows), adapted(linear, x, None))
    assert not torch.equal(adapted(other, x, rows), adapted(other, x, None))


def test_an_update_in_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    linear, x = Linear(torch.randn(8, INPUTS).bfloat16()), torch.randn(ROWS, INPUTS).bfloat16()
    (update,) = (one := adapter(linear, 3, [slice(0, 8)]))[linear]
    out = adapted(linear, x, AdapterRows([(one, torch.arange(ROWS))]))
    expected = linear(x).double() + x.double() @ update.a.double().T @ update.b.double().T
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= expected.abs() * 2**-8).all()
