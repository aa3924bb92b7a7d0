"""Runs the requests of all open batches, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from starlette.types import ASGIApp

from chairlift.engine.background import cancel
from chairlift.engine.stats import Stats
from chairlift.server.admission import Admission
from chairlift.server.batch.call import Reply, call
from chairlift.server.batch.input import InputError, read_input, read_request
from chairlift.server.errors import ApiError
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import ModelState
from chairlift.server.service import Service
from chairlift.server.storage.batches import Answer, Batch, BatchRequest, Status, output_line
from chairlift.server.storage.storage import Storage
from chairlift.server.work import CURRENT_WORK, Work

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often a request is tried whose answer is a 503, unless the server is overloaded. It may be the reason why the engine died."""

_PAGE = 256
"""Requests that are read from the database at once."""

_CLEAN_SECONDS = 60.0
_RETRY_SECONDS = 5.0

_EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."}
_CANCELLED = {"code": "batch_cancelled", "message": "The batch was cancelled before this request was executed."}


_SERVING = (ModelState.READY, ModelState.UNLOADED)


@dataclass(slots=True)
class _Open:
    """A batch in progress: its next requests, and those that run."""

    batch: Batch
    pending: deque[BatchRequest] = field(default_factory=deque)
    read_to: int = 0
    """The last line that was read from the database."""
    running: set[asyncio.Task[None]] = field(default_factory=set)
    exhausted: bool = False
    """Whether all lines were read."""
    attempts: dict[int, int] = field(default_factory=dict)


