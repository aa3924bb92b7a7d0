"""A request on the client side, which a coroutine reads: the choices of its answer, and what the engine sends of them."""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chairlift.engine import clock
from chairlift.engine.choice import Choice
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Rejected, StepOutputs
from chairlift.errors import ChairliftError, InvalidRequest, OutOfMemory, QueueFull, RequestFailed
from chairlift.outputs import RequestOutput, Timeline, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.held_sequences import HeldSequence
    from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

_PARTS = 256
"""Increments of a choice that are kept before they are joined."""


class Stream:
    """A running request, whose output one coroutine reads. Its choices have `tag` and the numbers after it.

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
        """`arrived` is when its first byte was read, on the monotonic clock; now by default. It continues `sequence`, if given.

        `whole` wakes the reader only when all choices have ended, if there is no stop string to look for.
        """
        self._sent = EngineRequest.of(tag, prompt_token_ids, params, scheduling)
        arrived = time.monotonic() if arrived is None else arrived
        self.tags = range(tag, tag + params.num_sequences)
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequence = sequence
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        """Log-probabilities of the prompt tokens received so far, shared by all choices."""
        shared = prompt_token_ids, params, arrived, self.prompt_logprobs
        self.choices = [Choice(tokenizer, index, *shared) for index in range(params.num_sequences)]
        self.on_start: Callable[[], None] | None = None
        """Called once, when the engine admits the first choice."""
        self.some_over = False
        """Whether the last increment of any choice was taken."""
        self.missed_deadline = False
        """Whether a choice missed its deadline."""
        self._submitted: float | None = None
        self._parts: dict[int, list[RequestOutput]] = {}
        self._taken: list[RequestOutput] = []  # only with a `sequence`
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

    @property
    def over(self) -> bool:
        """Whether the last increment of every choice was taken."""
        return self.some_over and all(choice.over for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices taken so far, including discarded ones."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_received(self) -> int:
        """Tokens of all choices that engines have sent, taken or not."""
        return sum(choice.num_received for choice in self.choices)

    @property
    def scheduling(self) -> Scheduling:
        """Its scheduling parameters."""
        return self._sent.scheduling

    def begin(self, spent: Mapping[str, float] | None = None) -> EngineRequest:
        """The request for an engine that gets it now. It goes on after the tokens that were received from earlier engines.

        `spent` has the seconds in each timeline state since its arrival. Increments that were not read before the last engine ended can be
        read now. Raises SequenceDropped.
        """
        self._error, self._news = None, self.num_received > 0
        now = clock.now()
        before = {state: int(seconds * 1e6) for state, seconds in (spent or {}).items()}
        # A new engine does not hold the sequence that the last one lost. So a resumed request continues none.
        continues = None if self.sequence is None else self.sequence.continued_by(self.tags.start)
        self._submitted = now / 1e6 if self._submitted is None else self._submitted
        if not self.num_received:
            if self.prompt_logprobs is not None:
                del self.prompt_logprobs[1:]
            return replace(self._sent, submitted=now, spent=before, continues=continues)
        resumed = tuple(choice.resumed(self._submitted) for choice in self.choices if not choice.complete)
        return replace(self._sent, submitted=now, spent=before, resumed=resumed)

    def unfinished(self) -> list[int]:
        """The tags of the choices that need an engine."""
        return [tag for tag, choice in zip(self.tags, self.choices, strict=True) if not choice.complete]

    def timelines(self) -> list[Timeline]:
        """The timelines of the choices that have ended in an engine."""
        return [choice.timeline for choice in self.choices if choice.timeline is not None]

    def choice(self, tag: int) -> Choice:
        """The choice with this tag."""
        return self.choices[tag - self.tags.start]

    def finished(self) -> list[int]:
        """The tags of the choices that are over."""
        return [tag for tag, choice in zip(self.tags, self.choices, strict=True) if choice.over]

    @property
    def num_untaken(self) -> int:
        """Tokens of all choices that were received and not taken yet."""
        return sum(choice.num_untaken for choice in self.choices if not choice.over)

    def take(self, most: int = sys.maxsize) -> list[RequestOutput]:
        """At most `most` tokens of each choice, one increment per choice. With `best_of`, whole choices at the end."""
        parts = [part for choice in self.choices if (part := choice.take(most)) is not None]
        for part in parts:
            if part.finish_reason is not None:
                self.some_over = True
        if self.sequence is not None:
            self._taken += parts
            if parts and parts[-1].finish_reason in ("stop", "length"):
                self.sequence.finish(self._taken)
        if not self.params.ranked:
            return parts
        for part in parts:
            add_part(self._parts.setdefault(part.index, []), part)
        return self._best() if self.over else []

    def _best(self) -> list[RequestOutput]:
        """The `n` best choices: finished ones first, then by mean log-probability."""

        def merit(output: RequestOutput) -> tuple[bool, float]:
            return output.finish_reason in ("stop", "length"), self.choices[output.index].mean_logprob

        best = sorted(map(joined, self._parts.values()), key=merit, reverse=True)[: self.params.n]
        return [replace(output, index=index) for index, output in enumerate(best)]

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


def add_part(parts: list[RequestOutput], part: RequestOutput) -> None:
    """Adds the next increment of a choice. From time to time all are joined: small ones take much memory, joining each much time."""
    parts.append(part)
    if len(parts) >= _PARTS:
        parts[:] = [joined(parts)]


def joined(parts: Sequence[RequestOutput]) -> RequestOutput:
    """A choice's increments as one output."""
    last = parts[-1]
    return replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None if last.logprobs is None else [one for part in parts for one in part.logprobs or ()],
        text_offsets=None if last.text_offsets is None else [one for part in parts for one in part.text_offsets or ()],
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
    )


