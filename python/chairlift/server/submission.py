"""Submits one prompt to the engine, and again to the next engine if that one dies before the client has received output."""

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
from chairlift.server.lifecycle import ServerState
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.service import Service

logger = logging.getLogger(__name__)

MAX_RESUBMISSIONS = 2
"""How often a request is resubmitted. A request that crashes the engine must not do so forever."""

_OUTPUTS_PER_YIELD = 64
"""Buffered outputs that are passed on before other tasks get to run."""


class Submission:
    """One prompt, submitted until an engine has answered it or some of the output was delivered.

    Output counts as delivered at the answer's end if `buffered`, else at the stream's first text. Until then the request can restart.
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
        buffered: bool,
    ) -> None:
        """Deadlines count from the request's arrival. `buffered` collects the outputs and yields them when the answer is complete."""
        self._service = service
        self._prompt = prompt
        self._params = params
        self._scheduling = scheduling
        self._request_id = request_id
        self._context = context
        self._spent_before_ready = context.elapsed()
        self._ready_at = time.monotonic()
        self._waited_for_engine = False
        self._buffered = buffered
        self._lost_engines = 0
        """Number of engines that ended while they ran the request."""

    async def outputs(
        self, on_start: Callable[[], None], on_output: Callable[[RequestOutput], None], on_loss: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput]:
        """Yields outputs that may be sent; raises the engine's errors, and ApiError 503 if the request was lost with its engine.

        `on_start` is called once, when the first engine starts the request; `on_output` for every output as it arrives; `on_loss` when the
        outputs so far are void because another engine starts over.
        """
        pending: list[RequestOutput] = []
        delivered = False
        started = False

        def start() -> None:
            nonlocal started
            if not started:
                started = True
                on_start()

        while True:
            await self._wait_for_engine()
            try:
                async with aclosing(self._generate(start)) as outputs:
                    async for output in outputs:
                        on_output(output)
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
                self._check_resubmission(error, delivered)
            pending.clear()
            on_loss()
        for index, output in enumerate(pending):
            if index % _OUTPUTS_PER_YIELD == _OUTPUTS_PER_YIELD - 1:
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
        """Returns the seconds that the request has spent in each state of its timeline before submission."""
        if self._waited_for_engine or self._lost_engines:
            return self._spent_before_ready | {"restart": time.monotonic() - self._ready_at}
        return self._context.elapsed()

    async def _wait_for_engine(self) -> None:
        """Waits for an engine; raises DeadlineMissed, or ApiError 503 if none becomes ready in time."""
        lifecycle = self._service.lifecycle
        if lifecycle.engine_available:
            return
        deadlines = [ms for ms in (self._scheduling.deadline_ms, self._scheduling.ttft_deadline_ms) if ms is not None]
        self._waited_for_engine = True
        deadline = self._context.arrived + min(deadlines) / 1e3 if deadlines else None
        if await lifecycle.wait_for_engine(None if deadline is None else max(0.0, deadline - time.monotonic())):
            return
        if deadline is not None and time.monotonic() >= deadline:
            message = "the request missed its deadline while the engine was restarting: allow more time"
            raise DeadlineMissed(message, prompt_tokens=len(self._prompt), completion_tokens=0)
        raise lifecycle.refusal(admitted=True)

    def _check_resubmission(self, error: EngineDead, delivered: bool) -> None:
        """Raises ApiError 503 unless the request may be resubmitted after its engine died."""
        lifecycle = self._service.lifecycle
        self._lost_engines += 1
        if delivered or lifecycle.state is ServerState.DRAINING:
            raise lifecycle.refusal(admitted=True) from error
        if self._lost_engines > MAX_RESUBMISSIONS:
            logger.error(
                "request %s was running each of the %d times that the engine died: giving up on it, since it may be the cause",
                self._request_id,
                self._lost_engines,
            )
            raise lifecycle.refusal(admitted=True) from error
        logger.info("resubmitting request %s: the engine died before any of its output was sent", self._request_id)
