"""Processes that have a part of every layer each: what they tell each other."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PATIENCE = timedelta(minutes=2)
"""How long a process waits for the others, all of which do the same work."""


class TensorParallelGroup:
    """The process `rank` of `size` that compute a model together.

    Each has some of the heads and some of the network's inner columns of every layer, so that a layer needs no more than two sums
    over all of them (tensor parallelism: Shoeybi et al., Megatron-LM, 2019). Every process must make the same calls in the same order.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        """`group` is torch's process group, of which its stubs know less than they should; None for a process that is alone."""
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def meet(cls, rank: int, size: int, place: str, device: torch.device) -> TensorParallelGroup:
        """Waits for the others, all on this machine, who find each other by a file in the directory `place`."""
        groups: Any = distributed
        store = groups.FileStore(f"{place}/peers", size)
        if device.type == "cuda":
            group = groups.ProcessGroupNCCL(store, rank, size, PATIENCE)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            group = groups.ProcessGroupGloo(store, rank, size, PATIENCE)
        peers = cls(rank, size, group)
        # Some connect only with the first sum, which `place` may not outlive.
        peers.sum(torch.ones(1, device=device)).item()
        return peers

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with the sum of all processes' x; returns it."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def join(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """All processes' x side by side, in the order of their ranks; the first so many columns of that."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)[..., :columns]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This process's rows of the matrix x, of which each process has as many; the last may have some of zeros."""
        rows = -(-len(x) // self.size)
        mine = x[self.rank * rows : (self.rank + 1) * rows]
        return mine if len(mine) == rows else functional.pad(mine, (0, 0, 0, rows - len(mine)))

    def share(self, x: torch.Tensor) -> None:
        """Overwrites x with what process 0 has."""
        if self._group is not None:
            self._group.broadcast([x]).wait()


ALONE = TensorParallelGroup(0, 1)
"""One process that has the whole model."""
