"""Paged attention on a GPU: what its kernels read of a step, and the work that they share out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from chairlift._core import decode_work, max_splits, prefill_work


@dataclass(frozen=True, slots=True)
class Work:
    """A list for one of the kernels (see `decode_work` and `prefill_work` of the core), int32 on the device.

    The counts are what the kernels' grids are made for, so they may be larger than those in the list: units of work (splits, or
    tiles), results to be merged of several splits, the partial results that takes, and the longest chunk's tokens.
    """

    list: torch.Tensor
    units: int
    merges: int = 0
    parts: int = 0
    longest: int = 0


class DecodeLists:
    """Work for steps of up to `seqs` sequences with one token each and up to `longest` in their contexts, for each sliding window.

    The lists stay where they are, and have room for whatever the contexts are: a graph can be kept for all such steps.
    """

    def __init__(self, seqs: int, longest: int, windows: Iterable[int | None], device: torch.device) -> None:
        self._splits = {window: max_splits(longest, window=window) for window in windows}
        # The counts, the splits of all sequences, and a merge for each; without counts there is nothing to do.
        self._lists = {
            window: torch.zeros(1 + seqs * (splits + 1), 4, dtype=torch.int32, device=device) for window, splits in self._splits.items()
        }

    def fill(self, lengths: tuple[np.ndarray, np.ndarray]) -> None:
        """Puts in the work of a step, whose query_starts and context_lens are on the host; no step before needs to be done."""
        work = [_decodes(lengths, window) for window in self._lists]
        _, staged = _stage(work, next(iter(self._lists.values())).device)
        for there, one in zip(self._lists.values(), staged, strict=True):
            there[: len(one)].copy_(one, non_blocking=True)

    def work(self, seqs: int) -> dict[int | None, Work]:
        """What is in the lists, with the counts that a step of so many sequences has at most."""
        found = {}
        for window, splits in self._splits.items():
            several = splits > 1
            found[window] = Work(self._lists[window], seqs * splits, several * seqs, several * seqs * splits, 1)
        return found


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Everything about one step that the kernels of attention need, computed once and shared by all layers.

    int32 tensors on the device, as in the step buffers: slots [T], query_starts [S + 1], context_lens [S], rows [S], and `tables`
    [any, blocks], of which sequence i's blocks are in row rows[i]. `lengths` are query_starts and context_lens on the host.
    `decodes` has the work for each sliding window of the model, `prefills` for each size of pieces.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor
    lengths: tuple[np.ndarray, np.ndarray]
    decodes: dict[int | None, Work]
    prefills: dict[int, Work] = field(default_factory=dict)
    _scratch: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        slots: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        rows: torch.Tensor,
        tables: torch.Tensor,
        *,
        lengths: tuple[np.ndarray, np.ndarray],
        windows: Iterable[int | None],
    ) -> DevicePlan:
        """Plans a step that is on the device already, for layers with these windows."""
        windows = list(windows)
        lists = [_decodes(lengths, window) for window in windows]
        there = _send(lists, slots.device)
        decodes = {window: Work(sent, *host[0].tolist()) for window, host, sent in zip(windows, lists, there, strict=True)}
        return cls(slots, query_starts, context_lens, rows, tables, lengths, decodes)

    @classmethod
    def send(
        cls,
        slots: np.ndarray,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        *,
        windows: Iterable[int | None],
        device: torch.device,
    ) -> DevicePlan:
        """Plans a step that is on the host: see `plan_attention`."""
        rows = np.arange(len(context_lens), dtype=np.int32)
        there = _send([slots, query_starts, context_lens, rows, block_tables], device)
        return cls.make(*there, lengths=(query_starts, context_lens), windows=windows)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Does what `write_kv` says."""
        from chairlift.kernels.write_kv import write_kv  # brings triton, which exists only where there is a GPU to use it

        write_kv(k, v, keys, values, self.slots, scales)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Does what `paged_attention` says."""
        # They bring triton, which exists only where there is a GPU to use it.
        from chairlift.kernels.paged_combine import paged_combine
        from chairlift.kernels.paged_decode import paged_decode
        from chairlift.kernels.paged_prefill import paged_prefill, tile_tokens
        from chairlift.kernels.paged_tile import AttentionMetadata, Scoring

        out = query.new_empty(*query.shape[:2], values.shape[-1])
        metadata = AttentionMetadata(self.tables, self.rows, self.query_starts, self.context_lens)
        scoring = Scoring(scale, window, softcap, sinks, scales)
        splits, tiles = self.decodes[window], self._tiles(tile_tokens(query.shape[1] // keys.shape[1], values.shape[-1]))
        if splits.units:
            parts, lses = self._parts(splits.parts, query.shape[1], values.shape[-1])
            shape = {"splits": splits.units, "queries": splits.longest}
            paged_decode(out, parts, lses, query, keys, values, metadata, scoring, work=splits.list, **shape)
        if splits.merges:
            paged_combine(out, parts, lses, work=splits.list, merges=splits.merges, sinks=sinks)
        if tiles.units:
            paged_prefill(out, query, keys, values, metadata, scoring, work=tiles.list, tiles=tiles.units)
        return out

    def _tiles(self, tokens: int) -> Work:
        """The pieces of longer chunks, of so many tokens: planned when the first layer asks."""
        if tokens not in self.prefills:
            tiles = np.frombuffer(prefill_work(*self.lengths, tokens=tokens), dtype=np.int32)
            count = int(tiles[0])
            # Most steps have none, and need not wait for a copy that says so.
            self.prefills[tokens] = Work(_send([tiles], self.slots.device)[0] if count else self.slots, count)
        return self.prefills[tokens]

    def _parts(self, count: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many partial results [heads, dim] and the logarithms of their sums, shared by layers of equal shape."""
        if (heads, dim) not in self._scratch:
            most = max(work.parts for work in self.decodes.values())  # for layers with other windows have others
            self._scratch[heads, dim] = torch.empty(most * heads * (dim + 1), dtype=torch.float32, device=self.slots.device)
        scratch, numbers = self._scratch[heads, dim], count * heads * dim
        return scratch[:numbers], scratch[numbers:]


def _decodes(lengths: tuple[np.ndarray, np.ndarray], window: int | None) -> np.ndarray:
    return np.frombuffer(decode_work(*lengths, window=window), dtype=np.int32).reshape(-1, 4)


def _send(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies int32 arrays to the device in one go."""
    whole, staged = _stage(arrays, device)
    there = whole.to(device, non_blocking=True)
    return [there.as_strided(one.shape, one.stride(), one.storage_offset()) for one in staged]


def _stage(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies int32 arrays to memory that the device copies from by itself: the whole, and each array in it.

    Each begins at a multiple of 16 bytes, which Triton makes something of. Torch keeps pinned memory from being used again before it is
    copied.
    """
    ends = list(accumulate(-(-array.size // 4) * 4 for array in arrays))
    whole = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    starts = [0, *ends]
    staged = [whole[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
    for one, array in zip(staged, arrays, strict=True):
        one.numpy()[...] = array
    return whole, staged
