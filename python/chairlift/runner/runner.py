"""Runs steps: the arrays that the scheduler filled go in, sampled tokens come out, at once or while the next step runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, OutOfMemory
from chairlift.models.config import load_shape
from chairlift.runner.buffers import Layout, Sampled, StepBuffers
from chairlift.runner.copy_stream import CopyStream, PendingResult
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.cuda_graphs import Graph, Graphs
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.executor import Loader, ModelExecutor, Pairs, time_swap
from chairlift.runner.graph_capture import recorder
from chairlift.runner.loader import in_rust, loader
from chairlift.runner.memory.budget import Budget
from chairlift.runner.memory.decision import Decision, asked, gib
from chairlift.runner.memory.device_memory import CudaMemory, DeviceMemory, raise_out_of_memory
from chairlift.runner.memory.machine import available_memory, usable_cores
from chairlift.runner.memory.precision import decide
from chairlift.runner.memory.sizing import StepSize, fit, fit_host
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.runner.sampling.host import Draw, Sampler
from chairlift.runner.sampling.logprobs import PIECE, packed
from chairlift.runner.sampling.matcher import Matcher
from chairlift.runner.sampling.prompt_logprobs import PromptLogprobs
from chairlift.runner.tensor_parallel.shards import part_of
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.weights import gguf_sizes
from chairlift.sampling import SamplingParams

SPLIT_CONTEXT = 1024
"""Tokens of a context that attention on a GPU does not read in one piece."""
EVERYTHING = SamplingParams(top_k=2, presence_penalty=0.5, logprobs=1)
"""What has all that there is in sampling done."""


@dataclass(slots=True)
class Launched:
    """A step under way, from `ModelRunner.launch` to `ModelRunner.collect`."""

    turn: int
    logits: torch.Tensor
    """Of the places to be sampled; `sample` may overwrite them, and nobody needs them then."""
    told: list[tuple[PromptLogprobs, int]]
    """Of whose prompts the step computes how many tokens that are to be told."""
    lines: list[PendingResult]
    """Their lines of `logprobs.score`, in some pieces."""
    graph: Graph | None = None
    """What it is a replay of."""
    draw: Draw | None = None


class ModelRunner:
    """A loaded model with its KV cache, its step buffers and its sampler.

    A step is `launch`, `sample`, `collect`. Where a device works on its own (`overlaps`), none of the first two waits for it, and one
    step may be launched while the one before is under way: it is to be sampled once that is collected, so that the host can tell
    grammars of its tokens, while the device is at the pass. `buffers` take turns then, one for each of the two.

    `max_model_len` is how long a sequence may get, `num_kv_blocks` how many blocks there are, scratch block 0 included, and
    `host_blocks` how many more can be swapped out, each of which takes `swap_ns_per_block` nanoseconds one way. A step has at most
    `max_num_batched_tokens` tokens of `max_num_seqs` sequences. `decisions` says how all that came about; for `batch_invariant` see
    `ModelExecutor`.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        on_phase: Callable[[str, float], None] = lambda name, seconds: None,
        load: Loader | None = None,
        overlaps: bool | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Loads the model of `directory`, sizes and allocates the cache, and runs a first step.

        `load`, `overlaps` and `memory` are for tests: without them the device decides. A CPU's tokens are drawn as a device's if
        `overlaps` is given.
        Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each.
        Raises ModelNotFound or UnsupportedModel for a directory that it cannot use, InvalidSetting for a setting that does not suit
        this model or machine, OutOfMemory where the device has too little.
        """
        clock = time.perf_counter()

        def phase(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            on_phase(name, now - clock)
            clock = now

        processes = config.tensor_parallel_size
        device = _device(config.device, processes)
        model = load_shape(directory, in_torch=processes > 1 or device.value != "cpu")
        self.model_config = model if processes == 1 else part_of(model, processes)
        sharing = processes if device.value == "cpu" else 1  # processes that have to share this machine's cores and memory
        threads = _threads(config.threads, sharing)
        config = replace(config, device=device.value, threads=int(threads.value), swap_space=config.swap_space // processes)
        torch.set_num_threads(int(threads.value))
        kept = (0, 0) if config.load_format == "dummy" else gguf_sizes(directory)
        usual, code = loader(config, self.model_config)
        in_torch = not in_rust(config, self.model_config)
        precision = decide(config, self.model_config, available_memory() // sharing, kept, in_torch=in_torch)
        self._memory = memory or (CudaMemory(torch.device(device.value)) if device.value == "cuda" else None)
        budget = None if self._memory is None else Budget(self._memory, config.gpu_memory_utilization)
        if budget is not None:
            budget.check(config, model, precision)
        with raise_out_of_memory("no memory for the weights: use a smaller model, or see what else is on the device; "):
            self.model: ModelExecutor = (load or usual)(config, directory, self.model_config, precision)
        self.device = self.model.device
        self.batch_invariant = self.model.batch_invariant
        phase("weights")
        self._graphs: Graphs | None = None  # made last, where the device has such
        self._draws_there = self.device.type != "cpu" or overlaps is not None
        self.overlaps = self._draws_there if overlaps is None else overlaps
        self.block_size = config.block_size
        if budget is None:
            # What is swapped out lies in the memory that the cache is fitted to.
            size = fit(config, self.model_config, precision.kv, max(0, available_memory() // sharing - config.swap_space))
        else:
            longest = config.max_model_len or self.model_config.max_position_embeddings
            size = budget.fit(config, self.model_config, precision, lambda step: self._try(step, longest))
        self.decisions = (code, device, threads, *precision.decisions, *size.decisions)
        self.max_model_len, self.num_kv_blocks = size.max_model_len, size.num_blocks
        self.max_num_seqs, self.max_num_batched_tokens = size.max_num_seqs, size.max_num_batched_tokens
        self.host_blocks = fit_host(config, self.model_config, precision.kv, available_memory() // processes)
        self.model.allocate(self.num_kv_blocks, self.block_size, self.host_blocks)
        self.swap_ns_per_block = time_swap(self.model, min(self.host_blocks, self.num_kv_blocks)) if self.host_blocks else 0
        with raise_out_of_memory("no memory for steps: lower --gpu-memory-utilization; "):
            self._equip(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len)
            phase("kv cache")
            self._warm_up(config)
        phase("warm-up")

    def _equip(self, tokens: int, seqs: int, longest: int) -> None:
        """Makes what steps of so many tokens and sequences need beside the model, with sequences of up to `longest` tokens."""
        sizes = tokens, seqs, -(-longest // self.block_size)
        courier = CopyStream(self.device)
        self._on_device = None if isinstance(self.model, CpuExecutor) else DeviceBuffers(1 + self.overlaps, *sizes, self.device, courier)
        self.buffers = [StepBuffers(Layout(*sizes))] if self._on_device is None else self._on_device.host
        self._drawer = DeviceSampler(seqs, self.model_config.vocab_size, self.device) if self._draws_there else None
        self.sampler = Sampler(seqs, self.device, self._drawer, courier)
        self._prompts: dict[int, PromptLogprobs] = {}

    def seat(
        self,
        row: int,
        params: SamplingParams,
        tokens: np.ndarray,
        prompt_len: int,
        seed: int,
        *,
        ends: Sequence[int] = (),
        matcher: Matcher | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        """A sequence takes a row: its way of sampling, its tokens so far (prompt, then generated), and its seed.

        For `ends` and `matcher` see `Sampler.seat`; with `prompt` the log-probabilities of its prompt are told as it is computed.
        """
        self._prompts.pop(row, None)
        if prompt is not None and not prompt.complete:
            self._prompts[row] = prompt
        self.sampler.seat(row, params, tokens, prompt_len, seed, ends=ends, matcher=matcher)

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block) and then back (host block, device block), before the step that needs it."""
        self.model.swap(outs, ins)

    def leave(self, row: int) -> None:
        """The sequence that has a row is at its end; a step that is under way may still have it."""
        self._prompts.pop(row, None)
        self.sampler.leave(row)

    @torch.inference_mode()
    def launch(self, turn: int, num_tokens: int, num_seqs: int, num_samples: int, num_copies: int, num_table_writes: int = 0) -> Launched:
        """Starts the step that `buffers[turn]` describe, but for its sample: copies of blocks, then the pass.

        Raises OutOfMemory where the device has too little for the pass, which may then be asked for again, without the copies.
        """
        buffers = self.buffers[turn]
        graph = self._graphs.fit(num_tokens, num_seqs) if self._graphs is not None else None
        if num_copies:
            self.model.copy(buffers.copies[: 2 * num_copies].reshape(-1, 2))
        prompts = [(row, prompt, prompt.told) for row, prompt in self._prompts.items()]
        try:
            with raise_out_of_memory():
                if graph is not None:
                    logits = graph.launch(turn, num_seqs, num_samples, num_table_writes)
                    return Launched(turn, logits, *self._score_prompts(buffers, num_seqs), graph)
                if self._on_device is not None:
                    self._on_device.load(turn, num_table_writes)
                    if self._drawer is not None:
                        self._on_device.resolve(num_tokens, self._drawer.last_token)
                self.model.forward(buffers, num_tokens, num_seqs)
                told, lines = self._score_prompts(buffers, num_seqs)
                return Launched(turn, self.model.logits(buffers.sample_at[:num_samples]), told, lines)
        except OutOfMemory:
            for row, prompt, before in prompts:
                self._prompts[row], prompt.told = prompt, before
            raise

    @torch.inference_mode()
    def sample(self, step: Launched) -> None:
        """Starts to sample a step; the one before must have been collected.

        Raises OutOfMemory where the device has too little for that. The step must then be launched again, and its rows be seated
        again: some may have counted a token.
        """
        buffers, count = self.buffers[step.turn], len(step.logits)
        places = buffers.positions[buffers.sample_at[:count]] + 1
        try:
            with raise_out_of_memory():
                step.draw = self.sampler.draw(step.logits, buffers.sample_slots[:count], places, self._on_device, step.graph)
        except OutOfMemory:
            for prompt, length in step.told:
                prompt.told -= length
            raise

    def collect(self, step: Launched) -> Sampled:
        """Waits for a step, the oldest that is under way; its buffers can be filled again."""
        assert step.draw is not None
        tokens, logprobs, details = self.sampler.take(step.draw)
        return Sampled(tokens, logprobs, details, _prompt_lines(step) if step.told else [])

    def run(self, num_tokens: int, num_seqs: int, num_samples: int, num_copies: int) -> Sampled:
        """Runs the step that the first of the buffers describe, with no other under way."""
        step = self.launch(0, num_tokens, num_seqs, num_samples, num_copies)
        self.sample(step)
        return self.collect(step)

    def wait(self) -> None:
        """Waits until the device has done all that it was given, whose results are not to be collected: buffers can be filled again.

        What memory torch keeps for later it gives back.
        """
        self.model.synchronize()
        if self._memory is not None:
            self._memory.trim()

    def close(self) -> None:
        """Ends what computes the model elsewhere; nothing may be asked afterwards."""
        self.model.close()

    def _score_prompts(self, buffers: StepBuffers, num_seqs: int) -> tuple[list[tuple[PromptLogprobs, int]], list[PendingResult]]:
        """Asks for what this step computes of prompts whose log-probabilities were asked for."""
        if not self._prompts:
            return [], []
        starts, rows = buffers.query_starts[: num_seqs + 1].tolist(), buffers.batch_slots[:num_seqs].tolist()
        chunks = [(int(buffers.positions[starts[i]]), i, self._prompts[row]) for i, row in enumerate(rows) if row in self._prompts]
        told, at, tokens = [], [], []
        # Two sequences of one request may compute neighbouring pieces of its prompt.
        for first, i, prompt in sorted(chunks, key=lambda chunk: chunk[0]):
            positions = prompt.take(first, first + starts[i + 1] - starts[i])
            told.append((prompt, len(positions)))
            at += [starts[i] + position - first for position in positions]
            tokens.append(prompt.tokens[positions.start + 1 : positions.stop + 1])
        if not at:
            return [], []
        count, size = max(prompt.count for prompt, _ in told), max(1, PIECE // self.model_config.vocab_size)
        places, targets = np.array(at, dtype=np.int32), np.concatenate(tokens)
        pieces = [slice(start, start + size) for start in range(0, len(at), size)]
        self._prompts = {row: prompt for row, prompt in self._prompts.items() if not prompt.complete}
        return told, [self.sampler.score(self.model.logits(places[piece]), targets[piece], count) for piece in pieces]

    def _try(self, step: StepSize, context: int) -> None:
        """Runs the largest step over one block of cache, with all that can be asked of sampling, and keeps nothing of it.

        `context` is how long a sequence may get.
        """
        longest = min(step.tokens, context)
        tokens, samples = min(step.tokens, step.seqs * longest), min(step.seqs, step.tokens)
        starts = np.minimum(np.arange(-(-tokens // longest) + 1) * longest, tokens)
        self._equip(step.tokens, step.seqs, context)
        self.model.allocate(1, self.block_size, 0)
        buffers, seqs = self.buffers[0], len(starts) - 1
        buffers.positions[:tokens] = np.arange(tokens) % longest
        buffers.slot_mapping[:tokens] = buffers.positions[:tokens] % self.block_size
        buffers.query_starts[: seqs + 1], buffers.context_lens[:seqs] = starts, np.diff(starts)
        buffers.batch_slots[:seqs] = np.arange(seqs)
        buffers.sample_at[:samples] = buffers.sample_slots[:samples] = np.arange(samples)
        for row in range(samples):
            self.seat(row, EVERYTHING, np.zeros(1, dtype=np.int32), 1, 0)
        for _ in range(2):  # the second has beside it what the first left: its hidden states
            self.run(tokens, seqs, samples, 0)
        self.wait()
        self.buffers, self._on_device, self._drawer = [], None, None
        self.sampler = Sampler(1, self.device)

    def _warm_up(self, config: EngineConfig) -> None:
        """Runs a prefill and a decode step in scratch block 0, so that no request waits for what torch does only once; makes graphs."""
        buffers = self.buffers[0]
        longest = min(self.block_size, len(buffers.input_ids), self.max_model_len)
        cases = [(longest, longest, SamplingParams()), (1, 1, SamplingParams(temperature=0.0))]
        if self.device.type == "cuda":
            # Kernels are compiled for the first that need them: a short chunk, a context that is read in several splits, all of sampling,
            # a copy of a block.
            cases.append((min(2, longest), min(SPLIT_CONTEXT, self.max_model_len), EVERYTHING))
        for length, context, params in cases:
            buffers.positions[:length] = np.arange(context - length, context)
            buffers.slot_mapping[:length] = np.arange(length)
            buffers.query_starts[1], buffers.context_lens[0] = length, context
            buffers.sample_at[0] = length - 1
            tokens = np.zeros(context, dtype=np.int32)
            self.seat(0, params, tokens, 1, 0, prompt=PromptLogprobs(0, tokens, 1) if params is EVERYTHING else None)
            self.run(length, 1, 1, int(params is EVERYTHING))
        self._make_graphs(config)
        for array in buffers.arrays().values():
            array.fill(0)

    @torch.inference_mode()
    def _make_graphs(self, config: EngineConfig) -> None:
        records = recorder(self.device)
        if records is None:
            return
        value, reason = "none", "several processes run a step"
        if config.enforce_eager:
            reason = asked("--enforce-eager")
        elif isinstance(self.model, TorchExecutor) and self._on_device is not None and self._drawer is not None:
            before = self._memory.read().free if self._memory is not None else 0
            try:
                self._graphs = Graphs(records, self.model, self._on_device, self._drawer, self.max_model_len)
            except RuntimeError as error:
                reason = f"the model cannot be recorded: {str(error).strip().splitlines()[0]:.200}"
            else:
                taken = gib(max(0, before - (self._memory.read().free if self._memory is not None else 0)))
                value = f"{len(self._graphs.sizes)}, of up to {self._graphs.sizes[-1]} sequences, {taken}"
                reason = "steps with a token for each sequence are launched in one go"
        self.decisions += (Decision("CUDA graphs", value, reason),)


def _prompt_lines(step: Launched) -> list[tuple[int, bytes]]:
    """What a step tells of prompts: tags, and their lines."""
    lines = np.concatenate([piece.numpy() for piece in step.lines])
    ends = np.cumsum([length for _, length in step.told]).tolist()
    return [
        (prompt.tag, packed(lines[end - length : end], prompt.count))
        for (prompt, length), end in zip(step.told, ends, strict=True)
        if length
    ]


def _device(name: str, count: int) -> Decision:
    if name != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < count:
        raise InvalidSetting(f"--tensor-parallel-size {count}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("--device cuda: torch sees no CUDA device here (use --device cpu)")
    if name != "auto":
        return Decision("device", name, asked("--device"))
    if torch.cuda.is_available():
        return Decision("device", "cuda", "torch sees a CUDA device")
    return Decision("device", "cpu", "torch sees no CUDA device")


def _threads(wanted: int | None, processes: int) -> Decision:
    if wanted is not None:
        return Decision("threads", str(wanted), asked("--threads"))
    cores, limit = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and 0 < int(limit) < cores:
        return Decision("threads", limit, asked("OMP_NUM_THREADS"))
    if processes > 1:
        return Decision("threads", str(max(1, cores // processes)), f"{cores} physical cores for {processes} processes")
    return Decision("threads", str(cores), "physical cores that this process may use")
