import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Triton decides whether to interpret when a kernel is defined: so in a process of its own.
CHECK = """
import torch
from chairlift.kernels.rms_norm import rms_norm, rms_norm_reference
torch.manual_seed(0)
for shape in ((1, 8), (3, 5, 48), (4, 576)):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5))
x = torch.randn(5, 48)
assert torch.equal(rms_norm(x, x[0], 1e-5)[2:3], rms_norm(x[2:3], x[0], 1e-5))
"""


def test_the_kernel_agrees_with_torch_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
