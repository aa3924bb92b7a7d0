"""One prompt on its way through the engine, and through the next one if that ends before the client has anything of the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from chairlift.errors import DeadlineMissed, EngineClosed, EngineDead
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.lifecycle import State
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.service import Service

logger = logging.getLogger(__name__)

MAX_RESUBMISSIONS = 2
"""How often a request is submitted again: one that is what the engine dies of must not be for ever."""

_AT_ONCE = 64
"""Outputs of a whole answer that are handed on before other tasks get their turn."""


class Submission:
    """One prompt, submitted until an engine has answered it or a part of the answer was handed on.

    A whole answer is handed on when it is complete, a stream from its first text on: until then it can begin anew.
    """

    def __init__(
        self,
        service: Service,
        prompt: list[int],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        request_id: str,
        context: RequestContext,
        whole: bool,
    ) -> None:
        """Deadlines count from the request's arrival; `whole` if nobody can use a part of the answer."""
        self._service = service
        self._prompt = prompt
        self._params = params
        self._scheduling = scheduling
        self._request_id = request_id
        self._context = context
        self._prepared = context.elapsed()
        self._ready = time.monotonic()
        self._held = False
        self._whole = whole
        self._lost = 0
        """Engines that ended while they had the request."""

    async def outputs(
        self, on_start: Callable[[], None], on_output: Callable[[RequestOutput], None], on_loss: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput]:
        """Yields outputs as they may be shown; raises what the engine raises, and ApiError 503 for a request that was lost with it.

        `on_start` is called once, when the first engine begins the answer; `on_output` with every output as it comes, and `on_loss`
        when all outputs so far mean nothing, since another engine begins anew.
        """
        pending: list[RequestOutput] = []
        handed_on = False
        started = False

        def start() -> None:
            nonlocal started
            if not started:
                started = True
                on_start()

        while True:
            await self._hold()
            try:
                async with aclosing(self._generate(start)) as outputs:
                    async for output in outputs:
                        on_output(output)
                        pending.append(output)
                        if not self._whole and (handed_on or output.text or output.finish_reason):
                            handed_on = True
                            for one in pending:
                                yield one
                            pending.clear()
                break
            except EngineClosed:
                raise
            except EngineDead as death:
                self._check_resubmission(death, handed_on)
            pending.clear()
            on_loss()
        for index, output in enumerate(pending):
            if index % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            yield output

    def _generate(self, on_start: Callable[[], None]) -> AsyncGenerator[RequestOutput]:
        return self._service.engine.generate(
            self._prompt,
            self._params,
            self._scheduling,
            request_id=self._request_id,
            on_start=on_start,
            spent=self._spent(),
        )

    def _spent(self) -> dict[str, float]:
        """The states of the request's timeline until now, with their seconds."""
        if self._held or self._lost:
            return self._prepared | {"restart": time.monotonic() - self._ready}
        return self._context.elapsed()

    async def _hold(self) -> None:
        """Waits for an engine; raises DeadlineMissed, or ApiError 503 where none comes in time."""
        lifecycle = self._service.lifecycle
        if lifecycle.has_engine:
            return
        limits = [limit for limit in (self._scheduling.deadline_ms, self._scheduling.ttft_deadline_ms) if limit is not None]
        self._held = True
        deadline = self._context.arrived + min(limits) / 1e3 if limits else None
        if await lifecycle.hold(None if deadline is None else max(0.0, deadline - time.monotonic())):
            return
        if deadline is not None and time.monotonic() >= deadline:
            message = "the request missed its deadline while the engine was being started again: allow more time"
            raise DeadlineMissed(message, prompt_tokens=len(self._prompt), completion_tokens=0)
        raise lifecycle.refusal(taken=True)

    def _check_resubmission(self, death: EngineDead, handed_on: bool) -> None:
        """Raises ApiError 503 unless the request, whose engine has ended, may be submitted to the next one."""
        lifecycle = self._service.lifecycle
        self._lost += 1
        if handed_on or lifecycle.state is State.DRAINING:
            raise lifecycle.refusal(taken=True) from death
        if self._lost > MAX_RESUBMISSIONS:
            logger.error(
                "request %s was in work each time that the engine ended, %d times in a row: it is not submitted again, "
                "since it may be what the engine ends of",
                self._request_id,
                self._lost,
            )
            raise lifecycle.refusal(taken=True) from death
        logger.info("request %s is submitted again, since the engine ended before anything of its answer was sent", self._request_id)
