"""Whether kernels are tried in full (`make compile-gate`), or one case of each kind, because Triton's interpreter takes long."""

import os

FULL = os.environ.get("COMPILE_GATE") == "full"
