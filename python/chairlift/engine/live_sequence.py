"""Live sequences of `LLM`: the verbs of `AsyncLiveSequence`, for callers without an event loop."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from chairlift.engine.async_live_sequence import AsyncLiveSequence
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.local_engine import LocalEngine


class LiveSequence(AsyncLiveSequence):
    """A prompt and what was generated or appended since, whose KV stays in the cache between two generations.

    `LLM.open` makes one. Use it with `with`, or call `drop`. It is dropped by itself if it is not used for the length of its lease. Under
    memory pressure its KV may be evicted. It is then computed again. `LLM.generate` accepts several live sequences as prompts and runs
    them in one batch. Methods raise SequenceDropped after `drop`, SequenceBusy while the sequence is generated, and InvalidRequest.
    """

    _engine: LocalEngine

    def fork(self, count: int = 1) -> list[Self]:  # type: ignore[override]
        """Returns `count` copies. They share all computed KV. Only a partly filled last block is copied, when a copy goes on.

        Appended tokens are computed first. A sequence that is being generated is copied as it was before. Raises TooManySequences, and
        then makes no copy.
        """
        return self._engine.wait(super().fork(count))

    def append(self, content: str | list[int]) -> None:  # type: ignore[override]
        """Appends text or token ids. The next generation computes only these. Raises InvalidRequest beyond the context length."""
        self._engine.wait(super().append(content))

    def compute(self) -> None:  # type: ignore[override]
        """Computes what was appended, so that the next generation starts at once."""
        self._engine.wait(super().compute())

    def generate(  # type: ignore[override]
        self, params: SamplingParams | None = None, *, scheduling: Scheduling | None = None
    ) -> RequestOutput:
        """Generates from here and keeps the tokens, those of a stop string or stop token included. See `LLM.generate`.

        If the generation fails, or misses a deadline, the sequence stays as it was.
        """
        return self._engine.wait(super().generate(params, scheduling=scheduling))

    def stream(  # type: ignore[override]
        self, params: SamplingParams | None = None, *, scheduling: Scheduling | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Like `generate`, in increments. If the generator is closed early, the sequence stays as it was."""
        return self._engine.iterate(super().stream(params, scheduling=scheduling))

    def check_engine(self, engine: LocalEngine) -> None:
        """Raises InvalidRequest if the sequence belongs to another engine."""
        if self._engine is not engine:
            raise InvalidRequest("this sequence belongs to another LLM", param="prompt")

    def check_dropped(self) -> None:
        """Raises EngineClosed after the LLM's `close` and after a fork, and SequenceDropped after `drop` or the end of the lease."""
        self._engine.check_ready()
        super().check_dropped()

    def drop(self) -> None:
        """Frees the sequence's memory and aborts its generation, if any, which raises SequenceDropped. May be called repeatedly."""
        if not self._engine.forked:
            super().drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()
