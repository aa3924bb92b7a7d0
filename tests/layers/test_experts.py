"""What a GPU does with experts, as far as a CPU can show it."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.layers.experts import Choice, Experts, grouped_mm


class Calls(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("tokens", "dtype", "capability", "grouped"),
    [
        (5, torch.bfloat16, (9, 0), 0),
        (200, torch.bfloat16, (9, 0), 2),
        # torch's own product waits for these devices, and for this dtype.
        *((200, torch.bfloat16, capability, 0) for capability in ((8, 0), (8, 9), (10, 0), (12, 0))),
        (200, torch.float16, (9, 0), 0),
    ],
)
def test_experts_in_16_bits_are_two_products_on_a_device_and_nothing_waits_for_it(tokens, dtype, capability, grouped, monkeypatch):
    """Those of many rows in bfloat16 are torch's on a Hopper, and all others are ours."""
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    from chairlift.kernels import expert_linear, launch_settings, sort_experts

    limits = launch_settings.INTERPRETER._replace(capability=capability)
    monkeypatch.setattr(expert_linear, "device_limits", lambda device: limits)

    ours = []

    def multiply(x, weight, bias, rows, used, *, spread):
        ours.append(spread)
        return x.new_empty(len(rows[0]), weight[0].shape[1])

    monkeypatch.setattr(expert_linear, "expert_linear", multiply)
    monkeypatch.setattr(
        sort_experts, "sort_experts", lambda experts, count: (experts.flatten().int(), torch.empty(count, dtype=torch.int32))
    )
    with FakeTensorMode(), torch.device("cuda"), Calls() as calls:
        gate_up, down = torch.empty(8, 96, 64, dtype=dtype), torch.empty(8, 64, 96, dtype=dtype)
        experts = Experts(gate_up=gate_up, down=down, biases=None, activation="relu2", clamp=None)
        choice = Choice(scores="sigmoid", used=3, bias=torch.empty(8), epsilon=1e-20, scale=2.0)
        out = experts(torch.empty(tokens, 64, dtype=dtype), *choice(torch.empty(tokens, 8)))
    assert (out.shape, out.dtype) == ((tokens, 64), dtype)
    assert calls.counts["_grouped_mm"] == grouped
    assert ours == ([] if grouped else [True, False])
    # These read from the device to the host.
    assert not {"_local_scalar_dense", "nonzero", "item"} & calls.counts.keys()


def test_the_product_of_a_device_is_that_of_the_experts_one_by_one():
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(shape, generator=generator).bfloat16() for shape in ((11, 32), (5, 16, 32)))
    # Two experts have no rows.
    ends = torch.tensor([4, 4, 5, 11, 11], dtype=torch.int32)
    assert torch.equal(grouped_mm(x, weights, ends), functional.grouped_mm(x, weights.mT, offs=ends))
