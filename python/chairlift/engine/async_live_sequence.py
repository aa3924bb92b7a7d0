"""Live sequences of `AsyncEngine`: the same verbs as those of `LLM`, as coroutines where they wait for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from chairlift.engine.arguments import text_or_ids
from chairlift.engine.frames import DropSequence, ForkSequence, Frame, SetPriority
from chairlift.engine.held_sequences import COMPUTE, Call, HeldSequence, HeldSequences
from chairlift.engine.request import joined
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine
    from chairlift.engine.replicated_engine import ReplicatedEngine

EXPIRY_SECONDS = 1.0
"""Interval at which sequences whose leases have ended are dropped."""


class AsyncSequences:
    """The live sequences of an `AsyncEngine`. They outlive the engine's process: the next one computes their tokens again.

    `send` sends a frame to the engine, if it is ready.
    """

    def __init__(self, engine: AsyncEngine | ReplicatedEngine, send: Callable[[Frame], None]) -> None:
        self._engine = engine
        self._send = send
        self._held = HeldSequences(lambda: engine.info)
        self._expiring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def open(self, token_ids: list[int], scheduling: Scheduling, lease: float) -> AsyncLiveSequence:
        """Opens a sequence, which is not computed yet. Raises InvalidRequest and TooManySequences."""
        self._held.expire(self)
        sequence = AsyncLiveSequence(self._engine, lambda use: use(self), self._held, token_ids, scheduling, lease)
        if self._expiring is None:
            self._expire()
        return sequence

    def fork_sequence(self, handle: int, forks: Sequence[int]) -> None:
        """Lets the engine share the KV of `handle` with `forks`."""
        self._send(ForkSequence(handle, list(forks)))

    def drop_sequence(self, handle: int) -> None:
        """Lets the engine free the KV of `handle`."""
        self._send(DropSequence(handle))

    def set_priority(self, tag: int, priority: int) -> None:
        """Moves a running request to another class."""
        self._send(SetPriority(tag, priority))

    def _expire(self) -> None:
        """Drops sequences whose leases have ended, now and at intervals while there are sequences."""
        self._held.expire(self)
        self._expiring = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._expire) if self._held else None


class AsyncLiveSequence(HeldSequence):
    """A prompt and what was generated or appended since, whose KV stays in the cache between two generations.

    `AsyncEngine.open` makes one. See `LiveSequence`: the verbs, limits and errors are the same. Use it with `async with`, or call `drop`.
    A new engine computes its tokens again.
    """

    def __init__(
        self,
        engine: AsyncEngine | ReplicatedEngine,
        call: Call,
        held: HeldSequences,
        token_ids: list[int],
        scheduling: Scheduling,
        lease: float,
    ) -> None:
        super().__init__(held, call, token_ids, scheduling, lease)
        self._engine = engine

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._engine.tokenizer.decode(self.token_ids)

    async def fork(self, count: int = 1) -> list[AsyncLiveSequence]:
        """Returns `count` copies. They share all computed KV. Only a partly filled last block is copied, when a copy goes on.

        Appended tokens are computed first. A sequence that is being generated is copied as it was before. Raises TooManySequences, and
        then makes no copy.
        """
        if not self.busy:
            await self.compute()
        return self.fork_now(count)

    def fork_now(self, count: int) -> list[AsyncLiveSequence]:
        """Like `fork`, but each copy computes on its own what was appended and not computed."""
        forks: list[AsyncLiveSequence] = self._call(lambda engine: self._forks(count, engine))
        return forks

    async def append(self, content: str | list[int]) -> None:
        """Appends text or token ids. The next generation computes only these. Raises InvalidRequest beyond the context length."""
        given = text_or_ids(content)
        self._append(await self._engine.encode(given, add_special_tokens=False) if isinstance(given, str) else given)

    async def compute(self) -> None:
        """Computes what was appended, so that the next generation starts at once."""
        if self.uncomputed:
            with self.computing() as prompt:
                await self._run(prompt, COMPUTE)

    async def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Generates from here and keeps the tokens, those of a stop string or stop token included.

        If the generation fails, misses a deadline or is cancelled, the sequence stays as it was. Errors as in `AsyncEngine.generate`.
        """
        with self.generating() as prompt:
            return await self._run(prompt, self.params(self._engine.default_params() if params is None else params))

    async def stream(self, params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, in increments. If the iterator is closed early, the sequence stays as it was."""
        with self.generating() as prompt:
            async with aclosing(self._outputs(prompt, self.params(self._engine.default_params() if params is None else params))) as outputs:
                async for output in outputs:
                    yield output

    def drop(self) -> None:
        """Frees the sequence's memory and aborts its generation, if any, which raises SequenceDropped. May be called repeatedly."""
        if (tag := self._call(self.release)) is not None:
            self._engine.abort_dropped(tag)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()

    async def _outputs(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        stream = await self._engine.prepare(prompt, params, self._scheduling, sequence=self)
        async with aclosing(self._engine.run(stream)) as outputs:
            async for output in outputs:
                yield output

    async def _run(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        whole = None
        async with aclosing(self._outputs(prompt, params)) as outputs:
            async for output in outputs:
                whole = joined(whole, output)
        assert whole is not None  # the last increment has a finish reason
        return whole
