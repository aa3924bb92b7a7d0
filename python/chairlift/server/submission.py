"""Submits one prompt to the engine, and to the next engine if that one dies, which goes on after the last token or starts over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from typing import TYPE_CHECKING

from chairlift.engine.background import in_background
from chairlift.errors import DeadlineMissed, EngineClosed, EngineDead, RequestMoved
from chairlift.outputs import RequestOutput, Timeline
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.lifecycle import ModelState
from chairlift.server.model import ServedModel
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.session_name import SessionName
from chairlift.server.session_wait import refuse_long_wait

if TYPE_CHECKING:
    from chairlift.engine.async_live_sequence import AsyncLiveSequence
    from chairlift.engine.stream import Stream

logger = logging.getLogger(__name__)

MAX_LOSSES = 2
"""Engines in a row that a request may lose without PROGRESS new tokens from them. A request that crashes engines must not do so forever."""
PROGRESS = 16
"""Tokens after which an engine counts as able to run the request."""

_TOKENS_PER_YIELD = 64
"""Tokens of buffered outputs that are passed on before other tasks get to run. One output has many if the event loop was busy."""


class Submission:
    """One prompt, submitted until engines have answered it.

    If an engine dies, the next one goes on after the last token, where `--resume` allows it. Otherwise the answer starts over, which is
    possible until some of it is delivered: at its end if `buffered`, else at the stream's first text.
    """

    def __init__(
        self,
        model: ServedModel,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        request_id: str,
        context: RequestContext,
        buffered: bool,
        session: SessionName | None = None,
        max_wait: float | None = None,
        sequence: AsyncLiveSequence | None = None,
    ) -> None:
        """Deadlines count from the request's arrival. `buffered` collects the outputs and yields them when the answer is complete.

        The client wants to wait for its session's turn for `max_wait` seconds at most, if given. The prompt continues `sequence`, if given.
        """
        self._model = model
        self._prompt = prompt
        self._params = params
        self._scheduling = scheduling
        self._request_id = request_id
        self._context = context
        self._spent_before_ready = context.elapsed()
        self._ready_at = time.monotonic()
        self._waited_for_engine = False
        self._buffered = buffered
        self._session = session
        self._max_wait = max_wait
        self._sequence = sequence
        self._losses = 0
        """Engines in a row that ended before the request had PROGRESS tokens from them."""
        self._in_lost_engines = 0.0
        """Seconds."""
        self._stream: Stream | None = None
        """The request in the engine client, with all tokens so far; None before it is submitted, and to start over."""
        self._fingerprint: object = None
        """Of the engine that has it."""
        self.started = False
        """Whether an engine has begun to compute the prompt."""

    async def outputs(
        self, on_start: Callable[[], None], on_output: Callable[[RequestOutput], None], on_loss: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput]:
        """Yields outputs that may be sent; raises the engine's errors, and ApiError 503 if the request was lost with its engine.

        `on_start` is called once, when the first engine starts the request; `on_output` for every output as it arrives; `on_loss` when the
        outputs so far are void because another engine starts over. After MAX_LOSSES such requests run one at a time until they have
        PROGRESS, so that the one that crashes engines takes no other with it.
        """
        pending: list[RequestOutput] = []
        delivered = False

        def start() -> None:
            if not self.started:
                self.started = True
                on_start()

        while True:
            async with AsyncExitStack() as probation:
                if self._losses == MAX_LOSSES:
                    try:
                        async with asyncio.timeout(self._seconds_left()):
                            await probation.enter_async_context(self._model.probation)
                    except TimeoutError:
                        raise self._missed() from None
                await self._wait_for_engine()
                if self._stream is not None and not self._goes_on(delivered):
                    self._stream = None
                    pending.clear()
                    on_loss()
                had, began, progressed = self.num_received, time.monotonic(), False
                try:
                    async with aclosing(await self._run(start)) as outputs, self._limited_wait():
                        async for output in outputs:
                            on_output(output)
                            if not progressed and self.num_received - had >= PROGRESS:
                                progressed = True
                                await probation.aclose()
                            if delivered:
                                yield output
                                continue
                            pending.append(output)
                            if not self._buffered and (output.text or output.finish_reason):
                                delivered = True
                                for one in pending:
                                    yield one
                                pending.clear()
                    break
                except EngineClosed:
                    raise
                except EngineDead as error:
                    self._in_lost_engines += time.monotonic() - began
                    if not isinstance(error, RequestMoved):
                        self._losses = 1 if self.num_received - had >= PROGRESS else self._losses + 1
                    self._check_loss(error, delivered)
        tokens = 0
        for output in pending:
            if (tokens := tokens + len(output.token_ids)) > _TOKENS_PER_YIELD:
                tokens = len(output.token_ids)
                await asyncio.sleep(0)
            yield output

    async def _run(self, on_start: Callable[[], None]) -> AsyncGenerator[RequestOutput]:
        engine = self._model.engine
        if self._stream is None:
            arrived, rest = self._context.arrived, (self._params, self._scheduling)
            self._stream = await engine.prepare_tokens(self._prompt, *rest, arrived=arrived, sequence=self._sequence)
        self._fingerprint = engine.info.fingerprint
        return engine.run(
            self._stream,
            request_id=self._request_id,
            on_start=on_start,
            spent=self._spent(),
            session=None if self._session is None else self._session.home,
        )

    def _limited_wait(self) -> AbstractAsyncContextManager[None]:
        """Refuses the request if it waits for its session's turn for too long in the engine that has it. One with tokens had its turn."""
        if self._stream is None or self._max_wait is None or self.num_received:
            return nullcontext()
        engine, began = self._model.engine, self._ready_at
        return in_background(refuse_long_wait(engine, self._request_id, began, self._max_wait, self._stream.fail))

    def _spent(self) -> dict[str, float]:
        """Returns the seconds that the request has spent in each state of its timeline before submission."""
        if not self._waited_for_engine and not self._in_lost_engines:
            return self._context.elapsed()
        lost = {"lost_engine": self._in_lost_engines} if self._in_lost_engines else {}
        waited = self._context.waited_for_model + time.monotonic() - self._ready_at - self._in_lost_engines
        return self._spent_before_ready | lost | {"restart": waited}

    @property
    def num_received(self) -> int:
        """Tokens of all answers so far, sent or not, those of discarded answers included."""
        return 0 if self._stream is None else self._stream.num_received

    def timelines(self) -> list[Timeline]:
        """The timelines of the answers that have ended, discarded ones included, but not those that a stop string ended."""
        return [] if self._stream is None else self._stream.timelines()

    def _goes_on(self, delivered: bool) -> bool:
        """Whether the engine that is ready goes on with the answer so far; False to start over. Raises ApiError 503 if neither can be."""
        if not self.num_received:
            return True
        fingerprint = self._model.engine.info.fingerprint
        if self._model.resumes(self._fingerprint) and (self._model.resume == "any" or fingerprint == self._fingerprint):
            if fingerprint != self._fingerprint:
                logger.warning("request %s goes on in an engine with other numerics: its answer may differ", self._request_id)
            self._model.metrics.count_resumed()
            return True
        if delivered:
            logger.error("request %s cannot go on: the new engine has other numerics (--resume any allows it)", self._request_id)
            raise self._model.lifecycle.refusal(admitted=True)
        return False

    async def _wait_for_engine(self) -> None:
        """Waits for an engine; raises DeadlineMissed, or ApiError 503 if none becomes ready in time."""
        lifecycle = self._model.lifecycle
        if lifecycle.engine_available:
            return
        self._waited_for_engine = True
        if await lifecycle.wait_for_engine(self._seconds_left()):
            return
        if self._seconds_left() == 0:
            raise self._missed()
        raise lifecycle.refusal(admitted=True)

    def _seconds_left(self) -> float | None:
        """Seconds until the request's next deadline, 0 after it; None without one."""
        first = None if self.num_received else self._scheduling.ttft_deadline_ms
        deadlines = [ms for ms in (self._scheduling.deadline_ms, first) if ms is not None]
        return max(0.0, self._context.arrived + min(deadlines) / 1e3 - time.monotonic()) if deadlines else None

    def _missed(self) -> DeadlineMissed:
        message = "the request missed its deadline while the engine was restarting: allow more time"
        return DeadlineMissed(message, prompt_tokens=len(self._prompt), completion_tokens=self.num_received)

    def _check_loss(self, error: EngineDead, delivered: bool) -> None:
        """Raises ApiError 503 unless the next engine may get the request after its engine died."""
        lifecycle = self._model.lifecycle
        if lifecycle.state is ModelState.DRAINING or (delivered and not self._model.resumes(self._fingerprint)):
            raise lifecycle.refusal(admitted=True) from error
        if self._losses > MAX_LOSSES:
            logger.error(
                "request %s was running each of the %d times that the engine died: giving up on it, since it may be the cause",
                self._request_id,
                self._losses,
            )
            raise lifecycle.suspicion(self._losses) from error
        logger.info("request %s lost its engine after %d tokens and goes to the next one", self._request_id, self.num_received)
