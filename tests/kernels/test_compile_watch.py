import pytest
import torch

pytest.importorskip("triton", reason="Triton is not made for this platform")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from chairlift.kernels.compile_watch import pause, watch


@triton.jit
def _double_kernel(x_ptr, count):
    tl.store(x_ptr, tl.load(x_ptr) * 2, mask=count > 0)


class NoDevice:
    """A driver whose launches do nothing, so that Triton compiles and launches where there is no GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 89, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    @property
    def utils(self):
        return self

    def get_device_properties(self, device):
        return {"max_shared_mem": 101376}

    def load_binary(self, *given):
        return None, None, 16, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *given: None


@pytest.mark.slow
def test_only_a_kernel_that_is_compiled_late_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", NoDevice())
    x = torch.zeros(4)
    _double_kernel[(1,)](x, 16)
    watch()
    # The next engine starts.
    pause()
    _double_kernel[(1,)](x[1:], 16)
    watch()
    _double_kernel[(1,)](x, 32)
    assert not caplog.records
    # Triton compiles another variant for a count that is not a multiple of 16.
    _double_kernel[(1,)](x, 17)
    assert [record.getMessage() for record in caplog.records] == [
        "requests waited while the kernel _double_kernel was compiled: please report this with the output of `chairlift doctor`"
    ]
