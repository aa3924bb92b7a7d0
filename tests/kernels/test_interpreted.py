import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not made for this platform")


@pytest.mark.timeout(900)  # minutes of interpreted kernels, beside other tests on few cores
def test_kernels_agree_with_torch_in_the_interpreter():
    # Triton decides whether to interpret when a kernel is defined: so in a process of its own.
    checks = sorted(map(str, Path(__file__).parent.glob("check_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *checks]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
