"""Runs steps of a model in torch: on a CUDA device it samples there, replays CUDA graphs and handles a lack of memory."""

from __future__ import annotations

import logging

import numpy as np
import torch

from chairlift import _core
from chairlift.errors import ChairliftError, OutOfMemory
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import StepBuffers, StepSizes
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.cuda_graphs import Graph, capture, graph_capture, smallest_graph
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.executor import Logits
from chairlift.runner.memory.decision import Decision, asked, gib
from chairlift.runner.memory.device_memory import DeviceMemory, raise_out_of_memory
from chairlift.runner.memory.sizing import Size
from chairlift.runner.runner import Launched, ModelRunner
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.runner.sampling.host import HostSampler
from chairlift.runner.torch_executor import DeviceExecutor, TorchExecutor

log = logging.getLogger("chairlift")


class TorchRunner(ModelRunner):
    """The `Runner` of a model in torch."""

    model: DeviceExecutor

    def __init__(
        self,
        model: DeviceExecutor,
        model_config: ModelShape,
        memory: DeviceMemory,
        size: Size,
        block_size: int,
        *,
        overlaps: bool,
        samples_on_device: bool,
    ) -> None:
        """Allocates step buffers and the sampler. The model's KV cache must be allocated before the first step."""
        copy_stream = CopyStream(model.device)
        seqs, max_blocks = size.max_num_seqs, -(-size.max_model_len // block_size)
        sizes = 1 + overlaps, size.max_num_batched_tokens, seqs, max_blocks
        buffers = DeviceBuffers(*sizes, model.device, copy_stream, size.state_slots).host
        device_sampler = DeviceSampler(seqs, model_config.vocab_size, model.device, copy_stream) if samples_on_device else None
        sampler = device_sampler or HostSampler(seqs, _core.ThreadPool(torch.get_num_threads()))
        super().__init__(model, model_config, size, block_size, buffers, sampler)
        self.device, self.overlaps = model.device, overlaps
        self.compiles_kernels = model.device.type == "cuda"
        self._memory, self._device_sampler = memory, device_sampler
        self.graphs: list[Graph] = []
        """Captured decode steps, by size; empty without CUDA graphs."""

    @torch.inference_mode()
    def launch(self, buffer_index: int, sizes: StepSizes) -> Launched:
        """Starts the block copies and the forward pass of a step (see `Runner.launch`)."""
        prompts = [(slot, prompt, prompt.scored) for slot, prompt in self._prompts.items()]
        try:
            with raise_out_of_memory():
                return super().launch(buffer_index, sizes)
        except OutOfMemory as error:
            for slot, prompt, before in prompts:
                self._prompts[slot], prompt.scored = prompt, before
            raise self._unless_states(error) from None

    @torch.inference_mode()
    def sample(self, step: Launched) -> None:
        """Starts sampling a launched step (see `Runner.sample`)."""
        try:
            with raise_out_of_memory():
                super().sample(step)
        except OutOfMemory as error:
            for prompt, length in step.scored_prompts:
                prompt.scored -= length
            raise self._unless_states(error) from None

    def _unless_states(self, error: OutOfMemory) -> ChairliftError:
        """The error of a step that can be repeated. With recurrent states it cannot: some layers' have seen its tokens."""
        if not self.model_config.state_bytes:
            return error
        return ChairliftError(f"a step of a model with recurrent layers ran out of memory: lower --gpu-memory-utilization ({error})")

    def wait(self) -> None:
        """Waits until the device is idle and returns memory that torch holds in reserve. Steps in flight are discarded."""
        super().wait()
        self._memory.trim()

    @torch.inference_mode()
    def capture_graphs(self, *, enforce_eager: bool) -> tuple[Decision, ...]:
        """Captures CUDA graphs of decode steps, on a device that has them, and returns the decision about them."""
        recorder = graph_capture(self.device)
        if recorder is None:
            return ()
        if enforce_eager:
            return (Decision("CUDA graphs", "none", asked("--enforce-eager")),)
        if not isinstance(self.model, TorchExecutor) or self._device_sampler is None:
            return (Decision("CUDA graphs", "none", "several processes run a step"),)
        before = self._memory.read().free
        try:
            self.graphs = capture(recorder, self.model, self.buffers[0].on_device, self._device_sampler, self.max_model_len)
        except RuntimeError as error:
            reason = f"the model cannot be recorded: {str(error).strip().splitlines()[0]:.200}"
            log.warning("decode steps run without CUDA graphs, and slower: %s. Please report this with `chairlift doctor`", reason)
            return (Decision("CUDA graphs", "none", reason),)
        taken = gib(max(0, before - self._memory.read().free))
        value = f"{len(self.graphs)}, of up to {self.graphs[-1].size} sequences, {taken}"
        return (Decision("CUDA graphs", value, "decode steps are launched in one call"),)

    def _forward(self, buffers: StepBuffers, sizes: StepSizes) -> Launched:
        # Graphs are captured without adapters: a step that has any is launched without a graph.
        adapters = self.model.adapters
        has_adapters = adapters is not None and adapters.in_step(buffers, sizes.seqs)
        graph = None if has_adapters else smallest_graph(self.graphs, sizes.tokens, sizes.seqs)
        if graph is not None:
            logits = graph.launch(buffers.index, sizes)
            return Launched(buffers.index, logits, *self._score_prompts(buffers, sizes.seqs), graph)
        buffers.on_device.load(buffers.index, sizes.table_writes)
        if self._device_sampler is not None:
            self._device_sampler.resolve(buffers, sizes.tokens)
        return super()._forward(buffers, sizes)

    def _logits(self, at: np.ndarray) -> Logits:
        logits = self.model.logits(at)
        return logits.contiguous().numpy() if self._device_sampler is None else logits
