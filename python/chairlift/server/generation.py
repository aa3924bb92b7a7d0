"""One API request at work: its prompts side by side in the engine, counted and timed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.server.service import Service

_AHEAD = 64
"""Outputs that may wait for a slow reader of a request with several prompts."""


@dataclass(slots=True)
class Usage:
    """Tokens that a request took so far."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Generation:
    """What one API request makes the engine do; `outputs` runs it, and leaving `outputs` early ends it in the engine too.

    `head` holds what every answer of it begins with: id, object, created and model.
    """

    def __init__(
        self, service: Service, prompts: list[list[int]], params: SamplingParams, *, kind: str, default: int | None = None
    ) -> None:
        """Raises InvalidRequest for a prompt that cannot be served; `default` bounds the length where the request does not."""
        self._service = service
        self._work = [(prompt, self._fit(prompt, params, default)) for prompt in prompts]
        self._arrived = time.monotonic()
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model}
        self.usage = Usage(prompt=sum(map(len, prompts)))

    def _fit(self, prompt: list[int], params: SamplingParams, default: int | None) -> SamplingParams:
        fitted = self._service.engine.validate(prompt, params)
        if params.max_tokens is None and default is not None and fitted.max_tokens is not None:
            return replace(fitted, max_tokens=min(default, fitted.max_tokens))
        return fitted

    @property
    def size(self) -> int:
        """How many prompts it has, which is how many choices the answer has."""
        return len(self._work)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields (prompt's index, what is new), as it comes; raises what the engine raises."""
        if self.size == 1:
            async with aclosing(self._one(0)) as outputs:
                async for output in outputs:
                    yield 0, output
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

        tasks = [asyncio.create_task(pump(index)) for index in range(self.size)]
        try:
            running = self.size
            while running:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, index: int) -> AsyncGenerator[RequestOutput]:
        """One prompt's outputs, with the metrics that they are good for."""
        metrics, usage = self._service.metrics, self.usage
        prompt, params = self._work[index]
        latest: float | None = None
        reason = "abort"
        try:
            async with aclosing(self._service.engine.generate(prompt, params)) as outputs:
                async for output in outputs:
                    if output.token_ids:
                        now = time.monotonic()
                        if latest is None:
                            metrics.first_token.observe(now - self._arrived)
                        else:
                            metrics.between_tokens.observe(now - latest)
                        latest = now
                        usage.completion += len(output.token_ids)
                    if output.finish_reason:
                        reason = output.finish_reason
                        usage.cached += output.cached_tokens
                        if output.timing:
                            metrics.queued.observe(output.timing.queued)
                    yield output
        except Exception:
            reason = "error"
            raise
        finally:
            metrics.ended(reason, time.monotonic() - self._arrived)
