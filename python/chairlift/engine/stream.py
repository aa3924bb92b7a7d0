"""A request that a coroutine reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
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


class Stream(Request):
    """Passes a request's output from the engine to one coroutine.

    A future wakes the coroutine, which costs a third of an asyncio.Event.
    """

    raises = True
    """Whether a choice that fails raises an error. Otherwise its last increment has the finish reason "error" or "deadline"."""
    max_taken, max_taken_singly = 4096, 64
    """Tokens of a request that are taken at once, and those of one with stop strings or log-probabilities: many wait for a slow reader."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tag: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        sequence: HeldSequence | None = None,
        whole: bool = False,
    ) -> None:
        """`whole` wakes the reader only when all choices have ended, if there is no stop string to look for."""
        super().__init__(tokenizer, tag, prompt_token_ids, params, scheduling, arrived=arrived, sequence=sequence)
        self.expected_tokens = len(prompt_token_ids)
        """Tokens of the prompt that its engine is expected to compute."""
        self.on_computed: Callable[[], None] | None = None
        """Called when an engine has computed the prompt, or the request has ended there."""
        self.request_id: str | None = None
        """The id under which `explain` knows the request; None if it does not."""
        self.answered = False
        """Whether the answer came from another engine, so that closing the request is no abort."""
        self._news = False
        self._more = False
        """Whether the last increments left tokens."""
        singly = params.stop or params.logprobs is not None
        self._most = max(1, (self.max_taken_singly if singly else self.max_taken) // len(self.choices))
        """Tokens of each choice that are taken at once."""
        self._whole_only = whole and not params.stop
        self._waiter: asyncio.Future[None] | None = None
        self._error: ChairliftError | None = None

    def begin(self, spent: Mapping[str, float] | None = None) -> EngineRequest:
        """See `Request.begin`. Increments that were not read before the last engine ended can be read now."""
        self._error, self._news = None, self.num_received > 0
        return super().begin(spent)

    def wake(self) -> None:
        """Wakes the reader, unless it waits for the whole output."""
        if self._whole_only and self._error is None:
            for choice in self.choices:
                if not choice.complete:
                    return
        self._news = True
        self._wake_reader()

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
            await self._wait()
        elif self._more:
            await self._give_way()
        if self._error is not None:
            self._news = self._more = False
            raise self._error
        self._news = False  # before the tokens are taken, because another thread may bring more at any time
        outputs = self.take(self._most)
        self._more = self.num_untaken > 0
        if self._more:
            self._news = True
        if self.some_over and self.raises:
            self._raise_for_choices(outputs)
        return outputs

    async def _give_way(self) -> None:
        """Lets other coroutines run before more tokens are taken."""
        await asyncio.sleep(0)

    def _wait(self) -> Awaitable[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_for_choices(self, outputs: list[RequestOutput]) -> None:
        """Raises the error of a choice that has failed, if any."""
        if any(choice.starved for choice in self.choices):
            raise OutOfMemory("the device has too little memory for this request just now: try again later, or with a shorter prompt")
        if (refusal := next((choice.refusal for choice in self.choices if choice.refusal is not None), None)) is not None:
            raise refusal
        if any(output.finish_reason == "error" for output in outputs):
            raise RequestFailed("the model gave no usable answer for this request: its logits are not finite, or could not be sampled")
