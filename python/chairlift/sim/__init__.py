"""The simulator: the real scheduler in simulated time, on modelled devices."""
