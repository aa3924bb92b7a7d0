"""A device for tests that works as late as it may, and a model on it whose every number tells where it came from.

Tensors on torch's `meta` device are its memory: torch knows their shapes, and what is asked of them is queued and done on tensors of the
CPU, in order, when the host waits for something. So whatever reads a token before it has arrived fails, and so does whatever is changed on
the host before the device has read it: copies from pinned memory are among the work that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from chairlift.runner.copy_stream import PAGEABLE, CopyStream
from chairlift.runner.torch_executor import DeviceExecutor

META, CPU = torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten


class Box:
    """What a tensor of the device will be, once the work that makes it is done."""

    value: torch.Tensor


class LazyDevice(TorchDispatchMode):
    """The device; while it is entered as a context, torch's work on `meta` tensors is its work."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self._pinned: list[torch.Tensor] = []  # kept: other memory must not take their addresses
        self._simple: set[object] = set()  # work that is not made of other work

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declares memory of the host to be read by the device itself, when it comes to that."""
        self._pinned.append(tensor)
        return tensor

    def put(self, work: Callable[[], None]) -> None:
        """Queues work."""
        self.work.append(work)

    def wait(self, until: int | None = None) -> None:
        """Does what was asked, up to the `until`-th piece."""
        until = len(self.work) if until is None else until
        with _disable_current_modes():
            while self.done < until:
                self.work[self.done]()
                self.work[self.done] = _nothing
                self.done += 1

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor of the device, made by `fill` when the device comes to that."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        box = boxed(made)
        self.put(lambda: setattr(box, "value", fill()))
        return made

    def run(self, kernel: Callable[..., torch.Tensor], shape: tuple[int, ...], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Queues a kernel of several operations, which may change what it is given, and makes an int32 tensor."""
        boxes = _mapped(_box_of, (args, kwargs))

        def made() -> torch.Tensor:
            args, kwargs = _mapped(_real, boxes)
            return kernel(*args, **kwargs)

        return self.make(shape, torch.int32, made)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        ours, target = any(tensor.is_meta for tensor in tensors), kwargs.get("device")
        if not ours and target != META:
            return func(*args, **kwargs)
        if func not in self._simple:
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
            self._simple.add(func)
        assert target in (None, META), f"{func} reads the device"
        to_us = func in (aten._to_copy.default, aten.copy_.default)
        if to_us and not args[0 if func is aten._to_copy.default else 1].is_meta:
            assert kwargs.get("non_blocking") or (func is aten.copy_.default and args[2]), "a copy that waits for the device"
            place = 0 if func is aten._to_copy.default else 1
            if not any(0 <= args[place].data_ptr() - memory.data_ptr() < memory.nbytes for memory in self._pinned):
                assert args[place].nbytes <= PAGEABLE, "a large copy from pageable memory, which waits for the device"
                args = (*args[:place], args[place].clone(), *args[place + 1 :])
        else:
            assert all(tensor.is_meta or tensor.dim() == 0 for tensor in tensors), f"{func} has a tensor of the host"
        out = func(*args, **kwargs)
        given = {id(tensor) for tensor in tensors}
        boxes = [None if id(leaf) in given else boxed(leaf) for leaf in _tensors(out)]
        boxes_of_args = _mapped(_box_of, (args, kwargs))

        def work() -> None:
            args, kwargs = _mapped(_real, boxes_of_args)
            for box, tensor in zip(boxes, _tensors(func(*args, **kwargs)), strict=True):
                if box is not None:
                    box.value = tensor

        self.put(work)
        return out


def boxed(tensor: torch.Tensor) -> Box:
    """Gives a tensor its box."""
    tensor.box = Box()  # type: ignore[attr-defined]
    return tensor.box  # type: ignore[attr-defined, no-any-return]


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """Tuples, lists and dictionaries with what `function` makes of their leaves. Torch's own takes most of a test's time."""
    if isinstance(given, tuple | list):
        values = [_mapped(function, one) for one in given]
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    if isinstance(given, dict):
        return {name: _mapped(function, one) for name, one in given.items()}
    return function(given)


def _tensors(given: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, given)
    return found


def _box_of(leaf: Any) -> Any:
    return leaf.box if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf


def _real(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Box) else CPU if isinstance(leaf, torch.device) else leaf


def _nothing() -> None:
    """What is left of work that was done."""


