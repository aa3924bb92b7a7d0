"""A model that several processes compute together, as the one that samples sees it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.executor import Pairs
from chairlift.runner.memory.device_memory import is_shortage
from chairlift.runner.memory.precision import Precision
from chairlift.runner.tensor_parallel.worker import NO_MEMORY, pack, unpack
from chairlift.runner.torch_executor import TorchExecutor

TOO_LITTLE = (
    "a device of --tensor-parallel-size has too little memory, and the processes that share a model end together: lower "
    "--gpu-memory-utilization or --max-num-batched-tokens"
)
LAST_MOMENT = 0.5
"""Seconds in which a process ends that is at its end."""


class TensorParallelExecutor:
    """A `ModelExecutor` whose layers are cut among this process and workers, each with a device of its own.

    There is one scheduler and one sampler, here: workers are told each call, with the arrays that the scheduler filled, and make it on
    their part of the model. Input tokens come to them from this process's device, where the last ones are known first.
    """

    def __init__(self, workers: list[_Worker], peers: TensorParallelGroup, part: TorchExecutor) -> None:
        self._workers, self._peers, self._part = workers, peers, part
        # Waited for as well, or the system would keep what is left of them for as long as this process lives.
        self._end = weakref.finalize(self, _end, workers)
        self.device, self.batch_invariant = part.device, part.batch_invariant

    @classmethod
    def load(cls, config: EngineConfig, directory: Path, model: ModelShape, precision: Precision) -> TensorParallelExecutor:
        """Starts the workers, and loads this process's part of the weights while they load theirs (see `Loader`).

        `model` is a process's part already.
        """
        size = config.tensor_parallel_size
        place = tempfile.mkdtemp(prefix="chairlift-")
        workers: list[_Worker] = []
        try:
            with _together(workers):
                workers += [_Worker() for _ in range(1, size)]
                chosen = {name: getattr(precision, name) for name in ("weights", "quantization", "kv", "compute")}
                for rank, worker in enumerate(workers, 1):
                    worker.tell("load", rank, place, dataclasses.asdict(config), str(directory), chosen)
                peers = TensorParallelGroup.meet(0, size, place, torch.device(config.device))
                part = TorchExecutor.load(config, directory, model, precision, peers)
                for worker in workers:
                    worker.hear()
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return cls(workers, peers, part)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes every process's KV cache."""
        with _together(self._workers):
            self._tell("allocate", num_blocks, block_size, host_blocks)
            self._part.allocate(num_blocks, block_size, host_blocks)
            for worker in self._workers:
                worker.hear()

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self._tell("copy", pairs.tolist())
        self._part.copy(pairs)

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, and then back."""
        outs, ins = list(outs), list(ins)
        if outs or ins:
            self._tell("swap", outs, ins)
            self._part.swap(outs, ins)

    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step that the buffers describe."""
        there = buffers.on_device
        with _together(self._workers):
            self._tell("forward", there.sizes, *there.sent(), num_tokens, num_seqs)
            self._peers.share(there.input_ids[:num_tokens])
            self._part.forward(buffers, num_tokens, num_seqs)

    def logits(self, at: np.ndarray) -> torch.Tensor:
        """What the last step says of the tokens after those at places `at`."""
        with _together(self._workers):
            self._tell("logits", at.tolist())
            return self._part.logits(at)

    def synchronize(self) -> None:
        """Waits for this process's device: since layers end in sums, the others' have as good as done the same."""
        self._part.synchronize()

    def close(self) -> None:
        """Ends the workers."""
        self._end()

    def _tell(self, *call: Any) -> None:
        for worker in self._workers:
            worker.tell(*call)


@contextlib.contextmanager
def _together(workers: list[_Worker]) -> Iterator[None]:
    """Ends the workers if what all do together fails here: they would wait in the middle of it, and take the next for the rest of it."""
    try:
        yield
    except Exception as error:
        gone = [worker for worker in workers if worker.ended()]
        _end(workers)
        if gone and not isinstance(error, ChairliftError):
            raise gone[0].gone() from error
        if is_shortage(error):
            # Not to be tried again in pieces: the others are in the middle of it.
            raise ChairliftError(f"{TOO_LITTLE} ({error})") from None
        raise


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()


class _Worker:
    """A worker process (`chairlift.runner.tensor_parallel.worker`), seen from the main process. It ends with this object."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        # No child of multiprocessing's: that would run the program's own main module again.
        # It finds modules where this process does, and not in its working directory.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", "-m", "chairlift.runner.tensor_parallel.worker", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
            )

    def tell(self, *call: Any) -> None:
        """Sends a call, which waits there for those before it."""
        try:
            self._pipe.send_bytes(pack(call))
        except OSError:
            raise self.gone() from None

    def hear(self) -> None:
        """Waits until the worker has done what it answers to; raises what it could not."""
        try:
            error = unpack(self._pipe.recv_bytes())
        except (OSError, EOFError):
            raise self.gone() from None
        if error is not None:
            raise ChairliftError(f"a worker of --tensor-parallel-size: {error}")

    def end(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def ended(self) -> bool:
        """Whether the process has ended by itself; asked when something went wrong, so it gets a moment for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_MOMENT)
        return self._process.returncode is not None

    def gone(self) -> ChairliftError:
        """What is to be said of a process that has ended."""
        if self._process.wait() == NO_MEMORY:
            return ChairliftError(TOO_LITTLE)
        return ChairliftError(f"a worker of --tensor-parallel-size ended with status {self._process.wait()}: its last words are above")
