"""Live sequences of asyncio programs: text that stays computed between generations and can be forked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from chairlift.engine.held_sequences import COMPUTE, HeldSequence, HeldSequences
from chairlift.errors import RequestFailed
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.engine_info import EngineInfo
    from chairlift.engine.frames import Frame
    from chairlift.engine.model_client import ModelClient

EXPIRY_SECONDS = 1.0
"""Interval at which sequences whose leases have ended are dropped."""


class AsyncSequences(HeldSequences):
    """The live sequences of an event loop's client. They outlive the engine's process: the next one computes their tokens again."""

    def __init__(self, info: Callable[[], EngineInfo], send: Callable[[Frame], None]) -> None:
        super().__init__(info, send)
        self._expiring: asyncio.TimerHandle | None = None

    def enter(self, sequences: Sequence[HeldSequence], tenant: str) -> list[int]:
        """See `HeldSequences.enter`. Leases are checked at intervals from now on."""
        handles = super().enter(sequences, tenant)
        if self._expiring is None:
            self._check_leases()
        return handles

    def _check_leases(self) -> None:
        """Drops sequences whose leases have ended, now and at intervals while there are sequences."""
        self.expire()
        self._expiring = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._check_leases) if len(self) else None


class AsyncLiveSequence(HeldSequence):
    """A prompt and what was generated or appended since, whose KV stays in the cache between two generations.

    `AsyncEngine.open` makes one. See `LiveSequence`: the verbs, limits and errors are the same. Use it with `async with`, or call `drop`.
    A new engine computes its tokens again.
    """

    def __init__(self, engine: ModelClient, held: HeldSequences, token_ids: Sequence[int], scheduling: Scheduling, lease: float) -> None:
        super().__init__(held, token_ids, scheduling, lease)
        self._engine = engine

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._engine.tokenizer.decode(self.token_ids)

    async def fork(self, count: int = 1) -> list[Self]:
        """Returns `count` copies. They share all computed KV. Only a partly filled last block is copied, when a copy goes on.

        Appended tokens are computed first. A sequence that is being generated is copied as it was before. Raises TooManySequences, and
        then makes no copy.
        """
        if not self.busy:
            await AsyncLiveSequence.compute(self)
        return self.fork_now(count)

    def fork_now(self, count: int) -> list[Self]:
        """Like `fork`, but each copy computes on its own what was appended and not computed."""
        return self._forks(count)

    async def append(self, content: str | list[int]) -> None:
        """Appends text or token ids. The next generation computes only these. Raises InvalidRequest beyond the context length."""
        self.append_tokens(await self._engine.tokens(content, param="content", add_special_tokens=False))

    async def compute(self) -> None:
        """Computes what was appended, so that the next generation starts at once."""
        if self.uncomputed:
            with self.computing() as prompt:
                output = await self._run(prompt, COMPUTE, self._scheduling)
            if output.finish_reason not in ("stop", "length"):
                raise RequestFailed(f"the sequence could not be computed: {output.finish_reason}")

    async def generate(self, params: SamplingParams | None = None, *, scheduling: Scheduling | None = None) -> RequestOutput:
        """Generates from here and keeps the tokens, those of a stop string or stop token included.

        `scheduling` replaces the sequence's own, for the same tenant. If the generation fails, misses a deadline or is cancelled, the
        sequence stays as it was. Errors as in `AsyncEngine.generate`.
        """
        with self.generating() as prompt:
            return await self._run(prompt.tolist(), self._params(params), self.own_scheduling(scheduling))

    async def stream(
        self, params: SamplingParams | None = None, *, scheduling: Scheduling | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, in increments. If the iterator is closed early, the sequence stays as it was."""
        with self.generating() as prompt:
            params, scheduling = self._params(params), self.own_scheduling(scheduling)
            stream = await self._engine.prepare_tokens(prompt.tolist(), params, scheduling, sequence=self)
            async with aclosing(self._engine.run(stream)) as outputs:
                async for output in outputs:
                    yield output

    def drop(self) -> None:
        """Frees the sequence's memory and aborts its generation, if any, which raises SequenceDropped. May be called repeatedly."""
        if (tag := self.release()) is not None:
            self._engine.abort_dropped(tag)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()

    def _params(self, given: SamplingParams | None) -> SamplingParams:
        return self.params(self._engine.default_params() if given is None else given)

    async def _run(self, prompt: Sequence[int], params: SamplingParams, scheduling: Scheduling) -> RequestOutput:
        stream = await self._engine.prepare_tokens(prompt, params, scheduling, sequence=self, whole=True)
        (output,) = await self._engine.collect(stream)
        return output
