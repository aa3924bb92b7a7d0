"""Reference of `resolve` in torch: for tests, and for tensors on a CPU."""

from __future__ import annotations

import torch


def resolve_reference(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Returns input ids [T] with -(slot + 1) replaced by last_token[slot]; last_token is [slots].

    A slot whose sample failed has a negative last token. It becomes token 0, and the result is not used.
    """
    sampled = last_token[(-(input_ids + 1)).clamp(min=0)].clamp(min=0)
    return torch.where(input_ids < 0, sampled, input_ids)
