"""Batches: their requests that wait for an answer, and the answers until the output files are written."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from chairlift.errors import brief
from chairlift.server.errors import ApiError
from chairlift.server.storage.database import REQUEST_BYTES, Database
from chairlift.server.storage.files import Files, StoredFile, insert_file

if TYPE_CHECKING:
    from sqlite3 import Connection, Row

MAX_OPEN_BATCHES = 32
"""Batches of one tenant that have not ended."""

MAX_ALL_OPEN_BATCHES = 1024
"""Batches of all tenants that have not ended: without keys, clients name tenants as they like."""

MAX_BATCHES = 10_000
"""Batches of all tenants that are remembered. Beyond it, the tenant that has the most forgets its oldest ended one."""

WINDOW_SECONDS = 24 * 3600
"""OpenAI's completion window."""

KEPT_SECONDS = 30 * 24 * 3600
"""Seconds after its end for which a batch is remembered."""


class Status(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    FAILED = "failed"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_TIMES: dict[Status, str] = {status: f"{status.value}_at" for status in Status if status is not Status.VALIDATING}
_ENDED = (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)

NO_ROOM = {
    "code": "file_quota_exceeded",
    "message": "The answers of this batch take all the space you may have (--max-data-size): delete files and send this request again.",
}
"""The error of requests whose answers cannot be stored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. `fields` are those of OpenAI's object that the other attributes do not have."""

    id: str
    tenant: str
    status: Status
    input_file_id: str
    total: int
    completed: int
    failed: int
    fields: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in _ENDED

    def json(self) -> dict[str, object]:
        """Returns OpenAI's batch object."""
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        fields = {name: value for name, value in self.fields.items() if name != "output_expires_after"}
        own = {"id": self.id, "object": "batch", "status": self.status.value, "input_file_id": self.input_file_id}
        return {**own, **fields, "request_counts": counts}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch's input, and where its text is in the file."""

    line: int
    custom_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The line of the output, or of the error file, that answers a request."""

    batch: str
    line: int
    succeeded: bool
    text: str

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return len(self.text.encode()) + 1


_COLUMNS = "id, tenant, status, input_file_id, total, completed, failed, fields"


class Batches:
    """The batches of all tenants."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files
        self.changed = asyncio.Event()
        """Set when a batch was created or cancelled. Whoever waits for it clears it."""

    async def create(
        self,
        tenant: str,
        input_file_id: str,
        endpoint: str | None,
        metadata: Mapping[str, str] | None,
        output_lifetime: int | None,
        *,
        window: int | None = WINDOW_SECONDS,
    ) -> Batch:
        """Creates a batch; raises ApiError if there are too many open ones or too many files, or if there is no space.

        Without `endpoint` its requests may use any, and without `window`, in seconds, it never expires.
        """
        now = int(time.time())
        fields = {
            "endpoint": endpoint,
            "completion_window": "24h",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": None if window is None else now + window,
            **dict.fromkeys(_TIMES.values()),
            "metadata": metadata,
            "output_expires_after": output_lifetime,
        }
        batch = Batch(f"batch_{uuid.uuid4().hex}", tenant, Status.VALIDATING, input_file_id, 0, 0, 0, fields)

        def work(connection: Connection) -> None:
            self._files.check_room(connection, tenant)
            _check_open(connection, tenant)
            # The file may have been deleted since the caller saw it.
            query = f"INSERT INTO batches ({_COLUMNS}) SELECT ?, ?, ?, id, 0, 0, 0, ? FROM files WHERE id = ? AND tenant = ?"
            connection.execute(query, (batch.id, tenant, batch.status.value, json.dumps(fields), input_file_id, tenant))
            _forget_one(connection)

        await self._database.run(work)
        self.changed.set()
        return await self.get(tenant, batch.id)

    async def get(self, tenant: str, id: str) -> Batch:
        """Returns the batch; raises ApiError 404, also for a batch of another tenant."""
        query = f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND tenant = ?"
        row = await self._database.run(lambda connection: connection.execute(query, (id, tenant)).fetchone())
        if row is None:
            raise ApiError(404, f"no such batch: {brief(id)}", param="batch_id", code="batch_not_found")
        return _batch(row)

    async def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Returns a page of the tenant's batches, newest first, and whether more follow; raises ApiError 404 for an unknown `after`."""
        condition, values = "tenant = ?", [tenant]
        if after is not None:
            await self.get(tenant, after)
            condition += " AND seq < (SELECT seq FROM batches WHERE id = ?)"
            values.append(after)
        query = f"SELECT {_COLUMNS} FROM batches WHERE {condition} ORDER BY seq DESC LIMIT ?"
        rows = await self._database.run(lambda connection: connection.execute(query, (*values, limit + 1)).fetchall())
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    async def open(self) -> list[Batch]:
        """Returns the batches of all tenants that have not ended, oldest first."""
        query = f"SELECT {_COLUMNS} FROM batches WHERE ended_at IS NULL ORDER BY seq"
        # Their fields are parsed in the database's thread: there may be a thousand batches.
        return await self._database.run(lambda connection: [_batch(row) for row in connection.execute(query)])

    async def cancel(self, tenant: str, id: str) -> Batch:
        """Begins the cancellation of a batch; raises ApiError 404, and 409 if it has ended or its output is being written."""
        batch = await self.get(tenant, id)
        if batch.status is Status.CANCELLING:
            return batch
        if not await self._move(id, (Status.VALIDATING, Status.IN_PROGRESS), Status.CANCELLING):
            batch = await self.get(tenant, id)
            raise ApiError(
                409, f"the batch is {batch.status.value} and cannot be cancelled", param="batch_id", code="batch_not_cancellable"
            )
        self.changed.set()
        return await self.get(tenant, id)

    async def start(self, batch: Batch, requests: Sequence[BatchRequest]) -> None:
        """Stores the requests of a valid batch, whose answers may be added from now on. Without space for their errors the batch fails."""

        def work(connection: Connection) -> None:
            rows = ((batch.id, request.line, request.custom_id, request.start, request.length) for request in requests)
            if not _set_status(connection, batch.id, (Status.VALIDATING,), Status.IN_PROGRESS):
                return
            connection.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?)", rows)
            [held] = connection.execute(f"SELECT sum({REQUEST_BYTES}) FROM requests WHERE batch = ?", (batch.id,)).fetchone()
            self._files.check_space(connection, batch.tenant, held)
            connection.execute("UPDATE batches SET total = ?, held_bytes = ? WHERE id = ?", (len(requests), held, batch.id))

        try:
            await self._database.run(work)
        except ApiError as refusal:
            if refusal.status != 400:
                raise  # the disk is full or fails, and the caller tries again
            await self.fail(batch, [{"code": "file_quota_exceeded", "message": str(refusal), "param": None, "line": None}])

    async def fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        """Ends a batch whose input is invalid."""
        changes = {"errors": {"object": "list", "data": errors}}
        await self._move(batch.id, (Status.VALIDATING,), Status.FAILED, changes)

    async def unanswered(self, id: str, after: int, limit: int) -> list[BatchRequest]:
        """Returns the next requests without an answer behind line `after`."""
        query = "SELECT line, custom_id, start, length FROM requests WHERE batch = ? AND line > ? ORDER BY line LIMIT ?"
        rows = await self._database.run(lambda connection: connection.execute(query, (id, after, limit)).fetchall())
        return [BatchRequest(*row) for row in rows]

    async def add_answers(self, answers: Iterable[Answer]) -> None:
        """Stores answers, in one transaction. A request that has one already keeps it.

        If an answer takes more space than its tenant may have, its request and all other requests of its batch without an answer fail.
        """

        def work(connection: Connection) -> None:
            free = self._files.free_bytes(connection)
            rooms: dict[str, int] = {}
            for answer in answers:
                owned = "requests JOIN batches ON batch = batches.id"
                query = f"SELECT {REQUEST_BYTES} AS held, tenant FROM {owned} WHERE batch = ? AND line = ?"
                row = connection.execute(query, (answer.batch, answer.line)).fetchone()
                if row is None:
                    continue
                tenant = row["tenant"]
                if tenant not in rooms:
                    rooms[tenant] = self._files.room(connection, tenant)
                if (more := answer.size - row["held"]) > max(min(free, rooms[tenant]), 0):
                    rest = connection.execute("SELECT line, custom_id FROM requests WHERE batch = ?", (answer.batch,)).fetchall()
                    for line, custom_id in rest:
                        _add_answer(connection, Answer(answer.batch, line, False, output_line(custom_id, "null", json.dumps(NO_ROOM))))
                else:
                    _add_answer(connection, answer)
                    free -= more
                    rooms[tenant] -= more

        await self._database.run(work)

    async def finish(self, batch: Batch, status: Status, unanswered: str | None) -> None:
        """Writes the output files and ends the batch with `status`.

        `unanswered` is the error of the requests without an answer, as JSON. An interrupted call can be repeated: the files count only
        once the batch has ended.
        """
        before = (batch.status,)
        if batch.status is Status.IN_PROGRESS and status is Status.COMPLETED:
            await self._move(batch.id, before, Status.FINALIZING)
            before = (Status.FINALIZING,)
        lifetime = batch.fields["output_expires_after"]

        written: list[str] = []

        def work(connection: Connection) -> None:
            [current] = connection.execute("SELECT status FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if Status(current) not in before:
                return  # it was cancelled meanwhile, and the caller will see that
            changes: dict[str, Any] = {}
            for name, succeeded in (("output", True), ("error", False)):
                lines = _output(connection, batch.id, succeeded, unanswered)
                if (first := next(lines, None)) is None:
                    continue
                id, size = self._files.write_output(chain([first], lines))
                written.append(id)
                now = int(time.time())
                file = StoredFile(id, f"{batch.id}_{name}.jsonl", "batch_output", size, now, None if lifetime is None else now + lifetime)
                insert_file(connection, batch.tenant, file)
                changes[f"{name}_file_id"] = id
            if unanswered is not None:
                query = "UPDATE batches SET failed = failed + (SELECT count(*) FROM requests WHERE batch = ?1) WHERE id = ?1"
                connection.execute(query, (batch.id,))
            _set_status(connection, batch.id, before, status, changes)
            for table in ("requests", "answers"):
                connection.execute(f"DELETE FROM {table} WHERE batch = ?", (batch.id,))

        try:
            await self._database.run(work)
        except Exception:
            for id in written:  # the caller tries again, so a full disk would collect them
                self._files.path(id).unlink(missing_ok=True)
            raise

    async def remove_old(self) -> None:
        """Forgets batches that ended long ago."""
        before = int(time.time()) - KEPT_SECONDS
        await self._database.run(lambda connection: connection.execute("DELETE FROM batches WHERE ended_at < ?", (before,)), frees=True)

    async def _move(self, id: str, before: Sequence[Status], status: Status, changes: Mapping[str, Any] | None = None) -> bool:
        # On a full disk a batch can be cancelled, and then the file that it reads can be deleted.
        return await self._database.run(partial(_set_status, id=id, before=before, status=status, changes=changes), frees=True)


def _check_open(connection: Connection, tenant: str) -> None:
    """Raises ApiError unless `tenant` may have another open batch."""
    query = "SELECT count(*), coalesce(sum(tenant = ?), 0) FROM batches WHERE ended_at IS NULL"
    count, own = connection.execute(query, (tenant,)).fetchone()
    if own >= MAX_OPEN_BATCHES:
        message = f"you have {own} batches that have not ended, the limit: wait for one to end"
        raise ApiError(400, message, code="batch_quota_exceeded")
    if count >= MAX_ALL_OPEN_BATCHES:
        raise ApiError(400, f"the server has {count} batches that have not ended, the limit: try again later", code="batch_quota_exceeded")


def _forget_one(connection: Connection) -> None:
    """Forgets an ended batch if there are too many."""
    [count] = connection.execute("SELECT count(*) FROM batches").fetchone()
    if count > MAX_BATCHES:
        largest = "SELECT tenant FROM batches WHERE ended_at IS NOT NULL GROUP BY tenant ORDER BY count(*) DESC LIMIT 1"
        connection.execute(
            f"DELETE FROM batches WHERE seq = (SELECT min(seq) FROM batches WHERE ended_at IS NOT NULL AND tenant = ({largest}))"
        )


def _set_status(
    connection: Connection, id: str, before: Sequence[Status], status: Status, changes: Mapping[str, Any] | None = None
) -> bool:
    """Moves a batch on, unless it has left the states `before`; returns whether it was moved."""
    row = connection.execute("SELECT status, fields FROM batches WHERE id = ?", (id,)).fetchone()
    if row is None or Status(row["status"]) not in before:
        return False
    now = int(time.time())
    fields = json.loads(row["fields"]) | {_TIMES[status]: now} | dict(changes or {})
    ended = now if status in _ENDED else None
    query = "UPDATE batches SET status = ?, ended_at = ?, fields = ? WHERE id = ?"
    connection.execute(query, (status.value, ended, json.dumps(fields), id))
    return True


def _add_answer(connection: Connection, answer: Answer) -> None:
    """Replaces a request by its answer."""
    name = (answer.batch, answer.line)
    query = f"DELETE FROM requests WHERE batch = ? AND line = ? RETURNING {REQUEST_BYTES}"
    [[held]] = connection.execute(query, name).fetchall()
    connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (*name, answer.succeeded, answer.text))
    count = "completed" if answer.succeeded else "failed"
    query = f"UPDATE batches SET {count} = {count} + 1, held_bytes = held_bytes + ? WHERE id = ?"
    connection.execute(query, (answer.size - held, answer.batch))


def _output(connection: Connection, id: str, succeeded: bool, unanswered: str | None) -> Iterator[str]:
    """Yields the lines of the output, or of the error file, in the order of the input."""
    query = "SELECT line, text FROM answers WHERE batch = ? AND succeeded = ? ORDER BY line"
    for row in connection.execute(query, (id, succeeded)):
        yield row["text"]
    if not succeeded and unanswered is not None:
        for row in connection.execute("SELECT custom_id FROM requests WHERE batch = ? ORDER BY line", (id,)):
            yield output_line(row["custom_id"], "null", unanswered)


def output_line(custom_id: str, response: str, error: str = "null") -> str:
    """Returns a line of an output file; `response` and `error` are JSON."""
    return f'{{"id":"batch_req_{uuid.uuid4().hex}","custom_id":{json.dumps(custom_id)},"response":{response},"error":{error}}}'


def _batch(row: Row) -> Batch:
    id, tenant, status, input_file_id, total, completed, failed, fields = row
    return Batch(id, tenant, Status(status), input_file_id, total, completed, failed, json.loads(fields))
