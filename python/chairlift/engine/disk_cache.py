"""The prefix cache on disk: reads blocks for new requests, and writes blocks that were computed.

A model with recurrent layers can begin only where a state is saved. Its states are files beside those of the blocks that they follow, and a
prefix is read up to the last block with such a file.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from chairlift import _core
from chairlift.engine.prefix_store import PrefixStore

log = logging.getLogger("chairlift")

WRITE_SECONDS, WRITE_BYTES = 1.0, 64 << 20
"""A working engine writes at most this many bytes in this time, so that the disk stays free for others."""
UNUSED_SHARE = 0.1
"""A working engine writes once less than this share of the blocks, or of the slots for states, is unused: new ones soon evict others."""
STATE = b"recurrent state"
"""Stands for the tokens in the name of a state's file. No block's tokens have this length."""
MAX_NAMES = 10_000
"""Names that are kept of contents that were evicted, which later contents may follow."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Blocks that were read for a prompt."""

    tokens: np.ndarray
    """Tokens of the prompt's blocks up to the last that was read."""
    first: int
    """Number of blocks before those that were read, which were in memory."""
    kv: list[memoryview]
    """KV of the blocks that were read."""
    group: str = ""
    """The group of tenants whose requests share the blocks."""
    state: memoryview | None = None
    """The recurrent state after these tokens, in a model that has such states."""


_New = tuple[Callable[[], bytes], Callable[[bytes], bool]]
"""Reads a block or a state that is not on disk, and writes it there. Blocks come in the order of their contents."""


