"""What `resolve` does, in torch: for tests, and for tensors on a CPU."""

from __future__ import annotations

import torch


def resolve_reference(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Input ids [T] with what each row sampled last, last_token [rows], where the id is -(row + 1).

    A row whose sample failed has a negative last token. Its result is thrown away: token 0 stands in for it.
    """
    sampled = last_token[(-(input_ids + 1)).clamp(min=0)].clamp(min=0)
    return torch.where(input_ids < 0, sampled, input_ids)
