"""How rows are to be sampled, as the kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Settings(NamedTuple):
    """One entry for each row of the engine, all on one device; a step's rows are looked up in them."""

    temperature: torch.Tensor
    """fp32; 0: the first of the likeliest."""
    top_k: torch.Tensor
    """int32; 0: all."""
    top_p: torch.Tensor
    """fp32, of what top-k leaves; 1: all."""
    min_p: torch.Tensor
    """fp32, of the likeliest; 0: all."""
    seed: torch.Tensor
    """int64: the bits of an unsigned one."""
    repetition: torch.Tensor
    """fp32; 1: off."""
    presence: torch.Tensor
    """fp32; 0: off."""
    frequency: torch.Tensor
    """fp32; 0: off."""
    slot: torch.Tensor
    """int32: which line of `said` a row has that is penalised; -1: none."""
