"""`chairlift doctor`'s comparison of the kernels with torch, in Triton's interpreter."""

from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from chairlift import kernels
from chairlift.kernels import act_mul, rms_norm
from chairlift.runner import kernel_check


@pytest.fixture(autouse=True)
def few(monkeypatch):
    # The interpreter takes a second for a tile of 256 dimensions.
    monkeypatch.setattr(kernel_check, "HEAD_SIZES", (64,))
    monkeypatch.setattr(kernel_check, "CHUNKS", ((1, 1), (1, 900), (3, 40), (5, 20)))


def test_right_wrong_and_broken_kernels_are_told_apart(monkeypatch):
    right = rms_norm.rms_norm
    monkeypatch.setattr(rms_norm, "rms_norm", lambda *given: right(*given) * 1.01)

    def broken(*given):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(act_mul, "act_mul", broken)
    # The others take a minute, and are the same as below.
    checks, touched = kernel_check._checks, ("rms_norm", "add_rms_norm", "act_mul", "rows rounded", "linear, fp8 p", "copy", "resolve")
    monkeypatch.setattr(kernel_check, "_checks", lambda *given: (one for one in checks(*given) if one[0].startswith(touched)))
    found = {check.name: check for check in kernel_check.check_kernels(torch.device("cpu"), torch.float32, 600)}
    assert len(found) == 8
    wrong = {name for name, check in found.items() if not check.ok}
    assert wrong == {"rms_norm", "act_mul, silu", "act_mul, gelu_tanh", "rows rounded to fp8"}
    assert found["rms_norm"].says.startswith("wrong: relative error 1.0e-02")
    assert found["act_mul, silu"].says == "does not run: RuntimeError: is available"


def test_every_kernel_is_compared(monkeypatch):
    monkeypatch.setattr(kernel_check, "CHUNKS", ((1, 900), (3, 40), (5, 20)))
    run, launched = InterpretedFunction.run, set()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *given, **named: launched.add(self.fn.__name__) or run(self, *given, **named)
    )
    found = list(kernel_check.check_kernels(torch.device("cpu"), torch.float32, 600))
    assert len(found) == 24
    assert not [check for check in found if not check.ok]
    modules = [import_module(found.name) for found in walk_packages(kernels.__path__, "chairlift.kernels.")]
    assert launched == {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def test_no_check_begins_after_the_time_is_over():
    found = list(kernel_check.check_kernels(torch.device("cpu"), torch.float32, 0))
    assert {check.says for check in found[1:]} == {"not checked: 0 s are over; compiled kernels are kept, so run this again"}
    assert all(check.ok for check in found)
