"""Decode steps as CUDA graphs: a step of each size is captured once and replayed in one launch."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from chairlift.layers.device_attention import DecodeLists, DevicePlan
from chairlift.layers.recurrent import DecodeStates
from chairlift.runner.buffers import StepSizes
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.sampling.device import DeviceSampler, SamplingVariant
from chairlift.runner.torch_executor import TorchExecutor

MAX_SIZE = 512
"""Sequences of the largest graph. A larger step takes the device longer than its launches take the host."""
PLAIN, TRUNCATED = SamplingVariant(truncated=False, count_rows=0), SamplingVariant(truncated=True, count_rows=0)
"""The variants that are captured. A capture waits for the device, so all happen at start-up."""


def sizes(max_seqs: int) -> list[int]:
    """The numbers of sequences for which graphs are captured, ascending. A step takes the next larger, as in vLLM and SGLang."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_SIZE, 32))
    largest = min(max_seqs, MAX_SIZE)
    return [*(size for size in usual if size < largest), largest]


class Graph:
    """Decode steps of up to `size` sequences: a graph of the forward pass, and graphs of the plain and the truncated sample.

    Inputs (the step's arrays, the attention work and the sampling parameters) are copied to fixed addresses before a replay. Logits and
    tokens are outside the memory pool that all graphs share: logits are valid until the next pass, tokens until the next sample.
    """

    def __init__(self, size: int, shared: _Shared) -> None:
        """Captures the pass and the samples of a step of padding rows that is on the device."""
        self.size, self._shared = size, shared
        shared.recorder.warm(self._run)
        self._pass = shared.recorder.record(self._run)
        self._hidden = shared.model.hidden
        self._samples = {variant: self._capture(variant) for variant in (PLAIN, TRUNCATED)}

    def launch(self, buffer_index: int, step: StepSizes) -> torch.Tensor:
        """Starts the forward pass of a step and returns the logits of its samples, fp32 [samples, vocabulary]."""
        shared, buffers = self._shared, self._shared.buffers.host[buffer_index]
        shared.buffers.pad(buffer_index, step.seqs, step.samples, self.size)
        shared.buffers.load(buffer_index, step.table_writes)
        lengths = buffers.query_starts[: step.seqs + 1], buffers.context_lens[: step.seqs]
        shared.lists.fill(lengths)
        if shared.states is not None:
            shared.states.fill(lengths, buffers.state_slots[: step.seqs], buffers.state_saves[: 3 * step.state_saves].reshape(-1, 3))
        self._pass()
        shared.model.hidden = self._hidden
        return shared.logits[: step.samples]

    def sample(self, variant: SamplingVariant, num_samples: int) -> torch.Tensor:
        """Starts the sample of the step launched last: int32 [num_samples]. Its logits may have been changed since the launch.

        A sample with penalties is not captured, because the table of counts may grow and move.
        """
        if replay := self._samples.get(variant):
            replay()
        else:
            self._draw(variant)
        return self._shared.tokens[:num_samples]

    def _run(self) -> None:
        shared, size, step = self._shared, self.size, self._shared.buffers
        step.resolve(size, shared.sampler.last_token)
        arrays = (
            step.slot_mapping[:size],
            step.query_starts[: size + 1],
            step.context_lens[:size],
            step.batch_slots[:size],
            step.block_tables,
        )
        no_prefill = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
        cache, states = shared.model.recurrent_states, None
        if cache is not None and shared.states is not None:
            states = shared.states.step(step.query_starts[: size + 1], step.positions[:size], cache.layers)
        # Each run has its own plan, so that its scratch memory comes from the shared pool.
        shared.model.run(step, size, DevicePlan(*arrays, no_prefill, shared.lists.work(size)), states=states)
        shared.logits[:size].copy_(shared.model.network.logits(shared.model.hidden, step.sample_at[:size]))

    def _capture(self, variant: SamplingVariant) -> CapturedGraph:
        def draw() -> None:
            self._draw(variant)

        self._shared.recorder.warm(draw)
        return self._shared.recorder.record(draw)

    def _draw(self, variant: SamplingVariant) -> None:
        shared, size, step = self._shared, self.size, self._shared.buffers
        positions = step.positions[step.sample_at[:size]] + 1
        shared.tokens[:size].copy_(shared.sampler.sample(shared.logits[:size], step.sample_slots[:size], positions, variant))


def capture(
    recorder: GraphCapture, model: TorchExecutor, buffers: DeviceBuffers, sampler: DeviceSampler, max_model_len: int
) -> list[Graph]:
    """Captures graphs of all sizes, the largest first, so that the smaller ones fit into its memory. Returns them ascending.

    Raises RuntimeError if the model cannot be captured. It can still run eagerly.
    """
    from chairlift.kernels.errors import TritonError  # imports triton

    all_sizes = sizes(buffers.sizes[2])
    largest, device = all_sizes[-1], model.device
    logits = torch.zeros(largest, sampler.vocabulary, device=device)
    tokens = torch.zeros(largest, dtype=torch.int32, device=device)
    lists = DecodeLists(largest, max_model_len, model.windows, device, at_once=model.splits_at_once)
    states = DecodeStates(largest, buffers.state_slots, device) if buffers.state_slots else None
    shared = _Shared(recorder, model, buffers, sampler, lists, states, logits, tokens)
    buffers.pad(0, 0, 0, largest)
    buffers.load(0, 0)
    try:
        return [Graph(size, shared) for size in reversed(all_sizes)][::-1]
    except TritonError as error:
        # The last line has the reason; those before it are the kernel's source.
        raise RuntimeError(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}") from error


def smallest_graph(graphs: Sequence[Graph], num_tokens: int, num_seqs: int) -> Graph | None:
    """The smallest graph for a decode step of `num_seqs` sequences; None if a sequence has several tokens or there are too many."""
    if num_tokens != num_seqs or not graphs or num_seqs > graphs[-1].size:
        return None
    return graphs[bisect_left(graphs, num_seqs, key=lambda graph: graph.size)]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Objects that all graphs of an engine use, at fixed addresses."""

    recorder: GraphCapture
    model: TorchExecutor
    buffers: DeviceBuffers
    sampler: DeviceSampler
    lists: DecodeLists
    states: DecodeStates | None
    logits: torch.Tensor
    tokens: torch.Tensor


CapturedGraph = Callable[[], None]
"""Replays captured work on the current stream."""


class GraphCapture:
    """Captures graphs, with a stream of its own. They share one memory pool, so no two may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], object]) -> None:
        """Runs `work` eagerly, for its one-time initialisation. Raises RuntimeError if it waits for the device.

        It runs twice on the capture stream, so that the stream's workspaces are allocated outside a graph's pool.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            # Checked before the capture, because a device is hard to recover from a failed capture.
            with _waiting_raises():
                work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], object]) -> CapturedGraph:
        """Captures what `work` launches, without running it. Its inputs must keep their addresses.

        Other threads may use the device meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: CapturedGraph = graph.replay
        return replay


def graph_capture(device: torch.device) -> GraphCapture | None:
    """The graph capture of a device; None if it has no graphs."""
    return GraphCapture(device) if device.type == "cuda" else None


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """Raises RuntimeError if the host waits for the device inside the context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch: "is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
