"""Sampling parameters as the kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Settings(NamedTuple):
    """Sampling parameters with one entry per batch slot, all on one device. A step's rows are indices of them."""

    temperature: torch.Tensor
    """fp32; 0: the first of the most likely tokens."""
    top_k: torch.Tensor
    """int32; 0: all."""
    top_p: torch.Tensor
    """fp32, share of the tokens that top-k selects; 1: all."""
    min_p: torch.Tensor
    """fp32, relative to the most likely token; 0: all."""
    seed: torch.Tensor
    """int64 with the bits of a uint64."""
    repetition: torch.Tensor
    """fp32; 1: off."""
    presence: torch.Tensor
    """fp32; 0: off."""
    frequency: torch.Tensor
    """fp32; 0: off."""
    slot: torch.Tensor
    """int32: the slot's row of `said` if it has penalties; -1: none."""
