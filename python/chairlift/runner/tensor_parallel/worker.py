"""A process with a part of a model that several compute together: `python -m chairlift.runner.tensor_parallel.worker FD`, an end of a pipe.

It does what it is told, and ends when nobody is there to tell.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgpack
import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import load_shape
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.memory.device_memory import is_shortage
from chairlift.runner.memory.precision import Precision
from chairlift.runner.tensor_parallel.shards import part_of
from chairlift.runner.torch_executor import TorchExecutor

pack: Callable[[object], bytes] = msgpack.dumps
unpack: Callable[[bytes], Any] = msgpack.loads

ANSWERED = ("load", "allocate")
"""The calls that may fail for reasons of their own, and whose end is waited for. What fails later ends the process."""


NO_MEMORY = 75
"""The status of a process that ended because its device had too little memory: EX_TEMPFAIL of BSD's sysexits."""


class Worker:
    """A `ModelExecutor` beside another process's (see `TensorParallelExecutor`), whose calls it makes after it."""

    _part: TorchExecutor
    _peers: TensorParallelGroup
    _buffers: DeviceBuffers | None = None

    def load(self, rank: int, place: str, settings: dict[str, Any], directory: str, precision: dict[str, str]) -> None:
        """Meets the others and loads its part of the weights."""
        config = EngineConfig(**settings)
        torch.set_num_threads(config.threads or 1)
        if config.device == "cuda":
            torch.cuda.set_device(rank)
        self._peers = TensorParallelGroup.meet(rank, config.tensor_parallel_size, place, torch.device(config.device))
        model = part_of(load_shape(Path(directory), in_torch=True), config.tensor_parallel_size)
        self._part = TorchExecutor.load(config, Path(directory), model, Precision(**precision, decisions=()), self._peers)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes its part of the KV cache."""
        self._part.allocate(num_blocks, block_size, host_blocks)

    def copy(self, pairs: list[list[int]]) -> None:
        """Copies blocks within the cache."""
        self._part.copy(np.array(pairs, dtype=np.int32))

    def swap(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        """Copies blocks to the host, and then back."""
        self._part.swap(outs, ins)

    def forward(self, sizes: list[int], turn: int, num_table_writes: int, packed: bytes, num_tokens: int, num_seqs: int) -> None:
        """Runs its part of a step, whose arrays are those of the other process's buffers."""
        # They are made anew after the step that is tried for its memory.
        if self._buffers is None or self._buffers.sizes != tuple(sizes):
            turns, tokens, seqs, blocks = sizes
            device = self._part.device
            self._buffers = DeviceBuffers(turns, tokens, seqs, blocks, device, CopyStream(device))
        self._buffers.receive(turn, num_table_writes, packed)
        self._peers.share(self._buffers.input_ids[:num_tokens])
        self._part.forward(self._buffers.host[turn], num_tokens, num_seqs)

    def logits(self, at: list[int]) -> None:
        """Computes its part of the vocabulary for others."""
        self._part.logits(np.array(at, dtype=np.int32))


def main(fd: int) -> None:
    """Does what is told until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts the program means its first process
    pipe, worker, calls = Connection(fd), Worker(), SimpleQueue[list[Any]]()
    threading.Thread(target=_take_in, args=(pipe, calls), daemon=True).start()
    with torch.inference_mode():
        while True:
            name, *arguments = calls.get()
            if name not in ANSWERED:
                try:
                    getattr(worker, name)(*arguments)
                except RuntimeError as error:
                    if not is_shortage(error):
                        raise
                    print(f"chairlift: {error}", file=sys.stderr, flush=True)
                    os._exit(NO_MEMORY)
                continue
            try:
                getattr(worker, name)(*arguments)
                answer = None
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            pipe.send_bytes(pack(answer))


def _take_in(pipe: Connection, calls: SimpleQueue[list[Any]]) -> None:
    """Takes calls from the pipe, and ends the process with it, whatever that is at."""
    while True:
        try:
            calls.put(unpack(pipe.recv_bytes()))
        except (OSError, EOFError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
