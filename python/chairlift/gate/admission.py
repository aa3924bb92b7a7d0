"""Lets a request wait for its turn, and holds its share of an upstream until its answer has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError
from starlette.requests import Request

from chairlift.engine.background import in_background
from chairlift.engine.frames import Answering, NoteSession
from chairlift.errors import ChairliftError, EngineDead, InvalidRequest, WaitTooLong
from chairlift.gate.answer import Answer
from chairlift.gate.prompt import Prompt
from chairlift.sampling import SamplingParams
from chairlift.scheduling import BACKGROUND, Scheduling
from chairlift.server.observability.usage_log import UsageLabels
from chairlift.server.schema.fields import GenerationRequest
from chairlift.server.service import Service, service_of
from chairlift.server.session_wait import preferred_wait, refuse_long_wait, takes_turns

if TYPE_CHECKING:
    from chairlift.engine.stream import Stream
    from chairlift.server.model import ServedModel
    from chairlift.server.session_name import SessionName


class Outcome(Enum):
    """What became of a request at an upstream."""

    RUNS = auto()
    REFUSED = auto()
    """The client gets an error: that of the upstream, or one that says that it failed."""
    MOVES = auto()
    """The upstream failed before the client got anything, and another one gets the request."""


@dataclass(slots=True)
class Admitted:
    """A request that may run."""

    upstream: int
    """The number of the upstream that runs it."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the upstream is expected to find in its cache."""
    on_first_token: Callable[[], None]
    """Called when the first event of a streamed answer has come: the upstream has computed the prompt."""
    answer: Answer | None = None
    """What came back; None until something did."""
    complete: bool = False
    """Whether all of the answer came."""
    outcome: Outcome = Outcome.RUNS
    answers: int = 1
    """Sequences that the upstream runs for it."""
    id: str = ""
    """The id under which the request can be explained."""
    session: SessionName | None = None


@asynccontextmanager
async def admitted(request: Request, prompt: Prompt, tried: Collection[int] = ()) -> AsyncGenerator[Admitted]:
    """Waits until the scheduler admits the request, and ends it there with the block. Raises the engine's errors, among them QueueFull.

    The upstreams whose numbers are in `tried` failed already: another one gets it, if one is usable.
    """
    admission = _Admission(request, prompt)
    stream = await admission.prepare()
    # A future alone: a task that waits beside the request's own would be woken before each request is passed on.
    started = asyncio.get_running_loop().create_future()

    def settle(runs: bool) -> None:
        if not started.done():
            started.set_result(runs)

    running = asyncio.create_task(admission.run(stream, partial(settle, True), tried))
    running.add_done_callback(lambda _: settle(False))
    try:
        async with admission.refused_if_long(stream):
            runs = await started
        if not runs:
            running.result()
            raise EngineDead("the scheduler ended the request before its turn")
        held = admission.started(stream)
        try:
            yield held
        finally:
            stream.answered = held.complete
            admission.ended(held)
    finally:
        running.cancel()
        # The answer goes on at the upstream, also if the scheduler has ended the request there: at its deadline, for example.
        with contextlib.suppress(asyncio.CancelledError, ChairliftError):
            await running


