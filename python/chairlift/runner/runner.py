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
from chairlift.errors import InvalidSetting
from chairlift.models.config import load_shape
from chairlift.runner.buffers import Layout, Sampled, StepBuffers
from chairlift.runner.courier import Arrival, Courier
from chairlift.runner.cpu_model import CpuModel
from chairlift.runner.decision import Decision, asked
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.device_sampler import DeviceSampler
from chairlift.runner.loader import in_rust, loader
from chairlift.runner.logprobs import PIECE, packed
from chairlift.runner.machine import available_memory, usable_cores
from chairlift.runner.matcher import Matcher
from chairlift.runner.model import DeviceModel, Loader, Pairs, time_swap
from chairlift.runner.precision import decide
from chairlift.runner.prompt_logprobs import PromptLogprobs
from chairlift.runner.sampler import Draw, Sampler
from chairlift.runner.shards import part_of
from chairlift.runner.sizing import fit, fit_host
from chairlift.runner.weights import blocks_kept
from chairlift.sampling import SamplingParams

SPLIT_CONTEXT = 1024
"""Tokens of a context that attention on a GPU does not read in one piece."""


@dataclass(slots=True)
class Launched:
    """A step under way, from `ModelRunner.launch` to `ModelRunner.collect`."""

    turn: int
    logits: torch.Tensor
    """Of the places to be sampled; `sample` may overwrite them, and nobody needs them then."""
    told: list[tuple[PromptLogprobs, int]]
    """Of whose prompts the step computes how many tokens that are to be told."""
    lines: list[Arrival]
    """Their lines of `logprobs.score`, in some pieces."""
    draw: Draw | None = None


