"""Describes a checkpoint for clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The architecture and the weights of a checkpoint; empty before they are known."""

    architecture: str = ""
    num_weights: int = 0
    """Number of parameters."""
    weight_format: str = ""
    """"safetensors" or "gguf"."""
    weight_type: str = ""
    """The method of a quantised checkpoint, else the type of most bytes; empty without weights."""
    weight_bytes: int = 0
