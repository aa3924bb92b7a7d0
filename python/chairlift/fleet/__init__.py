"""Engines on the machines of a Ray cluster, for a server that they join."""
