"""Uploaded files and the outputs of batches: rows in the database, contents in a folder."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from chairlift.server.errors import ApiError, brief
from chairlift.server.storage.database import Database

if TYPE_CHECKING:
    from sqlite3 import Connection

MAX_FILE_BYTES = 200 << 20
"""OpenAI's limit of a batch's input."""

MAX_FILES = 1000
"""Files of one tenant, those being uploaded included."""

MAX_ALL_FILES = 50_000
"""Files of all tenants: without keys, clients name tenants as they like."""

_BUFFER_BYTES = 1 << 20
"""Bytes that are collected before a write, and read at once."""

_PART = ".part"
"""Suffix of a file that is not complete."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None

    def json(self) -> dict[str, Any]:
        """Returns OpenAI's file object."""
        return {"object": "file", **asdict(self), "status": "processed", "status_details": None}


_COLUMNS = "id, filename, purpose, bytes, created_at, expires_at"


class Files:
    """The files of all tenants. A tenant's ids mean nothing to another tenant."""

    def __init__(self, directory: Path, database: Database, max_bytes: int) -> None:
        """`max_bytes` limits the sum of all uploads. Removes what an interrupted process left incomplete; raises OSError."""
        self._directory = directory
        self._database = database
        self._max_bytes = max_bytes
        directory.mkdir(mode=0o700, exist_ok=True)
        self._bytes, self._counts = database.run_now(_usage)
        known = database.run_now(lambda connection: {row["id"] for row in connection.execute("SELECT id FROM files")})
        for path in directory.iterdir():
            if path.name not in known:
                path.unlink()

    def begin(self, tenant: str) -> Upload:
        """Begins an upload; raises ApiError if the tenant may have no more files."""
        count = self._counts.get(tenant, 0)
        if count >= MAX_FILES:
            raise _quota(f"you have {count} files, and {MAX_FILES} are allowed: delete some")
        if sum(self._counts.values()) >= MAX_ALL_FILES:
            raise _quota(f"the server has {MAX_ALL_FILES} files, the limit")
        self._counts[tenant] = count + 1
        return Upload(self, tenant)

    async def get(self, tenant: str, id: str) -> StoredFile:
        """Returns the file; raises ApiError 404, also for a file of another tenant."""
        query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)"
        row = await self._database.run(lambda connection: connection.execute(query, (id, tenant, int(time.time()))).fetchone())
        if row is None:
            raise ApiError(404, f"no such file: {brief(id)}", param="file_id", code="file_not_found")
        return StoredFile(*row)

    async def page(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """Returns a page of the tenant's files, and whether more follow; raises ApiError 404 for an unknown `after`."""
        conditions, values = ["tenant = ?", "(expires_at IS NULL OR expires_at > ?)"], [tenant, int(time.time())]
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            await self.get(tenant, after)
            conditions.append(f"seq {'<' if newest_first else '>'} (SELECT seq FROM files WHERE id = ?)")
            values.append(after)
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT {_COLUMNS} FROM files WHERE {' AND '.join(conditions)} ORDER BY seq {order} LIMIT ?"
        rows = await self._database.run(lambda connection: connection.execute(query, (*values, limit + 1)).fetchall())
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, tenant: str, id: str) -> None:
        """Deletes a file; raises ApiError 404, and 409 if a batch still reads it."""
        file = await self.get(tenant, id)

        def work(connection: Connection) -> str | None:
            query = "SELECT id FROM batches WHERE input_file_id = ? AND ended_at IS NULL"
            if (reader := connection.execute(query, (id,)).fetchone()) is not None:
                return str(reader["id"])
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
            return None

        if (batch := await self._database.run(work)) is not None:
            raise ApiError(409, f"the batch {batch} reads this file: cancel it first", param="file_id", code="file_in_use")
        self._forget(tenant, file.bytes)
        await asyncio.to_thread(self.path(id).unlink, missing_ok=True)

    async def remove_expired(self) -> None:
        """Deletes the files whose time is over, except those that a batch still reads."""
        unused = "id NOT IN (SELECT input_file_id FROM batches WHERE ended_at IS NULL)"

        def work(connection: Connection) -> list[tuple[str, str, int]]:
            query = f"DELETE FROM files WHERE expires_at <= ? AND {unused} RETURNING id, tenant, bytes"
            return [tuple(row) for row in connection.execute(query, (int(time.time()),)).fetchall()]

        for id, tenant, size in await self._database.run(work):
            self._forget(tenant, size)
            await asyncio.to_thread(self.path(id).unlink, missing_ok=True)

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes]:
        """Yields the bytes of a file."""
        with await asyncio.to_thread(open, self.path(file.id), "rb") as stream:
            while data := await asyncio.to_thread(stream.read, _BUFFER_BYTES):
                yield data

    def path(self, id: str) -> Path:
        """The path of a file's content. `id` is one that this class made."""
        return self._directory / id

    def write_output(self, lines: Iterable[str]) -> tuple[str, int]:
        """Writes the lines to a new file that has no row yet; returns its id and size. Blocks. Without a row a restart removes it."""
        id = _new_id()
        part = self.path(id + _PART)
        with part.open("wb") as stream:
            for line in lines:
                stream.write(line.encode() + b"\n")
            _complete(stream, part, self.path(id))
            return id, stream.tell()

    def add_output(self, tenant: str, size: int) -> None:
        """Counts an output whose row was inserted. Outputs are never refused, but leave less room for uploads."""
        self._bytes += size
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def _reserve(self, size: int) -> None:
        """Takes space for a part of an upload; raises ApiError."""
        if self._bytes + size > self._max_bytes:
            raise _quota(f"the server's files take {self._bytes} bytes, and {self._max_bytes} are allowed (--max-data-size): delete some")
        self._bytes += size

    def _forget(self, tenant: str, size: int) -> None:
        self._bytes -= size
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]


