"""GPU kernels in Triton: one operation a file, with its kernel, its launcher and a reference in torch."""