class DiskCache:
    """Keeps the blocks of a scheduler in a store. For the engine's thread; files are read and written in others."""

    def __init__(
        self,
        scheduler: _core.Scheduler,
        blocks: _core.KvCache,
        states: _core.StateCache | None,
        num_blocks: int,
        block_size: int,
        store: PrefixStore,
    ) -> None:
        """`states` are those of a model with recurrent layers."""
        self._scheduler, self._blocks, self._states, self._store = scheduler, blocks, states, store
        self._num_blocks, self._block_size = num_blocks, block_size
        self._names: OrderedDict[int, bytes] = OrderedDict()  # the names of contents, oldest first
        self._newest = 0  # the newest content that is on disk, or was left out
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prefix-cache")
        self._writes: list[Future[bool]] = []
        self._write_due = 0.0
        self._failed = False
        self.blocks_read = self.blocks_written = 0
        scheduler.remember_users()

    @property
    def contents(self) -> str:
        """What the directory had at the start, in words."""
        return self._store.contents

    def stats(self) -> dict[str, int]:
        """Counters since the start: blocks read, written, and deleted because of the limit. States count as blocks, but for those read."""
        return {
            "disk_blocks_read": self.blocks_read,
            "disk_blocks_written": self.blocks_written,
            "disk_blocks_evicted": self._store.blocks_evicted,
        }

    def read(self, prompt: np.ndarray, group: str = "") -> Future[StoredPrefix] | None:
        """Starts reading the blocks of a group's prompt, int32, that are not in memory; None if there are none on disk."""
        whole = (len(prompt) - 1) // self._block_size
        first = self._scheduler.cached_blocks(prompt[: whole * self._block_size], group)
        # The name of a later block needs those of all before it, so most prompts are sorted out by their first block.
        if first == whole or not self._store.has(self._store.name(self._store.root(group), self._tokens(prompt, 0))):
            return None
        return self._threads.submit(self._read, prompt[: whole * self._block_size], first, group)

    def put(self, found: StoredPrefix, now: int) -> None:
        """Gives blocks that were read to the scheduler, between two steps."""
        if not found.kv or self._scheduler.cached_blocks(found.tokens, found.group) < found.first:
            return  # the blocks before them were evicted meanwhile
        cached, restored, slot = self._scheduler.restore(found.tokens, now, found.group)
        for at, block in enumerate(restored, cached):
            self._blocks.write(block, found.kv[at - found.first])
        if slot is not None and self._states is not None and found.state is not None:
            self._states.write(slot, len(found.tokens), found.state)
        self.blocks_read += len(restored)

    def write_some(self) -> None:
        """Begins to write some blocks and states, at most once a second, if new ones will soon evict cached ones."""
        now = time.monotonic()
        if now < self._write_due or not all(write.done() for write in self._writes):
            return
        self._write_due = now + WRITE_SECONDS
        self._count_writes()
        if self._scheduler.unused() < UNUSED_SHARE:
            budget = WRITE_BYTES
            for read, write in self._new():
                content = read()
                self._writes.append(self._threads.submit(write, content))
                if (budget := budget - len(content)) <= 0:
                    break

    def save(self, seconds: float) -> None:
        """Writes the blocks and states that are not on disk, for at most so long, and marks the others as used."""
        until = time.monotonic() + seconds
        wait(self._writes, seconds)
        self._count_writes()
        self._newest = 0
        for read, write in self._new():
            content = read()
            if time.monotonic() > until:
                break
            self._count(partial(write, content))

    def close(self) -> None:
        """Ends the threads. Reads and writes that have not begun are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, prompt: np.ndarray, first: int, group: str) -> StoredPrefix:
        names, kv = [self._store.root(group)], []
        for at in range(len(prompt) // self._block_size):
            names.append(self._store.name(names[at], self._tokens(prompt, at)))
        last, state = len(names) - 1, None
        if self._states is not None:
            last = max((at for at in range(first + 1, len(names)) if self._store.has(self._state_name(names[at]))), default=first)
        for at in range(last):
            if at < first:
                self._store.touch(names[at + 1])
            else:
                if (found := self._store.read(names[at + 1], names[at], self._tokens(prompt, at))) is None:
                    break
                kv.append(found)
        while self._states is not None and kv and state is None:
            name = names[first + len(kv)]
            if (state := self._store.read(self._state_name(name), name, STATE)) is None:
                kv.pop()
        return StoredPrefix(prompt[: (first + len(kv)) * self._block_size], first, kv, group, state)

    def _new(self) -> Iterator[_New]:
        """The blocks that were computed since the last one that this yielded, then the states, that are not on disk."""
        yield from self._new_blocks()
        if (states := self._states) is None:
            return
        for content, slot in self._scheduler.stored_states():
            if (block := self._names.get(content)) is None:
                continue  # its prompt has a salt, or the name was forgotten
            if self._store.has(name := self._state_name(block)):
                self._store.touch(name)
            else:
                yield partial(states.read, slot), partial(self._store.write, name, block, STATE)

    def _new_blocks(self) -> Iterator[_New]:
        for number, content, before, tokens, group in self._scheduler.stored_blocks(self._newest):
            self._newest = content
            if (parent := self._names.get(before) if before else self._store.root(group)) is None:
                continue  # the name was forgotten
            self._names[content] = name = self._store.name(parent, tokens)
            if self._store.has(name):
                self._store.touch(name)
            else:
                yield partial(self._blocks.read, number), partial(self._store.write, name, parent, tokens)
        while len(self._names) > self._num_blocks + MAX_NAMES:
            self._names.popitem(last=False)

    def _count_writes(self) -> None:
        for write in self._writes:
            if write.done() and not write.cancelled():
                self._count(write.result)
        self._writes.clear()

    def _count(self, write: Callable[[], bool]) -> None:
        """Counts a block that `write` has written. The engine goes on without one that fails; the first error is logged."""
        try:
            self.blocks_written += write()
        except Exception:
            if not self._failed:
                log.exception("--prefix-cache-dir: a block cannot be written")
            self._failed = True

    def _state_name(self, block: bytes) -> bytes:
        """The name of the file of the state after a block."""
        return self._store.name(block, STATE)

    def _tokens(self, prompt: np.ndarray, at: int) -> bytes:
        return prompt[at * self._block_size : (at + 1) * self._block_size].tobytes()