class Upload:
    """A file on its way in. Ends with `finish`, or with `discard`."""

    def __init__(self, files: Files, tenant: str) -> None:
        self._files = files
        self._tenant = tenant
        self._id = _new_id()
        self._buffer = bytearray()
        self._size = 0
        self._stream: BinaryIO | None = None
        self._done = False

    async def write(self, data: bytes) -> None:
        """Appends to the file; raises ApiError for a file that is too large."""
        if self._size + len(data) > MAX_FILE_BYTES:
            raise ApiError(
                413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file", code="file_too_large", headers={"connection": "close"}
            )
        self._files._reserve(len(data))
        self._size += len(data)
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            await self._flush()

    async def finish(self, filename: str, purpose: str, lifetime: int | None) -> StoredFile:
        """Makes the file visible, on the disk. `lifetime` is in seconds."""
        await self._flush()
        assert self._stream is not None
        await asyncio.to_thread(_complete, self._stream, self._part, self._files.path(self._id))
        now = int(time.time())
        file = StoredFile(self._id, filename, purpose, self._size, now, None if lifetime is None else now + lifetime)
        await self._files._database.run(partial(insert_file, tenant=self._tenant, file=file))
        self._done = True
        return file

    async def discard(self) -> None:
        """Removes an upload that is not finished."""
        if self._stream is not None:
            self._stream.close()
        if self._done:
            return
        self._done = True
        self._files._forget(self._tenant, self._size)
        for path in (self._part, self._files.path(self._id)):
            path.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return self._files.path(self._id + _PART)

    async def _flush(self) -> None:
        if self._stream is None:
            self._stream = await asyncio.to_thread(open, self._part, "xb")
        data, self._buffer = bytes(self._buffer), bytearray()
        await asyncio.to_thread(self._stream.write, data)


def insert_file(connection: Connection, tenant: str, file: StoredFile) -> None:
    """Inserts a file's row."""
    values = (tenant, file.id, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at)
    connection.execute(f"INSERT INTO files (tenant, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def _usage(connection: Connection) -> tuple[int, dict[str, int]]:
    rows = connection.execute("SELECT tenant, count(*) AS files, sum(bytes) AS bytes FROM files GROUP BY tenant").fetchall()
    return sum(row["bytes"] for row in rows), {row["tenant"]: row["files"] for row in rows}


def _complete(stream: BinaryIO, part: Path, path: Path) -> None:
    """Puts a written file on the disk under its final name."""
    stream.flush()
    os.fsync(stream.fileno())
    part.rename(path)
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def _new_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def _quota(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="file_quota_exceeded", headers={"connection": "close"})