class BatchRunner:
    """Runs batches from the storage until it is cancelled. Only answers that were stored count, so it may be killed at any time."""

    def __init__(self, app: ASGIApp, service: Service, storage: Storage, max_body_size: int, keys: Keys | None = None) -> None:
        """`app` is the application behind the access checks. `keys` have the tenants' limits."""
        self._app = app
        self._service = service
        self._storage = storage
        self._max_body_size = max_body_size
        self._admission = Admission(None, Stats)  # the queue's limits are for clients
        self._keys = keys or Keys()
        self._open: dict[str, _Open] = {}
        self._answers: list[Answer] = []
        self._wake = storage.batches.changed
        self._cleaned = 0.0
        self._retry_at: dict[str, float] = {}
        """When a batch is tried again whose last step failed."""

    async def run(self) -> None:
        """Runs batches forever."""
        try:
            while True:
                try:
                    self._wake.clear()
                    is_open = await self._advance(self._move_on_or_wait)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY_SECONDS if is_open else _CLEAN_SECONDS):
                            await self._wake.wait()
                except Exception as error:
                    _report("batches stopped", error)
                    await self._forget()
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await self._forget()
            await self._store_answers()

    async def run_until_idle(self) -> None:
        """Runs until no batch is open; raises what goes wrong."""
        try:
            while True:
                self._wake.clear()
                if not await self._advance(self._move_on):
                    return
                await self._wake.wait()
        finally:
            await self._forget()
            await self._store_answers()

    async def _advance(self, move_on: Callable[[Batch], Awaitable[None]]) -> bool:
        """Stores the answers that have come, moves every batch on and starts requests. Returns whether a batch is open."""
        await self._store_answers()
        if time.monotonic() - self._cleaned > _CLEAN_SECONDS:
            self._cleaned = time.monotonic()
            await self._storage.files.remove_expired()
            await self._storage.batches.remove_old()
        batches = await self._storage.batches.open()
        for batch in batches:
            await move_on(batch)
        await self._start_requests()
        return bool(batches)

    async def _move_on_or_wait(self, batch: Batch) -> None:
        """Moves a batch on. One whose step fails, as on a full disk, is tried again later, and holds up no other."""
        if time.monotonic() < self._retry_at.get(batch.id, 0.0):
            return
        self._retry_at.pop(batch.id, None)
        try:
            await self._move_on(batch)
        except Exception as error:
            _report(f"{batch.id} waits", error)
            self._retry_at[batch.id] = time.monotonic() + _RETRY_SECONDS

    async def _move_on(self, batch: Batch) -> None:
        """Does what a batch's status asks for, except for starting requests."""
        if batch.status is Status.CANCELLING:
            await self._end(batch, Status.CANCELLED, _CANCELLED)
        elif batch.status is Status.FINALIZING or (batch.status is Status.IN_PROGRESS and batch.completed + batch.failed == batch.total):
            await self._end(batch, Status.COMPLETED, None)
        elif (expires := batch.fields["expires_at"]) is not None and time.time() >= expires:
            await self._end(batch, Status.EXPIRED, _EXPIRED)
        elif batch.status is Status.VALIDATING:
            if not self._must_wait(batch):
                async with self._charged(batch):
                    await self._validate(batch)
                self._wake.set()
        elif batch.id not in self._open:
            self._open[batch.id] = _Open(batch)

    async def _validate(self, batch: Batch) -> None:
        """Reads a batch's input and starts it, or lets it fail."""
        path = self._storage.files.path(batch.input_file_id)
        try:
            requests, errors = await asyncio.to_thread(read_input, path, batch.fields["endpoint"], self._max_body_size)
        except FileNotFoundError:
            requests, errors = [], [InputError("file_not_found", "the input file is gone", "input_file_id").fields]
        if errors:
            await self._storage.batches.fail(batch, errors)
        else:
            await self._storage.batches.start(batch, requests)

    def _must_wait(self, batch: Batch) -> bool:
        """Whether a batch's tenant has taken more than its share of the server's own time.

        The next look comes after `_RETRY_SECONDS`, or when the batch is given back what one of its requests was expected to take.
        """
        return self._service.pacing.must_wait(self._keys.named(batch.tenant).paced_as)

    @contextlib.asynccontextmanager
    async def _charged(self, batch: Batch) -> AsyncIterator[Callable[[], None]]:
        """Counts the server's work in this block for the batch's tenant: see `Pacing.turn`."""
        work = Work()
        before = CURRENT_WORK.set(work)
        try:
            async with self._service.pacing.turn(self._keys.named(batch.tenant).paced_as, work, background=True) as engine_started:

                def settle() -> None:
                    waits = self._must_wait(batch)
                    engine_started()
                    if waits:
                        self._wake.set()

                yield settle
        finally:
            CURRENT_WORK.reset(before)

    async def _end(self, batch: Batch, status: Status, unanswered: dict[str, str] | None) -> None:
        if (current := self._open.pop(batch.id, None)) is not None:
            await cancel(current.running)
            await self._store_answers()
        await self._storage.batches.finish(batch, status, None if unanswered is None else json.dumps(unanswered))
        counts = (batch.completed, batch.failed, batch.total)
        logger.info("%s: %s, %d succeeded and %d failed of %d requests", batch.id, status.value, *counts)
        self._wake.set()

    async def _start_requests(self) -> None:
        """Starts requests until enough run, in turn from the tenant with the fewest running ones, and from its batch with the fewest."""
        service = self._service
        limit = max(model.engine.info.max_num_seqs for model in service.models)
        running: Counter[str] = Counter()
        for one in self._open.values():
            running[one.batch.tenant] += len(one.running)
        limits = {tenant: self._keys.named(tenant).max_requests or limit for tenant in running}
        while not service.draining and any(model.lifecycle.state in _SERVING for model in service.models):
            await asyncio.sleep(0)  # there may be a thousand batches
            ready = [
                one
                for one in self._open.values()
                if (one.pending or not one.exhausted)
                and running[one.batch.tenant] < limits[one.batch.tenant]
                and not self._must_wait(one.batch)
            ]
            if not ready or running.total() >= limit:
                return
            chosen = min(ready, key=lambda one: (running[one.batch.tenant], len(one.running)))
            if not chosen.pending:
                page = await self._storage.batches.unanswered(chosen.batch.id, chosen.read_to, _PAGE)
                chosen.pending.extend(page)
                chosen.exhausted = len(page) < _PAGE
                chosen.read_to = page[-1].line if page else chosen.read_to
                continue
            task = asyncio.create_task(self._answer(chosen, chosen.pending.popleft()))
            chosen.running.add(task)
            running[chosen.batch.tenant] += 1
            task.add_done_callback(chosen.running.discard)
            task.add_done_callback(lambda _: self._wake.set())

    async def _answer(self, current: _Open, request: BatchRequest) -> None:
        """Runs a request and keeps its answer, which the next `_advance` stores. A request that cannot be served now is tried again."""
        batch = current.batch
        tenant = replace(self._keys.named(batch.tenant), max_queued=None, max_requests=None)  # its limits are applied above
        try:
            async with self._charged(batch) as engine_started:
                url, body = await asyncio.to_thread(read_request, self._storage.files.path(batch.input_file_id), request)
                reply = await call(self._app, self._admission, self._service.registry, tenant, url, body, engine_started)
        except Exception:
            logger.exception("request %r of %s failed", request.custom_id, batch.id)
            reply = Reply(500, "", b'{"error":{"message":"internal error","type":"server_error","param":null,"code":"internal_error"}}')
        if reply.status == 503:
            if self._service.draining:
                return
            if reply.overloaded:
                await asyncio.sleep(reply.retry_after)
                current.pending.append(request)
                return
            current.attempts[request.line] = attempts = current.attempts.get(request.line, 0) + 1
            if attempts < MAX_ATTEMPTS:
                await self._wait_for_engine(body.get("model"))
                current.pending.append(request)
                return
        response = f'{{"status_code":{reply.status},"request_id":"{reply.request_id}","body":{reply.body.decode()}}}'
        text = output_line(request.custom_id, response)
        self._answers.append(Answer(batch.id, request.line, reply.status == 200, text))

    async def _wait_for_engine(self, name: object) -> None:
        """Waits until a request's model has an engine; the first model if there is none of that name, which the next attempt refuses."""
        model = self._service.default
        with contextlib.suppress(ApiError):
            model = self._service.find(name) if isinstance(name, str) else model
        if model.lifecycle.state is not ModelState.UNLOADED:
            await model.lifecycle.wait_for_engine()

    async def _store_answers(self) -> None:
        if answers := self._answers[:]:
            await self._storage.batches.add_answers(answers)
            del self._answers[: len(answers)]

    async def _forget(self) -> None:
        """Cancels what runs. Requests without a stored answer run again later."""
        opened, self._open = list(self._open.values()), {}
        for current in opened:
            await cancel(current.running)


def _report(what: str, error: Exception) -> None:
    """Logs a step that is tried again: in one line if the disk failed, and otherwise with a traceback."""
    expected = isinstance(error, ApiError | OSError)
    logger.error("%s for %g s: %s", what, _RETRY_SECONDS, error, exc_info=None if expected else error)
