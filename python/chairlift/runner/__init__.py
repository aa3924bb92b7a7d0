"""Runs the model: arrays of one step in, sampled tokens out."""

import os

# Between the parallel parts of a step, torch's threads (GNU OpenMP) wait by spinning, by default for many milliseconds: longer than the
# operating system's time slices. As soon as anything else wants a core (the server's own process does), they wait for a thread that cannot
# run because they are running: steps of 0.2 s took 2 s. Spins this short keep most of what spinning gains, and lose little to a neighbour.
# Read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
