"""Runs steps: the arrays that the scheduler filled go in, sampled tokens come out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.cpu_model import CpuModel
from chairlift.runner.decision import Decision, asked
from chairlift.runner.logprobs import PIECE, packed, score
from chairlift.runner.machine import available_memory, usable_cores
from chairlift.runner.matcher import Matcher
from chairlift.runner.model import DeviceModel, Loader, Pairs, time_swap
from chairlift.runner.precision import decide
from chairlift.runner.prompt_logprobs import PromptLogprobs
from chairlift.runner.sampler import Sampler
from chairlift.runner.sizing import fit, fit_host
from chairlift.runner.torch_model import TorchModel
from chairlift.runner.weights import blocks_kept
from chairlift.sampling import SamplingParams


class ModelRunner:
    """A loaded model with its KV cache, its step buffers and its sampler.

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
    ) -> None:
        """Loads the model of `directory`, sizes and allocates the cache, and runs a first step.

        `load` is for tests: without it the device decides. Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each.
        Raises ModelNotFound or UnsupportedModel for a directory that it cannot use, InvalidSetting for a setting that does not suit
        this model or machine.
        """
        clock = time.perf_counter()

        def phase(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            on_phase(name, now - clock)
            clock = now

        self.model_config = ModelConfig.load(directory)
        device, threads = _device(config.device), _threads(config.threads)
        config = replace(config, device=device.value, threads=int(threads.value))
        torch.set_num_threads(int(threads.value))
        kept = (0, 0) if config.load_format == "dummy" else blocks_kept(directory)
        precision = decide(config, self.model_config, available_memory(), kept)
        load = load or (CpuModel.load if config.device == "cpu" else TorchModel.load)
        self.model: DeviceModel = load(config, directory, self.model_config, precision)
        self.device = self.model.device
        self.batch_invariant = self.model.batch_invariant
        phase("weights")
        # On a CPU what is swapped out lies in the memory that the cache is fitted to.
        swapped = config.swap_space if self.device.type == "cpu" else 0
        size = fit(config, self.model_config, precision.kv, max(0, _available(self.device) - swapped))
        self.decisions = (device, threads, *precision.decisions, *size.decisions)
        self.max_model_len, self.num_kv_blocks = size.max_model_len, size.num_blocks
        self.max_num_seqs, self.max_num_batched_tokens = size.max_num_seqs, size.max_num_batched_tokens
        self.block_size = config.block_size
        self.host_blocks = fit_host(config, self.model_config, precision.kv, available_memory())
        self.model.allocate(self.num_kv_blocks, self.block_size, self.host_blocks)
        self.swap_ns_per_block = time_swap(self.model, min(self.host_blocks, self.num_kv_blocks)) if self.host_blocks else 0
        blocks = -(-self.max_model_len // self.block_size)
        self.buffers = StepBuffers(self.max_num_batched_tokens, self.max_num_seqs, blocks)
        self.sampler = Sampler(self.max_num_seqs, self.device)
        self._prompts: dict[int, PromptLogprobs] = {}
        self.prompt_logprobs: list[tuple[int, bytes]] = []
        """What the last `run` told of prompts: tags, and lines of `logprobs.score`; for one tag in the order of its tokens."""
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

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities of the tokens of the last `run`, 0 where they were not asked for; empty if nobody asked."""
        return self.sampler.logprobs

    @property
    def details(self) -> dict[int, bytes]:
        """What the sampler has to say of those tokens beyond that: see `Sampler.details`."""
        return self.sampler.details

    @torch.inference_mode()
    def run(self, num_tokens: int, num_seqs: int, num_samples: int, num_copies: int) -> np.ndarray:
        """Runs the step that the buffers describe; int32 [num_samples]: the sampled tokens, -1 where logits are not finite."""
        buffers = self.buffers
        if num_copies:
            self.model.copy(buffers.copies[: 2 * num_copies].reshape(-1, 2))
        self.model.forward(buffers, num_tokens, num_seqs)
        self.prompt_logprobs = self._score_prompts(num_seqs) if self._prompts else []
        sample_at = buffers.sample_at[:num_samples]
        return self.sampler.sample(self.model.logits(sample_at), buffers.sample_rows[:num_samples], buffers.positions[sample_at] + 1)

    def _score_prompts(self, num_seqs: int) -> list[tuple[int, bytes]]:
        """The lines of `score` for what this step computes of prompts whose log-probabilities were asked for."""
        starts, rows = self.buffers.query_starts[: num_seqs + 1].tolist(), self.buffers.rows[:num_seqs].tolist()
        chunks = [(int(self.buffers.positions[starts[i]]), i, self._prompts[row]) for i, row in enumerate(rows) if row in self._prompts]
        told, at, tokens = [], [], []
        # Two sequences of one request may compute neighbouring pieces of its prompt.
        for first, i, prompt in sorted(chunks, key=lambda chunk: chunk[0]):
            positions = prompt.take(first, first + starts[i + 1] - starts[i])
            told.append((prompt, len(positions)))
            at += [starts[i] + position - first for position in positions]
            tokens.append(prompt.tokens[positions.start + 1 : positions.stop + 1])
        if not at:
            return []
        count, size = max(prompt.count for prompt, _ in told), max(1, PIECE // self.model_config.vocab_size)
        places = np.array(at, dtype=np.int32)
        targets = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device)
        pieces = [slice(start, start + size) for start in range(0, len(at), size)]
        lines = np.concatenate([score(self.model.logits(places[piece]), targets[piece], count) for piece in pieces])
        ends = np.cumsum([length for _, length in told])
        self._prompts = {row: prompt for row, prompt in self._prompts.items() if not prompt.complete}
        return [
            (prompt.tag, packed(lines[end - length : end], prompt.count))
            for (prompt, length), end in zip(told, ends.tolist(), strict=True)
            if length
        ]

    def _warm_up(self) -> None:
        """Runs a prefill and a decode step in scratch block 0, so that no request waits for what torch does only once."""
        buffers = self.buffers
        for length, temperature in ((min(self.block_size, len(buffers.input_ids), self.max_model_len), 1.0), (1, 0.0)):
            buffers.positions[:length] = np.arange(length)
            buffers.slots[:length] = np.arange(length)
            buffers.query_starts[1] = buffers.context_lens[0] = length
            buffers.sample_at[0] = length - 1
            self.seat(0, SamplingParams(temperature=temperature), np.zeros(1, dtype=np.int32), 1, 0)
            self.run(length, 1, 1, 0)
        for array in buffers.arrays().values():
            array.fill(0)


def _device(name: str) -> Decision:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("--device cuda: torch sees no CUDA device here (use --device cpu)")
    if name != "auto":
        return Decision("device", name, asked("--device"))
    if torch.cuda.is_available():
        return Decision("device", "cuda", "torch sees a CUDA device")
    return Decision("device", "cpu", "torch sees no CUDA device")


def _threads(wanted: int | None) -> Decision:
    if wanted is not None:
        return Decision("threads", str(wanted), asked("--threads"))
    cores, limit = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and 0 < int(limit) < cores:
        return Decision("threads", limit, asked("OMP_NUM_THREADS"))
    return Decision("threads", str(cores), "physical cores that this process may use")


def _available(device: torch.device) -> int:
    """Bytes that the KV cache and what steps need may take."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()
