"""A request on the client side: the choices of its answer, and what the engine sends of them."""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from chairlift.engine import clock
from chairlift.engine.choice import Choice
from chairlift.engine.engine_request import EngineRequest
from chairlift.outputs import RequestOutput, Timeline, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.frames import StepOutputs
    from chairlift.engine.held_sequences import HeldSequence
    from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

_PARTS = 256
"""Increments of a choice that are kept before they are joined."""


class Request:
    """A running request. Its choices have `tag` and the numbers after it."""

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
    ) -> None:
        """`arrived` is when its first byte was read, on the monotonic clock; now by default. It continues `sequence`, if given."""
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

        `spent` has the seconds in each timeline state since its arrival. Raises SequenceDropped.
        """
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


R = TypeVar("R", bound=Request)


def deliver(step: StepOutputs, requests: dict[int, R]) -> list[R]:
    """Adds a step's tokens to `requests`, by tag, and removes ended tags. Returns the requests with news.

    Unknown tags belong to aborted requests; their tokens are dropped.
    """
    touched: dict[int, R] = {}
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
