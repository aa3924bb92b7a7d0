"""The executor of a tensor-parallel group, in the process that schedules and samples."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chairlift.child_process import start_python
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Pairs, StepBuffers
from chairlift.runner.memory.device_memory import is_out_of_memory
from chairlift.runner.memory.precision import Precision
from chairlift.runner.tensor_parallel.worker import NO_MEMORY, pack, unpack
from chairlift.runner.torch_executor import DeviceExecutor, TorchExecutor

OUT_OF_MEMORY = (
    "a device of --tensor-parallel-size has too little memory, and the processes that share a model end together: lower "
    "--gpu-memory-utilization or --max-num-batched-tokens"
)
EXIT_SECONDS = 0.5
"""Seconds to wait for a failing worker to exit."""


class TensorParallelExecutor(DeviceExecutor):
    """A model whose layers are split among this process and worker processes, each with its own device.

    The scheduler and the sampler are in this process. It sends each call and the step's arrays to the workers, which run it on their
    part of the model. Input ids come from this process's device, because only it knows the tokens sampled last.
    """

    def __init__(self, workers: list[_Worker], group: TensorParallelGroup, part: TorchExecutor) -> None:
        self.workers, self._group, self.part = workers, group, part
        self._end = weakref.finalize(self, _end_own, workers, os.getpid())
        self.device, self.batch_invariant = part.device, part.batch_invariant

    @classmethod
    def load(cls, config: EngineConfig, directory: Path, model: ModelShape, precision: Precision) -> TensorParallelExecutor:
        """Starts the workers and loads this process's part of the weights while they load theirs (see `Loader`).

        `model` is one process's part.
        """
        size = config.tensor_parallel_size
        rendezvous = tempfile.mkdtemp(prefix="chairlift-")
        workers: list[_Worker] = []
        try:
            with _end_on_failure(workers):
                workers += [_Worker() for _ in range(1, size)]
                dtypes = {name: getattr(precision, name) for name in ("weights", "quantization", "kv", "compute", "rounds_activations")}
                for rank, worker in enumerate(workers, 1):
                    worker.call("load", rank, rendezvous, dataclasses.asdict(config), str(directory), dtypes)
                group = TensorParallelGroup.join(0, size, rendezvous, torch.device(config.device))
                part = TorchExecutor.load(config, directory, model, precision, group)
                for worker in workers:
                    worker.wait_for_reply()
        finally:
            shutil.rmtree(rendezvous, ignore_errors=True)
        return cls(workers, group, part)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates every process's KV cache."""
        with _end_on_failure(self.workers):
            self._call("allocate", num_blocks, block_size, host_blocks)
            self.part.allocate(num_blocks, block_size, host_blocks)
            for worker in self.workers:
                worker.wait_for_reply()

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self._call("copy", pairs.tolist())
        self.part.copy(pairs)

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, then back."""
        outs, ins = list(outs), list(ins)
        if outs or ins:
            self._call("swap", outs, ins)
            self.part.swap(outs, ins)

    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the loaded step."""
        step = buffers.on_device
        with _end_on_failure(self.workers):
            self._call("forward", step.sizes, *step.loaded(num_tokens, num_seqs), num_tokens, num_seqs)
            self._group.broadcast(step.input_ids[:num_tokens])
            self.part.forward(buffers, num_tokens, num_seqs)

    def logits(self, at: np.ndarray) -> torch.Tensor:
        """Logits of the last step at token positions `at`."""
        with _end_on_failure(self.workers):
            self._call("logits", at.tolist())
            return self.part.logits(at)

    def synchronize(self) -> None:
        """Waits for this process's device. The others are at most one layer behind, because each layer ends with an all-reduce."""
        self.part.synchronize()

    def close(self) -> None:
        """Ends the workers."""
        self._end()

    def _call(self, *call: Any) -> None:
        for worker in self.workers:
            worker.call(*call)


@contextlib.contextmanager
def _end_on_failure(workers: list[_Worker]) -> Iterator[None]:
    """Ends the workers if a collective call fails in this process: they would wait in the middle of it."""
    try:
        yield
    except Exception as error:
        exited = [worker for worker in workers if worker.has_exited()]
        _end(workers)
        if exited and not isinstance(error, ChairliftError):
            raise exited[0].exit_error() from error
        if is_out_of_memory(error):
            # Not an OutOfMemory, because the step cannot be split: the workers are in the middle of it.
            raise ChairliftError(f"{OUT_OF_MEMORY} ({error})") from None
        raise


def _end_own(workers: list[_Worker], owner: int) -> None:
    """Ends the workers of this process `owner`, but not in a fork of it that exits."""
    if os.getpid() == owner:
        _end(workers)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()


class _Worker:
    """A worker process (`chairlift.runner.tensor_parallel.worker`), as the main process sees it."""

    def __init__(self) -> None:
        self._pipe, worker_end = Pipe()
        # Not multiprocessing.Process, which would run the program's main module again.
        with worker_end:
            arguments = "-m", "chairlift.runner.tensor_parallel.worker", str(worker_end.fileno())
            self.process = start_python(*arguments, stdin=subprocess.DEVNULL, pass_fds=[worker_end.fileno()])

    def call(self, *call: Any) -> None:
        """Sends a call. The worker runs calls in order."""
        try:
            self._pipe.send_bytes(pack(call))
        except OSError:
            raise self.exit_error() from None

    def wait_for_reply(self) -> None:
        """Waits for the reply to a call and raises the worker's error, if any."""
        try:
            error = unpack(self._pipe.recv_bytes())
        except (OSError, EOFError):
            raise self.exit_error() from None
        if error is not None:
            raise ChairliftError(f"a worker of --tensor-parallel-size: {error}")

    def end(self) -> None:
        """Kills the process and reaps it."""
        self._pipe.close()
        self.process.kill()
        self.process.wait()

    def has_exited(self) -> bool:
        """Whether the process has exited by itself, within EXIT_SECONDS."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return self.process.returncode is not None

    def exit_error(self) -> ChairliftError:
        """The error for a process that has exited."""
        if self.process.wait() == NO_MEMORY:
            return ChairliftError(OUT_OF_MEMORY)
        return ChairliftError(f"a worker of --tensor-parallel-size exited with status {self.process.wait()}: see its output above")
