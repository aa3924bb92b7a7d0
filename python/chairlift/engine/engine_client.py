"""Runs requests in one engine, over any transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from chairlift.engine.async_live_sequence import AsyncSequences
from chairlift.engine.frames import Abort, Rejected, StepOutputs
from chairlift.engine.model_client import ModelClient
from chairlift.engine.questions import Remembered, RememberedRequest
from chairlift.engine.stream import Stream, deliver
from chairlift.errors import ChairliftError, DeadlineMissed, EngineDead, SequenceDropped
from chairlift.outputs import RequestOutput
from chairlift.sampling import MAX_SEQUENCES
from chairlift.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.engine_request import EngineRequest
    from chairlift.engine.held_sequences import HeldSequences


class EngineClient(ModelClient):
    """Runs requests in one engine. A subclass sends frames to the engine and passes the engine's frames on."""

    def __init__(self, config: EngineConfig, tags: Iterator[int], held: type[HeldSequences] = AsyncSequences) -> None:
        super().__init__(config, tags, held)
        self._tokenizer: Tokenizer | None = None
        self._streams: dict[int, Stream] = {}  # by tag, those that have not ended
        self._remembered: Remembered[RememberedRequest] = Remembered()
        self.prompt_tokens = 0
        """Tokens of the prompts that the engine is expected to compute, of requests without a first token."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineDead before the first start is complete."""
        if self._tokenizer is None:
            raise EngineDead("the engine is not ready yet")
        return self._tokenizer

    @property
    def open_sequences(self) -> int:
        """Sequences that were sent to the engine and have not ended."""
        return len(self._streams)

    async def run(
        self,
        stream: Stream,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `ModelClient.run`."""
        self.prompt_tokens += stream.expected_tokens
        computed = False
        try:
            self.check_ready()
            stream.on_start = on_start
            request = stream.begin(spent)
            stream.request_id = request_id
            if request_id is not None:
                self._remembered.add(request_id, RememberedRequest(stream.tags, stream.timelines()))
            unfinished = stream.unfinished()
            self._streams.update(dict.fromkeys(unfinished, stream))
            if unfinished:
                await self._add(request)
            while not stream.over:
                outputs = await stream.next()
                if not computed:
                    computed = True
                    self._computed(stream)
                if stream.some_over:
                    self._leave(stream.finished(), stopped=True)
                for output in outputs:
                    if output.finish_reason == "deadline" and stream.raises:
                        stream.missed_deadline, output.finish_reason = True, None
                    if output.finish_reason is not None or output.token_ids or output.text:
                        yield output
        finally:
            if not computed:
                self._computed(stream)
            self._leave(stream.tags, stopped=stream.answered)
        if stream.missed_deadline:
            raise DeadlineMissed(
                f"the request was dropped after {stream.num_tokens} tokens of output, since it missed its deadline or would surely have "
                "missed it: allow more time, or ask for fewer tokens",
                prompt_tokens=len(stream.prompt_token_ids),
                completion_tokens=stream.num_tokens,
            )

    def abort_dropped(self, tag: int) -> None:
        """Ends the request that continues a live sequence, because that was dropped."""
        if (stream := self._streams.get(tag)) is not None:
            self._end(stream, SequenceDropped("the sequence was dropped while it was generated"))

    @abstractmethod
    async def _add(self, request: EngineRequest) -> None:
        """Sends a request to the engine, and waits until it has read most of what was sent."""

    @abstractmethod
    def _abort(self, frame: Abort) -> None:
        """Sends the frame to the engine, if there is one."""

    def _deliver(self, step: StepOutputs) -> None:
        """Passes a step's tokens to their requests."""
        for stream in deliver(step, self._streams):
            stream.wake()

    def _reject(self, frame: Rejected) -> None:
        """Ends a request that the engine rejects."""
        # The first choices of a resumed request may have ended.
        tags = range(frame.tag, frame.tag + MAX_SEQUENCES)
        if (stream := next((self._streams[tag] for tag in tags if tag in self._streams), None)) is not None:
            for tag in stream.tags:
                self._streams.pop(tag, None)
            stream.reject(frame)

    def _end(self, stream: Stream, error: ChairliftError) -> None:
        """Aborts a request, whose reader gets the error."""
        self._leave(stream.tags)
        stream.fail(error)

    def _computed(self, stream: Stream) -> None:
        """Counts a request's prompt no more."""
        self.prompt_tokens -= stream.expected_tokens
        if stream.on_computed is not None:
            stream.on_computed()

    def _leave(self, tags: Iterable[int], *, stopped: bool = False) -> None:
        """Forgets sequences and aborts those that still run; `stopped` if a stop string was found."""
        if running := [tag for tag in tags if self._streams.pop(tag, None) is not None]:
            self._abort(Abort(running, stopped))