class ModelRunner:
    """A loaded model with its KV cache, its step buffers and its sampler.

    A step is `launch`, `sample`, `collect`. Where a device works on its own (`overlaps`), none of the first two waits for it, and one
    step may be launched while the one before is under way: it is to be sampled once that is collected, so that the host can tell
    grammars of its tokens, while the device is at the pass. `buffers` take turns then, one for each of the two.

    `max_model_len` is how long a sequence may get, `num_kv_blocks` how many blocks there are, scratch block 0 included, and
    `host_blocks` how many more can be swapped out, each of which takes `swap_ns_per_block` nanoseconds one way. A step has at most
    `max_num_batched_tokens` tokens of `max_num_seqs` sequences. `decisions` says how all that came about; for `batch_invariant` see
    `DeviceModel`.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        on_phase: Callable[[str, float], None] = lambda name, seconds: None,
        load: Loader | None = None,
        overlaps: bool | None = None,
    ) -> None:
        """Loads the model of `directory`, sizes and allocates the cache, and runs a first step.

        `load` and `overlaps` are for tests: without them the device decides. A CPU's tokens are drawn as a device's if `overlaps` is given.
        Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each.
        Raises ModelNotFound or UnsupportedModel for a directory that it cannot use, InvalidSetting for a setting that does not suit
        this model or machine.
        """
        clock = time.perf_counter()

        def phase(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            on_phase(name, now - clock)
            clock = now

        model = load_shape(directory)
        processes = config.tensor_parallel_size
        self.model_config = model if processes == 1 else part_of(model, processes)
        device = _device(config.device, processes)
        sharing = processes if device.value == "cpu" else 1  # processes that have to share this machine's cores and memory
        threads = _threads(config.threads, sharing)
        config = replace(config, device=device.value, threads=int(threads.value), swap_space=config.swap_space // processes)
        torch.set_num_threads(int(threads.value))
        kept = (0, 0) if config.load_format == "dummy" else blocks_kept(directory)
        usual, code = loader(config, self.model_config)
        in_torch = not in_rust(config, self.model_config)
        precision = decide(config, self.model_config, available_memory() // sharing, kept, in_torch=in_torch)
        self.model: DeviceModel = (load or usual)(config, directory, self.model_config, precision)
        self.device = self.model.device
        self.batch_invariant = self.model.batch_invariant
        phase("weights")
        # On a CPU what is swapped out lies in the memory that the cache is fitted to.
        swapped = config.swap_space if self.device.type == "cpu" else 0
        available = _available(self.device, sharing)
        size = fit(config, self.model_config, precision.kv, max(0, available - swapped))
        self.decisions = (code, device, threads, *precision.decisions, *size.decisions)
        self.max_model_len, self.num_kv_blocks = size.max_model_len, size.num_blocks
        self.max_num_seqs, self.max_num_batched_tokens = size.max_num_seqs, size.max_num_batched_tokens
        self.block_size = config.block_size
        self.host_blocks = fit_host(config, self.model_config, precision.kv, available_memory() // processes)
        self.model.allocate(self.num_kv_blocks, self.block_size, self.host_blocks)
        self.swap_ns_per_block = time_swap(self.model, min(self.host_blocks, self.num_kv_blocks)) if self.host_blocks else 0
        there = self.device.type != "cpu" or overlaps is not None
        self.overlaps = there if overlaps is None else overlaps
        sizes = self.max_num_batched_tokens, self.max_num_seqs, -(-self.max_model_len // self.block_size)
        courier = Courier(self.device)
        self._on_device = None if isinstance(self.model, CpuModel) else DeviceBuffers(1 + self.overlaps, *sizes, self.device, courier)
        self.buffers = [StepBuffers(Layout(*sizes))] if self._on_device is None else self._on_device.host
        self._drawer = DeviceSampler(self.max_num_seqs, self.model_config.vocab_size, self.device) if there else None
        self.sampler = Sampler(self.max_num_seqs, self.device, self._drawer, courier)
        self._prompts: dict[int, PromptLogprobs] = {}
        phase("kv cache")
        self._warm_up()
        phase("warm-up")

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
        """Starts the step that `buffers[turn]` describe, but for its sample: copies of blocks, then the pass."""
        buffers = self.buffers[turn]
        if self._on_device is not None:
            self._on_device.load(turn, num_table_writes)
            if self._drawer is not None:
                self._on_device.resolve(num_tokens, self._drawer.last_token)
        if num_copies:
            self.model.copy(buffers.copies[: 2 * num_copies].reshape(-1, 2))
        self.model.forward(buffers, num_tokens, num_seqs)
        told, lines = self._score_prompts(buffers, num_seqs) if self._prompts else ([], [])
        return Launched(turn, self.model.logits(buffers.sample_at[:num_samples]), told, lines)

    @torch.inference_mode()
    def sample(self, step: Launched) -> None:
        """Starts to sample a step; the one before must have been collected."""
        buffers, count = self.buffers[step.turn], len(step.logits)
        places = buffers.positions[buffers.sample_at[:count]] + 1
        step.draw = self.sampler.draw(step.logits, buffers.sample_rows[:count], places, self._on_device)

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
        """Waits until the device has done all that it was given, whose results are not to be collected: buffers can be filled again."""
        self.model.synchronize()

    def _score_prompts(self, buffers: StepBuffers, num_seqs: int) -> tuple[list[tuple[PromptLogprobs, int]], list[Arrival]]:
        """Asks for what this step computes of prompts whose log-probabilities were asked for."""
        starts, rows = buffers.query_starts[: num_seqs + 1].tolist(), buffers.rows[:num_seqs].tolist()
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

    def _warm_up(self) -> None:
        """Runs a prefill and a decode step in scratch block 0, so that no request waits for what torch does only once."""
        buffers = self.buffers[0]
        longest = min(self.block_size, len(buffers.input_ids), self.max_model_len)
        cases = [(longest, longest, 1.0), (1, 1, 0.0)]
        if self.device.type == "cuda":
            # Kernels are compiled for the first that need them: a short chunk, and a context that is read in several splits.
            cases.append((min(2, longest), min(SPLIT_CONTEXT, self.max_model_len), 1.0))
        for length, context, temperature in cases:
            buffers.positions[:length] = np.arange(context - length, context)
            buffers.slots[:length] = np.arange(length)
            buffers.query_starts[1], buffers.context_lens[0] = length, context
            buffers.sample_at[0] = length - 1
            self.seat(0, SamplingParams(temperature=temperature), np.zeros(1, dtype=np.int32), 1, 0)
            self.run(length, 1, 1, 0)
        for array in buffers.arrays().values():
            array.fill(0)


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


def _available(device: torch.device, processes: int) -> int:
    """Bytes that the KV cache and what steps need may take in each process."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory() // processes