class _Admission:
    """One request in the scheduler."""

    def __init__(self, request: Request, prompt: Prompt) -> None:
        service = service_of(request)
        self._service: Service = service
        self._model: ServedModel = service.default
        self._request, self._prompt = request, prompt
        self._context, self._ticket = request.state.context, request.state.ticket
        self._session: SessionName | None = None
        self._scheduling = self._urgency()
        self._id = f"gate-{uuid.uuid4().hex}"
        self._admitted_at = time.monotonic()
        self._latencies = self._model.metrics.latencies(self._scheduling)

    def _urgency(self) -> Scheduling:
        """The scheduling parameters of the tenant, its tier, the headers and the body. Wrong fields are left to the upstream."""
        request, service = self._request, self._service
        given = dict(self._prompt.scheduling)
        if type(priority := given.get("priority")) is int and abs(priority) > BACKGROUND:
            del given["priority"]
        try:
            fields = GenerationRequest.model_validate(given)
        except ValidationError:
            fields = GenerationRequest()
        tier = service.tiers.choose(fields.service_tier, request.state.tenant)
        self._session = fields.session(self._context.session)
        scheduling = fields.scheduling(self._ticket.tenant.scheduling(tier), request.headers, self._session)
        if self._prompt.max_tokens is not None:
            scheduling = replace(scheduling, predicted_tokens=min(self._prompt.max_tokens, self._model.engine.info.max_model_len))
        return service.tiers.bound(scheduling, self._model.engine.config.scheduling_policy)

    async def prepare(self) -> Stream:
        """Makes the request for the engine. The upstream refuses a prompt that is too long: here it is cut.

        A quarter is left for the answer: a sequence that reached the limit would end in the engine before it ends at the upstream.
        """
        limit = self._model.engine.info.max_model_len
        tokens = array("i", self._prompt.tokens[: limit - limit // 4].tobytes() or bytes(4))  # a list takes nine times the memory
        params = SamplingParams(n=self._prompt.answers, max_tokens=limit - len(tokens), temperature=0.0, seed=0)
        self._ticket.add_prompts(1)
        registry = self._service.registry
        registry.add(self._scheduling.tenant, self._context.request_id, self._id, 1)
        registry.remove_preparing(self._scheduling.tenant, self._context)
        return await self._model.engine.prepare_tokens(tokens, params, self._scheduling, arrived=self._context.arrived)

    def refused_if_long(self, stream: Stream) -> contextlib.AbstractAsyncContextManager[None]:
        """Within the block the request is refused if it would wait longer for its session's turn than its client wants."""
        try:
            longest = preferred_wait(self._request.headers) if takes_turns(self._session, self._model.engine.config) else None
        except InvalidRequest:
            longest = None  # the header is left to the upstream
        if longest is None:
            return contextlib.nullcontext()

        def refuse(error: WaitTooLong) -> None:
            self._service.count_rejected("session_wait")
            stream.fail(error)

        return in_background(refuse_long_wait(self._model.engine, self._id, self._context.arrived, longest, refuse))

    async def run(self, stream: Stream, on_start: Callable[[], None], tried: Collection[int]) -> None:
        """Runs the request in the engine until it is cancelled. It yields nothing, because its tokens are at the upstream."""
        spent, session = self._context.elapsed(), None if self._session is None else self._session.home
        async with aclosing(
            self._model.engine.run(stream, request_id=self._id, on_start=on_start, spent=spent, session=session, tried=tried)
        ) as outputs:
            async for _ in outputs:
                pass

    def started(self, stream: Stream) -> Admitted:
        """Called when it is admitted."""
        self._ticket.started()
        self._admitted_at = time.monotonic()
        self._latencies.queued.observe(self._admitted_at - self._context.arrived)
        replica = self._model.engine.ran_in(self._id)
        number, cached = 0 if replica is None else replica.number, stream.choices[0].cached_tokens
        on_first_token = partial(self._model.engine.tell, Answering(stream.tags[0]))
        num_tokens, answers = len(stream.prompt_token_ids), self._prompt.answers
        return Admitted(number, num_tokens, cached, on_first_token, answers=answers, id=self._id, session=self._session)

    def ended(self, held: Admitted) -> None:
        """Counts what it used, by the upstream's own numbers where it gives them. A request that the upstream refused used nothing."""
        now, answer, metrics = time.monotonic(), held.answer, self._model.metrics
        if held.outcome is Outcome.MOVES:
            return
        if self._session is not None and self._session.final:
            self._service.end_session(self._scheduling.tenant, self._session.name)
        if held.outcome is Outcome.REFUSED:
            self._service.count_rejected("upstream")
            return
        tokens, usage = (0, None) if answer is None else (answer.num_tokens, answer.usage)
        if answer is not None and answer.ttft is not None:
            self._latencies.first_token.observe(self._admitted_at - self._context.arrived + answer.ttft)
        if answer is not None and answer.between_tokens is not None:
            self._latencies.per_token.observe(answer.between_tokens)
        prompt = held.prompt_tokens if usage is None or usage.prompt is None else usage.prompt
        metrics.observe_lengths(prompt, tokens)
        finish = "stop" if held.complete else "abort"
        metrics.count_finished(finish, now - self._context.arrived, self._latencies)
        if self._session is not None and not self._session.final and held.complete and answer is not None and not answer.calls_tools:
            self._model.engine.tell(NoteSession(self._scheduling.tenant, self._session.name, "awaits_user"))
        if (usage_log := self._service.usage_log) is not None:
            labels = UsageLabels.of(self._id, self._context.request_id, self._model.name, self._scheduling, prompt)
            cached = 0 if usage is None or usage.cached is None else usage.cached
            states = {"queued": self._admitted_at - self._context.arrived, "upstream": now - self._admitted_at}
            usage_log.write_upstream(labels, cached, tokens, finish, states)
