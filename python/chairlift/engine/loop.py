"""The engine's loop: intake, plan, run, commit, emit; synchronous, and on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from chairlift import _core
from chairlift.checkpoint.locate import locate
from chairlift.config import EngineConfig
from chairlift.errors import InvalidRequest
from chairlift.runner.runner import ModelRunner
from chairlift.sampling import SamplingParams

WATERMARK = 0.05
"""Share of the KV blocks kept free at admission: with 5 % of headroom preemption all but vanishes."""


@dataclass(slots=True)
class _Seat:
    """What the engine keeps of a request while the core has it."""

    seq: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step gave: packed arrays, one entry a token, and who started and ended in it (see `protocol.Step`)."""

    tags: bytes
    tokens: bytes
    finishes: bytes
    started: Sequence[Sequence[int]]
    ended: Sequence[Sequence[int]]


class Engine:
    """A model, its KV cache and the scheduler that shares them among requests.

    `add` and `abort` at any time between steps; `step` while `has_work`. Not thread-safe: one thread owns it.
    `on_phase(name, seconds)` is called after each phase of the start.
    """

    def __init__(self, config: EngineConfig, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        self.config = config
        self._runner = ModelRunner(config, locate(config.model, config.revision), on_phase)
        runner = self._runner
        self._scheduler = _core.Scheduler(
            num_blocks=runner.num_kv_blocks,
            block_size=config.block_size,
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_model_len=runner.max_model_len,
            prefix_caching=config.enable_prefix_caching,
            watermark=int(WATERMARK * (runner.num_kv_blocks - 1)),
        )
        self._buffers = _core.StepBuffers(**runner.buffers.arrays())
        self._live: dict[int, _Seat] = {}
        self._eos = sorted(runner.model_config.eos_token_ids)
        self.facts: dict[str, object] = {
            "model": config.model,
            "max_model_len": runner.max_model_len,
            "num_kv_blocks": runner.num_kv_blocks - 1,
            "block_size": config.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "vocab_size": runner.model_config.vocab_size,
            "eos_token_ids": self._eos,
        }

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def add(self, tag: int, prompt: Sequence[int] | np.ndarray, params: SamplingParams) -> None:
        """Queues a request under `tag`, unique among unfinished ones; raises InvalidRequest if it can never run."""
        if tag in self._live:
            raise InvalidRequest(f"request {tag} is already running", param="request_id")
        tokens = np.ascontiguousarray(prompt, dtype=np.int32)
        vocab_size = self._runner.model_config.vocab_size
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
            raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
        max_tokens = params.max_tokens if params.max_tokens is not None else max(1, self._runner.max_model_len - tokens.size)
        stop = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
        try:
            seq = self._scheduler.add(tag, tokens, max_tokens, stop, _now())
        except _core.NoNewTokens as error:
            raise InvalidRequest(str(error), param="max_tokens") from None
        except _core.TooLong as error:
            raise InvalidRequest(str(error), param="prompt", code="context_length_exceeded") from None
        except _core.Rejected as error:
            raise InvalidRequest(str(error), param="prompt") from None
        # Without a seed of its own a request still draws independently of the others.
        seed = params.seed if params.seed is not None else hash((self.config.seed, tag))
        self._live[tag] = _Seat(seq, params, seed)

    def abort(self, tag: int) -> bool:
        """Ends a request without further output and frees what it holds; False if it has ended already."""
        seat = self._live.pop(tag, None)
        return seat is not None and self._scheduler.abort(seat.seq, _now())

    def step(self) -> StepReport | None:
        """Runs the model once over whatever the scheduler chose; None when there is nothing to run.

        What the runner raises ends every request, and goes on to the caller; the engine can be used again.
        """
        plan = self._scheduler.plan(self._buffers, _now())
        if plan is None:
            return None
        started = []
        try:
            for row, seq, tag, cached_tokens, queued in plan.seated:
                tokens, prompt_len = self._scheduler.tokens(seq)
                seat = self._live[tag]
                self._runner.seat(row, seat.params, np.frombuffer(tokens, dtype=np.int32), prompt_len, seat.seed)
                started.append((tag, cached_tokens, queued))
            sampled = self._runner.run(plan.num_tokens, plan.num_seqs, plan.num_samples, plan.num_copies)
        except BaseException:
            # Aborted before the commit: then no block keeps a name that rests on a step which never ran.
            for tag in list(self._live):
                self.abort(tag)
            self._scheduler.commit(plan, np.full(plan.num_samples, -1, dtype=np.int32), _now())
            raise
        outputs = self._scheduler.commit(plan, sampled, _now())
        for ended in outputs.ended:
            del self._live[ended[0]]
        return StepReport(outputs.tags, outputs.tokens, outputs.finishes, started, outputs.ended)

    def stats(self) -> dict[str, int]:
        """The scheduler's counters since the start, and what is true now."""
        stats = self._scheduler.stats()
        return {name: getattr(stats, name) for name in _STATS}

    def check(self) -> None:
        """Panics unless every invariant of the scheduler holds; for tests."""
        self._scheduler.check()


_STATS = (
    "running",
    "waiting",
    "total_blocks",
    "free_blocks",
    "steps",
    "prompt_tokens",
    "prefix_queries",
    "prefix_hits",
    "generated_tokens",
    "preemptions",
)


def _now() -> int:
    return time.monotonic_ns() // 1000
