import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not made for this platform")

from fake_driver import record_launches  # noqa: E402
from offline import compiled  # noqa: E402, F401 (skips where kernels cannot be compiled)

from chairlift.kernels import LARGEST, act_mul, quantised_linear, rms_norm  # noqa: E402
from chairlift.layers.linear import MIN_ABSMAX  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_remembered_launch_is_that_of_triton(monkeypatch):
    theirs = triton.JITFunction(rms_norm._rms_norm_kernel.fn)
    dispatched: list[object] = []
    dispatch = triton.JITFunction.run
    monkeypatch.setattr(triton.JITFunction, "run", lambda *given, **named: dispatched.append(given[0]) or dispatch(*given, **named))
    row = torch.empty(3 * 512 + 1, dtype=torch.bfloat16)
    x, odd, weight = row[:-1].view(3, 512), row[1:].view(3, 512), torch.empty(512, dtype=torch.bfloat16)
    rounded, scale = torch.empty(3, 512, dtype=torch.float8_e4m3fn), torch.empty(3, 1)
    whole, odd_x = (x, None, x, weight, None, None, 1e-6, 512), (x, None, odd, weight, None, None, 1e-6, 512)
    arguments = [whole, odd_x, (x, None, x, weight, x, None, 1e-6, 512), (x, None, x, weight.float(), None, None, 1e-6, 512)]
    arguments += [(x, None, x, weight, None, None, 1e-6, 511), (rounded, scale, x, weight, None, None, 1e-6, 512)]
    launches = record_launches(monkeypatch)
    for given in arguments:
        dispatched.clear()
        for kernel in (theirs, rms_norm._rms_norm_kernel, rms_norm._rms_norm_kernel):
            kernel[(3,)](*given, least=MIN_ABSMAX, largest=LARGEST, block=512, num_warps=2)
        # Triton has dispatched the second only once.
        assert dispatched == [theirs, rms_norm._rms_norm_kernel]
        first, *others = launches[-3:]
        assert all(launch[:2] == first[:2] and all(a is b or a == b for a, b in zip(launch[2], first[2], strict=True)) for launch in others)
    # What differs in alignment, dtype or presence runs other code.
    assert len({launch[0] for launch in launches}) == len(arguments)


def test_a_step_of_another_size_is_dispatched_again_but_not_compiled(monkeypatch):
    numbers, scale, arrived = torch.empty(64, 128, dtype=torch.int8), torch.empty(64, 1), torch.zeros(64, dtype=torch.int32)
    launches = record_launches(monkeypatch)
    for rows in (2, 1, 16, 3, 5):
        quantised_linear.quantised_linear(torch.empty(rows, 128, dtype=torch.bfloat16), numbers, scale, None, 0, None, arrived)
        act_mul.act_mul(torch.empty(rows, 2048, dtype=torch.bfloat16), "silu")
    assert len({launch[0] for launch in launches}) == 2
    assert [launch[1] for launch in launches[1::2]] == [(rows, 1, 1) for rows in (2, 1, 16, 3, 5)]