def deliver(step: StepOutputs, requests: dict[int, Stream]) -> list[Stream]:
    """Adds a step's tokens to `requests`, by tag, and removes ended tags. Returns the requests with news.

    Unknown tags belong to aborted requests; their tokens are dropped.
    """
    touched: dict[int, Stream] = {}
    for tag, *admission in step.started:
        if (request := requests.get(tag)) is not None:
            request.choice(tag).start(*admission)
            if (on_start := request.on_start) is not None:
                request.on_start = None
                on_start()
    for timeline in step.ended:
        tag = timeline["tag"]
        if (request := requests.get(tag)) is not None and request.choice(tag).end(timeline):
            touched[request.tags.start] = request
            del requests[tag]
    for tag, lines in step.prompts:
        request = requests.get(tag)
        if request is not None and request.prompt_logprobs is not None and request.params.prompt_logprobs is not None:
            request.prompt_logprobs += TokenLogprobs.read(lines, request.params.prompt_logprobs)
    details, refusals = step.details, step.refusals
    count = len(step.finishes)
    tags, tokens = struct.unpack(f"<{count}Q", step.tags), struct.unpack(f"<{count}i", step.tokens)
    logprobs = struct.unpack(f"<{count}f", step.logprobs) if step.logprobs else (0.0,) * count
    for tag, token, logprob, finish in zip(tags, tokens, logprobs, step.finishes, strict=True):
        if (request := requests.get(tag)) is None:
            continue
        choice = request.choice(tag)
        try:
            choice.feed(token, logprob, finish, details.get(tag), refusals.get(tag))
        except Exception:  # a defect that one request meets must not end the others
            log.exception("sequence %d ends with an error, because its output cannot be read", tag)
            choice.fail()
        touched[request.tags.start] = request
        if finish:
            del requests[tag]
    for tag in step.starved:
        if (request := requests.pop(tag, None)) is not None:
            request.choice(tag).starve()
            touched[request.tags.start] = request
    return list(touched.values())
