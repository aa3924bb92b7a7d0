"""The attention metadata and work lists of the GPU kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from chairlift._core import decode_work, max_splits, prefill_work

UNITS_PER_SM = 8
"""Units of decode attention for each multiprocessor that give a device enough to do, measured on an H200: two run at once, and the others
make up for contexts of different lengths."""
EVERY_SPLIT = 2**31 - 1
"""More splits than any step has: contexts are split as far as they may be."""


def splits_at_once(kv_heads: int, device: torch.device) -> int:
    """How many splits of a context a device works on at once, each in a unit for every KV head; EVERY_SPLIT for a CPU."""
    if device.type != "cuda":
        return EVERY_SPLIT
    units = UNITS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(units // kv_heads, 1)


@dataclass(frozen=True, slots=True)
class Work:
    """A work list of one kernel (see `decode_work` and `prefill_work` of the core), int32 on the device.

    The counts size the kernels' grids and may be larger than those in the list: units (splits or tiles), merges of several splits,
    partial results, and the tokens of the longest chunk.
    """

    list: torch.Tensor
    units: int
    merges: int = 0
    parts: int = 0
    longest: int = 0


class DecodeLists:
    """Work lists for decode steps of up to `seqs` sequences with contexts of up to `longest` tokens, one per sliding window.

    The lists keep their addresses and have room for any such step, so that a CUDA graph can use them.
    """

    def __init__(self, seqs: int, longest: int, windows: Iterable[int | None], device: torch.device, *, at_once: int = EVERY_SPLIT) -> None:
        self._at_once = at_once
        self._splits = {window: max_splits(longest, window=window) for window in windows}
        # The counts, the splits of all sequences and a merge per sequence. Zero counts mean no work.
        self._lists = {
            window: torch.zeros(1 + seqs * (splits + 1), 4, dtype=torch.int32, device=device) for window, splits in self._splits.items()
        }

    def fill(self, lengths: tuple[np.ndarray, np.ndarray]) -> None:
        """Writes a step's work, given its query_starts and context_lens on the host. Earlier steps may still run."""
        work = [_decodes(lengths, window, self._at_once) for window in self._lists]
        _, staged = _stage(work, next(iter(self._lists.values())).device)
        for there, one in zip(self._lists.values(), staged, strict=True):
            there[: len(one)].copy_(one, non_blocking=True)

    def work(self, seqs: int) -> dict[int | None, Work]:
        """The lists with the largest counts of a step of `seqs` sequences."""
        found = {}
        for window, splits in self._splits.items():
            several = splits > 1
            found[window] = Work(self._lists[window], seqs * splits, several * seqs, several * seqs * splits, 1)
        return found


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The attention metadata of one step for the kernels, shared by all layers.

    int32 tensors on the device, as in the step buffers: slots [T] (the slot mapping), query_starts [S + 1], context_lens [S], rows [S]
    (the batch slots), and `tables` [any, blocks], where row rows[i] has sequence i's blocks. `lengths` are query_starts and
    context_lens on the host. `decodes` has the decode work per sliding window, `prefills` the prefill work per tile size.
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
        at_once: int = EVERY_SPLIT,
    ) -> DevicePlan:
        """Plans a step whose arrays are on the device."""
        windows = list(windows)
        lists = [_decodes(lengths, window, at_once) for window in windows]
        on_device = send(lists, slots.device)
        decodes = {window: Work(sent, *host[0].tolist()) for window, host, sent in zip(windows, lists, on_device, strict=True)}
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
        at_once: int = EVERY_SPLIT,
    ) -> DevicePlan:
        """Plans a step whose arrays are on the host (see `plan_attention`)."""
        rows = np.arange(len(context_lens), dtype=np.int32)
        on_device = send([slots, query_starts, context_lens, rows, block_tables], device)
        return cls.make(*on_device, lengths=(query_starts, context_lens), windows=windows, at_once=at_once)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """See `write_kv`."""
        from chairlift.kernels.write_kv import write_kv  # imports triton, which is only installed for GPUs

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
        """See `paged_attention`."""
        # These import triton, which is only installed for GPUs.
        from chairlift.kernels.launch_settings import chunk_tokens, device_limits, head_shape
        from chairlift.kernels.paged_combine import paged_combine
        from chairlift.kernels.paged_decode import paged_decode
        from chairlift.kernels.paged_prefill import paged_prefill
        from chairlift.kernels.paged_tile import AttentionMetadata, Scoring

        out = query.new_empty(*query.shape[:2], values.shape[-1])
        metadata = AttentionMetadata(self.tables, self.rows, self.query_starts, self.context_lens)
        scoring = Scoring(scale, window, softcap, sinks, scales)
        tokens = chunk_tokens(head_shape(query, keys, values), device_limits(query.device))
        splits, tiles = self.decodes[window], self._tiles(tokens)
        if splits.units:
            parts, lses = self.part_buffers(splits.parts, query.shape[1], values.shape[-1])
            shape = {"splits": splits.units, "queries": splits.longest}
            paged_decode(out, parts, lses, query, keys, values, metadata, scoring, work=splits.list, **shape)
        if splits.merges:
            paged_combine(out, parts, lses, work=splits.list, merges=splits.merges, sinks=sinks)
        if tiles.units:
            paged_prefill(out, query, keys, values, metadata, scoring, work=tiles.list, tiles=tiles.units)
        return out

    def _tiles(self, tokens: int) -> Work:
        """The tiles of longer chunks, `tokens` each; planned by the first layer that needs them."""
        if tokens not in self.prefills:
            tiles = np.frombuffer(prefill_work(*self.lengths, tokens=tokens), dtype=np.int32)
            count = int(tiles[0])
            # Most steps have none and need no copy.
            self.prefills[tokens] = Work(send([tiles], self.slots.device)[0] if count else self.slots, count)
        return self.prefills[tokens]

    def part_buffers(self, count: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for `count` partial results [heads, dim] and their log-sum-exps, shared by layers of equal shape."""
        if (heads, dim) not in self._scratch:
            largest = max(work.parts for work in self.decodes.values())  # layers with other windows have other counts
            self._scratch[heads, dim] = torch.empty(largest * heads * (dim + 1), dtype=torch.float32, device=self.slots.device)
        scratch, numbers = self._scratch[heads, dim], count * heads * dim
        return scratch[:numbers], scratch[numbers:]


def _decodes(lengths: tuple[np.ndarray, np.ndarray], window: int | None, at_once: int) -> np.ndarray:
    return np.frombuffer(decode_work(*lengths, window=window, at_once=at_once), dtype=np.int32).reshape(-1, 4)


def send(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies int32 arrays to the device in one transfer."""
    whole, staged = _stage(arrays, device)
    on_device = whole.to(device, non_blocking=True)
    return [on_device.as_strided(one.shape, one.stride(), one.storage_offset()) for one in staged]


def _stage(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies int32 arrays to one page-locked buffer. Returns the buffer and each array in it.

    Arrays are aligned to 16 bytes, which Triton needs for vector loads. torch does not reuse the buffer before it is copied.
    """
    ends = list(accumulate(-(-array.size // 4) * 4 for array in arrays))
    whole = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    starts = [0, *ends]
    staged = [whole[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
    for one, array in zip(staged, arrays, strict=True):
        one.numpy()[...] = array
    return whole, staged
