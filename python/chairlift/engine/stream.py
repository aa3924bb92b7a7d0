"""A request that a coroutine reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Rejected
from chairlift.engine.request import Request
from chairlift.errors import ChairliftError, InvalidRequest, OutOfMemory, QueueFull, RequestFailed
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.held_sequences import HeldSequence
    from chairlift.tokenizer import Tokenizer


MAX_TAKEN, MAX_TAKEN_SINGLY = 4096, 256
"""Tokens of a request that are taken at once, and those of one with stop strings or log-probabilities: many wait for a slow reader."""


class Stream(Request):
    """Passes a request's output from the engine to one coroutine.

    A future wakes the coroutine, which costs a third of an asyncio.Event.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tag: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        sequence: HeldSequence | None = None,
    ) -> None:
        super().__init__(tokenizer, tag, prompt_token_ids, params, scheduling, arrived=arrived, sequence=sequence)
        self.expected_tokens = len(prompt_token_ids)
        """Tokens of the prompt that its engine is expected to compute."""
        self.on_computed: Callable[[], None] | None = None
        """Called when an engine has computed the prompt, or the request has ended there."""
        self._news = False
        self._more = False
        """Whether the last increments left tokens."""
        singly = params.stop or params.logprobs is not None
        self._most = max(1, (MAX_TAKEN_SINGLY if singly else MAX_TAKEN) // len(self.choices))
        """Tokens of each choice that are taken at once."""
        self._waiter: asyncio.Future[None] | None = None
        self._error: ChairliftError | None = None

    def begin(self, spent: Mapping[str, float] | None = None) -> EngineRequest:
        """See `Request.begin`. Increments that were not read before the last engine ended can be read now."""
        self._error, self._news = None, self.num_received > 0
        return super().begin(spent)

    def wake(self) -> None:
        """Wakes the reader."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ChairliftError) -> None:
        """Ends the request with an error, which the reader gets before output that it has not read."""
        self._error = error
        self.wake()

    def reject(self, frame: Rejected) -> None:
        """Ends the request with the engine's rejection."""
        match frame.error:
            case "InvalidRequest":
                self.fail(InvalidRequest(frame.message, param=frame.param, code=frame.code))
            case "QueueFull":
                self.fail(QueueFull(frame.message, retry_after=frame.retry_after or 0.0))
            case _:
                self.fail(RequestFailed(frame.message))

    async def next(self) -> list[RequestOutput]:
        """Waits for the next increments, which may be none. Raises the error that ended the request, if any."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        elif self._more:
            await asyncio.sleep(0)
        if self._error is not None:
            self._news = self._more = False
            raise self._error
        outputs = self.take(self._most)
        self._news = self._more = self.num_untaken > 0
        if self.some_over:
            self._raise_for_choices(outputs)
        return outputs

    def _raise_for_choices(self, outputs: list[RequestOutput]) -> None:
        """Raises the error of a choice that has failed, if any."""
        if any(choice.starved for choice in self.choices):
            raise OutOfMemory("the device has too little memory for this request just now: try again later, or with a shorter prompt")
        if (refusal := next((choice.refusal for choice in self.choices if choice.refusal is not None), None)) is not None:
            raise refusal
        if any(output.finish_reason == "error" for output in outputs):
            raise RequestFailed("the model gave no usable answer for this request: its logits are not finite, or could not be sampled")
