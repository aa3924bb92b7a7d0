"""GPU kernels in Triton. Each file has one operation: its kernel, its launcher and a reference in torch."""
