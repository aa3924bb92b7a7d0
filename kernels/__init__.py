"""GPU kernels in Triton. Each file has one operation: its kernel, its launcher and a reference in torch."""

import os

# Triton 3.10 stops fusing multiplications and additions by default, and 3.9 warns of it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