class LazyCopyStream(CopyStream):
    """Brings tensors to and from the lazy device, in the place of `CopyStream`."""

    def __init__(self, lazy: LazyDevice) -> None:
        super().__init__(META)
        self._lazy = lazy

    def pinned(self, size: int) -> torch.Tensor:
        return self._lazy.pin(torch.zeros(size, dtype=torch.int32))

    def _page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._lazy.pin(tensor.clone())

    def fetch(self, tensor: torch.Tensor) -> Arriving:
        return Arriving(self._lazy, tensor)


class Arriving:
    """A tensor on its way: the device works as far as it must when it is asked for."""

    def __init__(self, lazy: LazyDevice, tensor: torch.Tensor) -> None:
        self._lazy, self._until, self._box = lazy, len(lazy.work), tensor.box  # type: ignore[attr-defined]

    def numpy(self) -> np.ndarray:
        self._lazy.wait(self._until)
        array: np.ndarray = self._box.value.clone().numpy()
        return array


BROKEN = 96
"""The token that makes logits NaN, its own and those of all after it."""
_LOST = -1
_MASK = 2**40 - 1


class CellModel(DeviceExecutor):
    """A `DeviceExecutor` with one number a token for its KV: a function of the token and of all before it, so that no mistake stays unseen.

    What stands before position 0 is the same for all. It finds what is before a token through the block table that is on the device.
    """

    device, batch_invariant = META, True

    def __init__(self, lazy: LazyDevice, vocabulary: int) -> None:
        self._lazy, self._vocabulary = lazy, vocabulary

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        self._size = block_size
        self.cache = np.full((num_blocks, block_size), 7, dtype=np.int64)
        self.host = np.full((host_blocks, block_size), 8, dtype=np.int64)

    def copy(self, pairs: np.ndarray) -> None:
        moves = pairs.tolist()
        self._lazy.put(lambda: self._move(self.cache, self.cache, moves))

    def swap(self, outs: Iterable[tuple[int, int]], ins: Iterable[tuple[int, int]]) -> None:
        away, back = list(outs), list(ins)
        self._lazy.put(lambda: self._move(self.cache, self.host, away))
        self._lazy.put(lambda: self._move(self.host, self.cache, back))

    @staticmethod
    def _move(source: np.ndarray, target: np.ndarray, pairs: Iterable[tuple[int, int]]) -> None:
        for at, to in pairs:
            target[to] = source[at]

    def forward(self, buffers: Any, num_tokens: int, num_seqs: int) -> None:
        on = buffers.on_device
        names = ("input_ids", "positions", "slot_mapping", "query_starts", "context_lens", "batch_slots", "block_tables")
        boxes = {name: getattr(on, name).box for name in names}
        self._hidden = hidden = np.zeros(num_tokens, dtype=np.int64)

        def work() -> None:
            step = {name: box.value.numpy() for name, box in boxes.items()}
            flat = self.cache.reshape(-1)
            for i in range(num_seqs):
                table, first, end = step["block_tables"][step["batch_slots"][i]], step["query_starts"][i], step["query_starts"][i + 1]
                assert step["context_lens"][i] == step["positions"][end - 1] + 1
                for at in range(first, end):
                    token, position, slot = (int(step[name][at]) for name in ("input_ids", "positions", "slot_mapping"))
                    assert token >= 0, "a token that nobody resolved"
                    assert slot == table[position // self._size] * self._size + position % self._size, "another's block table"
                    before = position - 1
                    cell = flat[table[before // self._size] * self._size + before % self._size] if position else 1
                    mixed = ((int(cell) ^ (token + 1)) * 0x9E3779B1 + (int(cell) >> 7)) & _MASK
                    flat[slot] = hidden[at] = _LOST if token == BROKEN or cell == _LOST else mixed

        self._lazy.put(work)

    def logits(self, at: np.ndarray) -> torch.Tensor:
        hidden, places = self._hidden, at.copy()

        def made() -> torch.Tensor:
            cells = hidden[places, None]
            words = (cells * 0x85EBCA6B + np.arange(1, self._vocabulary + 1) * 0xC2B2AE35) & _MASK
            numbers = (((words ^ words >> 15) * 0x27D4EB2F & _MASK) >> 16).astype(np.float32) / 2**22 - 2
            return torch.from_numpy(np.where(cells == _LOST, np.float32("nan"), numbers))

        return self._lazy.make((len(places), self._vocabulary), torch.float32, made)

    def synchronize(self) -> None:
        self._lazy.wait()
