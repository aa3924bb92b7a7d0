"""Collective operations of a tensor-parallel group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TIMEOUT = timedelta(minutes=2)
"""How long a process waits for the others in a collective operation."""


class TensorParallelGroup:
    """Rank `rank` of a group of `size` processes.

    Each process has some of the heads and some of the MLP's inner columns of every layer, so that a layer needs two all-reduces
    (Shoeybi et al., Megatron-LM, 2019). All processes must make the same calls in the same order.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        """`group` is torch's process group (its stubs are incomplete), None for a single process."""
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str, device: torch.device) -> TensorParallelGroup:
        """Joins the group and waits for its other processes, which are on this machine and share the directory `rendezvous`."""
        groups: Any = distributed
        store = groups.FileStore(f"{rendezvous}/ranks", size)
        if device.type == "cuda":
            group = groups.ProcessGroupNCCL(store, rank, size, TIMEOUT)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            group = groups.ProcessGroupGloo(store, rank, size, TIMEOUT)
        joined = cls(rank, size, group)
        # Processes connect with the first operation, and `rendezvous` may be deleted when this returns.
        joined.all_reduce(torch.ones(1, device=device)).item()
        return joined

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with the sum of all processes' x and returns it."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Concatenates all processes' x along the last axis, by rank, and returns the first `columns` columns."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)[..., :columns]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This process's rows of the matrix x, or numbers of a vector. All parts have the same size; the last one is padded with zeros."""
        rows = -(-len(x) // self.size)
        mine = x[self.rank * rows : (self.rank + 1) * rows]
        return mine if len(mine) == rows else functional.pad(mine, (0, 0) * (x.dim() - 1) + (0, rows - len(mine)))

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrites x with rank 0's x."""
        if self._group is not None:
            self._group.broadcast([x]).wait()


ALONE = TensorParallelGroup(0, 1)
"""The group of a single process."""
