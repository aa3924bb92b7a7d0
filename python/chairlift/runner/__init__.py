"""Runs the model: arrays of one step in, sampled tokens out."""

import os

# Between the parallel parts of a step, torch's threads (GNU OpenMP) wait by spinning. By default they spin for many milliseconds, longer
# than the operating system's time slices. When another thread, such as the server's own process, needs a core, they spin for a thread that
# cannot run: steps of 0.2 s took 2 s. Spins this short keep most of the benefit of spinning and lose little to another process. torch reads
# the variable when it is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# With growing segments, freed memory of one size serves tensors of another, so steps of many sizes need little more than the largest.
# torch reads this too when it is first imported.
if "PYTORCH_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
