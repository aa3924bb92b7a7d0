"""GPU kernels in Triton. Each file has one operation: its kernel, its launcher and a reference in torch."""

import os

# Triton 3.10 stops fusing multiplications and additions by default, and 3.9 warns of it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
