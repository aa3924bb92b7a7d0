"""One API request at work: its prompts side by side in the engine, counted and timed."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from chairlift.errors import DeadlineMissed, EngineDead, InvalidRequest, QueueFull
from chairlift.outputs import RequestOutput, Timing
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.admission import Ticket
from chairlift.server.errors import api_error
from chairlift.server.observability.latencies import Latencies
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.observability.timings import timings
from chairlift.server.refusals import Refusal
from chairlift.server.service import Service, engine_ids
from chairlift.server.submission import Submission
from chairlift.server.usage import Usage

_AHEAD = 64
"""Outputs that may wait for a slow reader of a request with several prompts."""


class Generation:
    """What one API request makes the engine do; `outputs` runs it, and leaving `outputs` early ends it in the engine too.

    `head` holds what every answer of it begins with: id, object, created, model and determinism.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        context: RequestContext,
        ticket: Ticket,
        kind: str,
        prefix: str,
        request_id: str,
        stream: bool,
        default: int | None = None,
    ) -> None:
        """Raises InvalidRequest for a prompt that cannot be served; `default` bounds the length where the request does not.

        Unless it is to `stream`, `outputs` yields nothing of a prompt before all of its answer is there.
        """
        self._service = service
        self._stream = stream
        self._work = [(prompt, self._fit(prompt, params, default)) for prompt in prompts]
        self._n = params.n
        self._scheduling = scheduling
        self._context = context
        self._arrived = self._context.arrived
        self._request_id = request_id
        self._ticket = ticket
        self._ticket.widen(len(prompts))
        answer_id = f"{prefix}{uuid.uuid4().hex}"
        service.remember(scheduling.tenant, request_id, answer_id, len(prompts))
        service.preparing.remove(scheduling.tenant, context)
        self._ids = engine_ids(answer_id, len(prompts))
        self.head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": service.model,
            "determinism": service.determinism,
        }
        self.usage = Usage(prompt=sum(map(len, prompts)))
        self._timing: Timing | None = None

    def _fit(self, prompt: list[int], params: SamplingParams, default: int | None) -> SamplingParams:
        fitted = self._service.engine.validate(prompt, params)
        if params.max_tokens is None and default is not None and fitted.max_tokens is not None:
            return replace(fitted, max_tokens=min(max(default, params.min_tokens), fitted.max_tokens))
        return fitted

    def metrics(self) -> dict[str, Any]:
        """The answer's `metrics` field, once one of its choices has ended; those of several count from the first to begin to the last."""
        return {"metrics": timings(self._timing, self.usage.completion)} if self._timing else {}

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields (choice's index, what is new), as it comes; raises what the engine raises."""
        if len(self._work) == 1:
            async with aclosing(self._one(0)) as outputs:
                async for output in outputs:
                    yield output.index, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_AHEAD)

        async def pump(index: int) -> None:
            end = None
            try:
                async with aclosing(self._one(index)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:
                end = error
            await queue.put((index, end))

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._work))]
        try:
            running = len(tasks)
            while running:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield index * self._n + item.index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, index: int) -> AsyncGenerator[RequestOutput]:
        """One prompt's outputs, with the metrics that they are good for."""
        metrics, usage = self._service.metrics, self.usage
        prompt, params = self._work[index]
        latencies = metrics.latencies(self._scheduling.tenant, self._scheduling.priority)
        tokens = _TokenTimes(latencies, self._arrived)
        lengths: dict[int, int] = {}
        cached: int | None = None
        generated = 0
        going = params.n
        reason = "abort"
        metrics.asked(params)
        submission = Submission(
            self._service,
            prompt,
            params,
            self._scheduling,
            request_id=self._ids[index],
            context=self._context,
            whole=not self._stream,
        )
        try:
            async with aclosing(submission.outputs(self._ticket.started, tokens.observe, tokens.forget)) as outputs:
                async for output in outputs:
                    lengths[output.index] = lengths.get(output.index, 0) + len(output.token_ids)
                    generated += len(output.token_ids)
                    usage.completion += len(output.token_ids)
                    if output.finish_reason:
                        # Siblings find what the first of them computed: the least is what was there before.
                        least = output.cached_tokens if cached is None else min(cached, output.cached_tokens)
                        usage.cached += least - (cached or 0)
                        cached = least
                        metrics.settled(output, lengths.get(output.index, 0), latencies)
                        self._timing = output.timing if self._timing is None else self._timing.beside(output.timing)
                        metrics.ended(output.finish_reason, time.monotonic() - self._arrived, latencies)
                        going -= 1
                    yield output
            if params.ranked:  # those that were not the best took tokens too
                with contextlib.suppress(EngineDead):  # the answer is there: an engine that has ended since takes nothing from it
                    drawn = sum(ledger.output_tokens for ledger in await self._service.engine.explain(self._ids[index]))
                    usage.completion += max(0, drawn - generated)
        except (QueueFull, InvalidRequest) as error:
            if isinstance(error, QueueFull):
                going = 0  # it never came in: the engine counts it
            reason, refused = "error", api_error(error)
            self._service.refusals.add(self._scheduling.tenant, self._request_id, Refusal(refused.status, refused.envelope["error"]))
            raise
        except DeadlineMissed as missed:
            reason = "deadline"
            # Some of its tokens may never have been shown, and other prompts of the request took theirs.
            usage.completion += missed.completion_tokens - generated
            raise DeadlineMissed(str(missed), prompt_tokens=usage.prompt, completion_tokens=usage.completion) from None
        except Exception:
            reason = "error"
            raise
        finally:
            for _ in range(going):
                metrics.ended(reason, time.monotonic() - self._arrived, latencies)
            if self._service.traces is not None:
                self._service.traces.follow(self._service.engine, self._ids[index], self._context)


class _TokenTimes:
    """The latencies of one prompt's tokens, observed as they come."""

    def __init__(self, latencies: Latencies, arrived: float) -> None:
        self._latencies = latencies
        self._arrived = arrived
        self._begun = False
        self._latest: dict[int, float] = {}
        """When each answer's newest token came, by its index."""

    def observe(self, output: RequestOutput) -> None:
        """Takes what came just now."""
        if not output.token_ids:
            return
        now = time.monotonic()
        if not self._begun:
            self._begun = True
            # Both at once, so that their percentiles are of the same requests.
            self._latencies.first_token.observe(now - self._arrived)
            self._latencies.queued.observe(output.queued or 0.0)
        elif output.index in self._latest:
            self._latencies.between_tokens.observe(now - self._latest[output.index])
        self._latest[output.index] = now

    def forget(self) -> None:
        """Called when the answers begin anew: what lies between is not the time between two tokens."""
        self._latest.clear()
