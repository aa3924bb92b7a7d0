"""CUDA graphs for tests on a CPU, with what makes real ones hard: nothing but the work is kept, and all memory is where it was.

What torch and Triton's interpreter do is noted while a graph is recorded, and undone. A replay does it again on the very same memory,
with the numbers that Python handed over then. What graphs compute with lies in memory that they share: each replay spoils all that the
others, and itself, have left there. What a graph reads from outside is not kept alive by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from chairlift.runner.copy_stream import CopyStream

aten = torch.ops.aten
WAITING = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.lift_fresh.default)
"""What would wait for a device, or take from memory of the host that is not pinned."""
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)


class Outside:
    """A tensor that a graph reads or writes, and that others keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        assert not self._storage.expired(), "a graph that uses memory which was given back"
        dtype, *place = self._like
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=dtype).set_(storage, *place)


class Emulator(TorchDispatchMode):
    """The `GraphCapture` of a CPU: all graphs that it made share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.records = self.replays = 0
        self._left: list[torch.Tensor] = []
        self._work: list[Callable[[], None]] | None = None

    def warm(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        global _recording
        self.records += 1
        self._work, self._made, self._saved = [], {}, {}
        _recording = self
        try:
            with self:
                work()
        finally:
            _recording = None
            for storage, saved in self._saved.values():
                storage.copy_(saved)
        noted, self._work, self._saved = self._work, None, {}
        self._left += self._made.values()
        self._spoil()

        def replay() -> None:
            self.replays += 1
            self._spoil()
            with torch.inference_mode(), _disable_current_modes():
                for one in noted:
                    one()

        return replay

    def _spoil(self) -> None:
        with torch.inference_mode():
            for tensor in self._left:
                tensor.fill_(float("nan") if tensor.is_floating_point() else tensor.dtype != torch.bool and torch.iinfo(tensor.dtype).max)

    def _kept(self, leaf: Any) -> Any:
        """What a graph keeps of an argument; a tensor from outside is saved, for nothing may happen yet."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata in self._made:
            return leaf
        assert not any(pinned.cdata == storage._cdata for pinned in PINNED), "a graph that reads memory of the host"
        if storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage, storage.clone()
        return Outside(leaf)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        masked = func is aten.index.Tensor and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        assert not masked, "an index whose length the device must tell"
        assert func not in WAITING, f"{func} waits for the device"
        assert self._work is not None
        kept = tree_map(self._kept, (args, kwargs))
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        fresh = [None if one.untyped_storage()._cdata in given else one for one in outs]
        self._made |= {one.untyped_storage()._cdata: one for one in fresh if one is not None}

        def work() -> None:
            args, kwargs = tree_map(_real, kept)
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for there, one in zip(fresh, made, strict=True):
                if there is not None:
                    there.copy_(one)

        if func not in EMPTY:
            self._work.append(work)
        return out

    def launch(self, kernel: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Notes the launch of a kernel."""
        assert self._work is not None
        kept = tree_map(self._kept, (args, kwargs))

        def work() -> None:
            args, kwargs = tree_map(_real, kept)
            kernel(*args, **kwargs)

        work()
        self._work.append(work)


def _real(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, Outside) else leaf


_recording: Emulator | None = None
_run = InterpretedFunction.run


def _launched(self: Any, *args: Any, **kwargs: Any) -> None:
    with _disable_current_modes():
        if _recording is None:
            _run(self, *args, **kwargs)
        else:
            _recording.launch(lambda *args, **kwargs: _run(self, *args, **kwargs), args, kwargs)


InterpretedFunction.run = _launched

PINNED: list[StorageWeakRef] = []
"""What stands for page-locked memory. A weak reference keeps its identity, so a later tensor at the same address is not mistaken for it."""


class LateCopyStream(CopyStream):
    """Brings tensors to the host no sooner than it must: whatever is overwritten too early is seen."""

    def pinned(self, size: int) -> torch.Tensor:
        made = torch.zeros(size, dtype=torch.int32)
        PINNED.append(StorageWeakRef(made.untyped_storage()))
        return made

    def fetch(self, tensor: torch.Tensor) -> Late:
        return Late(tensor)


class Late:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def numpy(self) -> np.ndarray:
        array: np.ndarray = self._tensor.clone().numpy()
        return array
