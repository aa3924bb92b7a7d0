"""A worker process of a tensor-parallel group: `python -m chairlift.runner.tensor_parallel.worker FD`, where FD is one end of a pipe.

It runs the calls that arrive on the pipe and exits when the pipe closes.
"""

from __future__ import annotations

import os
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

from chairlift.child_process import ignore_stops
from chairlift.config import EngineConfig
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.process_log import write_log_as_parent
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.memory.device_memory import is_out_of_memory
from chairlift.runner.memory.precision import Precision
from chairlift.runner.model_shape import model_shape
from chairlift.runner.tensor_parallel.split import part_of
from chairlift.runner.torch_executor import TorchExecutor

pack: Callable[[object], bytes] = msgpack.dumps
unpack: Callable[[bytes], Any] = msgpack.loads

CALLS_WITH_REPLY = ("load", "allocate")
"""Calls whose errors are sent back. An error in another call ends the process."""


NO_MEMORY = 75
"""Exit status after an out-of-memory error: EX_TEMPFAIL of BSD's sysexits."""


class Worker:
    """This process's part of the model. It repeats the calls of `TensorParallelExecutor`."""

    part: TorchExecutor
    group: TensorParallelGroup
    buffers: DeviceBuffers | None = None

    def load(self, rank: int, rendezvous: str, settings: dict[str, Any], directory: str, precision: dict[str, Any]) -> None:
        """Joins the group and loads this process's part of the weights."""
        config = EngineConfig(**settings)
        torch.set_num_threads(config.threads or 1)
        if config.device == "cuda":
            torch.cuda.set_device(rank)
        self.group = TensorParallelGroup.join(rank, config.tensor_parallel_size, rendezvous, torch.device(config.device))
        model = part_of(model_shape(Path(directory), in_torch=True, load_format=config.load_format), config.tensor_parallel_size)
        self.part = TorchExecutor.load(config, Path(directory), model, Precision(**precision, decisions=()), self.group)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates this process's part of the KV cache."""
        self.part.allocate(num_blocks, block_size, host_blocks)

    def copy(self, pairs: list[list[int]]) -> None:
        """Copies blocks within the cache."""
        self.part.copy(np.array(pairs, dtype=np.int32))

    def swap(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        """Copies blocks to the host, then back."""
        self.part.swap(outs, ins)

    def forward(self, sizes: list[int], buffer_index: int, num_table_writes: int, packed: bytes, num_tokens: int, num_seqs: int) -> None:
        """Runs this process's part of a step, whose arrays are in `packed` (see `DeviceBuffers.loaded`)."""
        # The memory-profiling step has buffers of other sizes.
        if self.buffers is None or self.buffers.sizes != tuple(sizes):
            count, tokens, seqs, blocks = sizes
            device = self.part.device
            self.buffers = DeviceBuffers(count, tokens, seqs, blocks, device, CopyStream(device))
        self.buffers.receive(buffer_index, num_table_writes, packed, num_tokens, num_seqs)
        self.group.broadcast(self.buffers.input_ids[:num_tokens])
        self.part.forward(self.buffers.host[buffer_index], num_tokens, num_seqs)

    def logits(self, at: list[int]) -> None:
        """Computes this process's part of the vocabulary."""
        self.part.logits(np.array(at, dtype=np.int32))


def main(fd: int) -> None:
    """Runs calls until the pipe closes."""
    ignore_stops()
    write_log_as_parent()
    pipe, worker, calls = Connection(fd), Worker(), SimpleQueue[list[Any]]()
    threading.Thread(target=_receive_calls, args=(pipe, calls), daemon=True).start()
    with torch.inference_mode():
        while True:
            name, *arguments = calls.get()
            if name not in CALLS_WITH_REPLY:
                try:
                    getattr(worker, name)(*arguments)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    print(f"chairlift: {error}", file=sys.stderr, flush=True)
                    os._exit(NO_MEMORY)
                continue
            try:
                getattr(worker, name)(*arguments)
                reply = None
            except Exception as error:
                reply = f"{type(error).__name__}: {error}"
            pipe.send_bytes(pack(reply))


def _receive_calls(pipe: Connection, calls: SimpleQueue[list[Any]]) -> None:
    """Moves calls from the pipe to the queue. Ends the process when the pipe closes, even during a call."""
    while True:
        try:
            calls.put(unpack(pipe.recv_bytes()))
        except (OSError, EOFError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
