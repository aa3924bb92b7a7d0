"""Runs steps: the arrays that the scheduler filled go in, sampled tokens come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.layers.attention import plan_attention
from chairlift.layers.linear import padded_rows
from chairlift.models.config import ModelConfig
from chairlift.models.llama import Llama, Step
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.cache import KvCache, fit_cache, fit_host
from chairlift.runner.logprobs import PIECE, packed, score
from chairlift.runner.machine import available_memory, usable_cores
from chairlift.runner.matcher import Matcher
from chairlift.runner.prompt_logprobs import PromptLogprobs
from chairlift.runner.sampler import Sampler
from chairlift.runner.weights import DummyWeights, SafetensorWeights
from chairlift.sampling import SamplingParams


class ModelRunner:
    """A loaded model with its KV cache, its step buffers and its sampler.

    `max_model_len` is how long a sequence may get, `num_kv_blocks` how many blocks there are, scratch block 0 included, and
    `host_blocks` how many more can be swapped out, each of which takes `swap_ns_per_block` nanoseconds one way.
    """

    def __init__(self, config: EngineConfig, directory: Path, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """Loads the model of `directory`, sizes and allocates the cache, and runs a first step.

        Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each. Raises ModelNotFound or UnsupportedModel for a
        directory that it cannot use, InvalidSetting for a setting that does not suit this model or machine.
        """
        clock = time.perf_counter()

        def phase(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            on_phase(name, now - clock)
            clock = now

        if torch.get_num_threads() > usable_cores():
            torch.set_num_threads(usable_cores())
        self.model_config = ModelConfig.load(directory)
        self.device = _device(config.device)
        self.dtype = _dtype(self.model_config, self.device)
        with torch.inference_mode():
            self.model = self._load(config, directory)
            phase("weights")
            size = fit_cache(config, self.model_config, self.dtype, available_memory(self.device))
            self.max_model_len, self.num_kv_blocks = size.max_model_len, size.num_blocks
            self.block_size = config.block_size
            self.host_blocks = fit_host(config, self.model_config, self.dtype, available_memory(torch.device("cpu")))
            self.cache = KvCache(self.model_config, self.num_kv_blocks, self.block_size, self.dtype, self.device, self.host_blocks)
            self.swap_ns_per_block = self.cache.time_swap() if self.host_blocks else 0
            blocks = -(-self.max_model_len // self.block_size)
            self.buffers = StepBuffers(config.max_num_batched_tokens, config.max_num_seqs, blocks)
            self.sampler = Sampler(config.max_num_seqs, self.device)
        self._prompts: dict[int, PromptLogprobs] = {}
        self.prompt_logprobs: list[tuple[int, bytes]] = []
        """What the last `run` told of prompts: tags, and lines of `logprobs.score`; for one tag in the order of its tokens."""
        self.windows = frozenset(self.model_config.windows)
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

    @torch.inference_mode()
    def swap(self, outs: Iterable[tuple[int, int]], ins: Iterable[tuple[int, int]]) -> None:
        """Copies blocks to the host (device block, host block) and then back (host block, device block), before the step that needs it."""
        self.cache.swap(outs, ins)

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
        buffers, device = self.buffers, self.device
        if num_copies:
            self.cache.copy(buffers.copies[: 2 * num_copies].reshape(-1, 2))
        attention = plan_attention(
            buffers.slots[:num_tokens],
            buffers.query_starts[: num_seqs + 1],
            buffers.context_lens[:num_seqs],
            buffers.block_tables[buffers.rows[:num_seqs]],
            heads=self.model_config.num_heads,
            windows=self.windows,
            cache=self.cache.tensor[0],
        )
        # Token and position 0 fill the padding: any valid ones would do, nobody looks at those rows.
        padded = np.zeros((2, padded_rows(num_tokens)), dtype=np.int32)
        padded[0, :num_tokens] = buffers.input_ids[:num_tokens]
        padded[1, :num_tokens] = buffers.positions[:num_tokens]
        input_ids, positions = torch.from_numpy(padded).to(device)
        sample_at = buffers.sample_at[:num_samples]
        hidden = self.model.forward(Step(input_ids, positions, attention), self.cache.tensor)
        self.prompt_logprobs = self._score_prompts(hidden, num_seqs) if self._prompts else []
        logits = self.model.logits(hidden, torch.from_numpy(sample_at).to(device))
        return self.sampler.sample(logits.float(), buffers.sample_rows[:num_samples], buffers.positions[sample_at] + 1)

    def _score_prompts(self, hidden: torch.Tensor, num_seqs: int) -> list[tuple[int, bytes]]:
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
        places = torch.split(torch.tensor(at, device=self.device), size)
        targets = torch.split(torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device), size)
        pieces = zip(places, targets, strict=True)
        lines = np.concatenate([score(self.model.logits(hidden, place).float(), target, count) for place, target in pieces])
        ends = np.cumsum([length for _, length in told])
        self._prompts = {row: prompt for row, prompt in self._prompts.items() if not prompt.complete}
        return [
            (prompt.tag, packed(lines[end - length : end], prompt.count))
            for (prompt, length), end in zip(told, ends.tolist(), strict=True)
            if length
        ]

    def _load(self, config: EngineConfig, directory: Path) -> Llama:
        if config.load_format == "dummy":
            return Llama(self.model_config, DummyWeights(config.seed, self.dtype, self.device))
        weights = SafetensorWeights(directory, self.dtype, self.device)
        model = Llama(self.model_config, weights)
        weights.finish(frozenset({"lm_head.weight"}) if self.model_config.tie_word_embeddings else frozenset())
        return model

    def _warm_up(self) -> None:
        """Runs a prefill and a decode step in scratch block 0, so that no request waits for what torch does only once."""
        buffers = self.buffers
        for length, temperature in ((min(32, len(buffers.input_ids), self.max_model_len), 1.0), (1, 0.0)):
            buffers.positions[:length] = np.arange(length)
            buffers.slots[:length] = np.arange(length) % self.block_size
            buffers.query_starts[1] = buffers.context_lens[0] = length
            buffers.sample_at[0] = length - 1
            self.seat(0, SamplingParams(temperature=temperature), np.zeros(1, dtype=np.int32), 1, 0)
            self.run(length, 1, 1, 0)
        for array in buffers.arrays().values():
            array.fill(0)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("--device cuda: torch sees no CUDA device here (use --device cpu)")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """fp32 on CPU, where halves are several times slower; what the checkpoint is in elsewhere."""
    if device.type == "cpu":
        return torch.float32
    return {"float16": torch.float16, "float32": torch.float32}.get(model.dtype or "", torch.bfloat16)
