"""Uploaded files and the outputs of batches: rows in the database, contents in a folder."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from chairlift.errors import brief
from chairlift.server.errors import ApiError
from chairlift.server.storage.database import Database

if TYPE_CHECKING:
    from sqlite3 import Connection

MAX_FILE_BYTES = 200 << 20
"""OpenAI's limit of a batch's input."""

MAX_FILES = 1000
"""Files of one tenant, those being uploaded included."""

MAX_ALL_FILES = 50_000
"""Files of all tenants: without keys, clients name tenants as they like."""

ANSWERS_SHARE = 10
"""The last 1/10 of the space is for the answers of batches that run: uploads and new batches take none of it."""

_BUFFER_BYTES = 1 << 20
"""Bytes that are collected before a write."""

PIECE_BYTES = 1 << 16
"""Bytes that are read at once. A client that does not read its download makes the server hold two pieces."""

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

    def json(self) -> dict[str, object]:
        """Returns OpenAI's file object."""
        return {"object": "file", **asdict(self), "status": "processed", "status_details": None}


_COLUMNS = "id, filename, purpose, bytes, created_at, expires_at"


class Files:
    """The files of all tenants. A tenant's ids mean nothing to another tenant."""

    def __init__(self, directory: Path, database: Database, max_bytes: int, sharing: Collection[str] = ()) -> None:
        """`max_bytes` limits the bytes of all files, uploads and answers. None of the named tenants in `sharing`, nor all others together,
        may take more of them than it leaves. Removes what an interrupted process left; raises OSError.
        """
        self._directory = directory
        self._database = database
        self._max_bytes = max_bytes
        # A key without a name stands for all tenants that its clients name: one share.
        self._sharing = frozenset(filter(None, sharing))
        self._names = json.dumps([*self._sharing])
        directory.mkdir(mode=0o700, exist_ok=True)
        known = database.run_now(lambda connection: {row["id"] for row in connection.execute("SELECT id FROM files")})
        for path in directory.iterdir():
            if path.name not in known:
                path.unlink()

    async def begin(self, tenant: str) -> Upload:
        """Begins an upload; raises ApiError if the tenant may have no more files, or the server's files take all the space."""
        upload = Upload(self, self._database, tenant)
        try:
            await self._database.run(upload.insert)
        except BaseException:
            await upload.discard()  # a cancelled call may have inserted it
            raise
        return upload

    async def get(self, tenant: str, id: str) -> StoredFile:
        """Returns the file; raises ApiError 404, also for a file of another tenant."""
        query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)"
        row = await self._database.run(lambda connection: connection.execute(query, (id, tenant, int(time.time()))).fetchone())
        if row is None:
            raise _unknown(id)
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
        await self.get(tenant, id)

        def work(connection: Connection) -> str | None:
            query = "SELECT id FROM batches WHERE input_file_id = ? AND ended_at IS NULL"
            if (reader := connection.execute(query, (id,)).fetchone()) is not None:
                return str(reader["id"])
            if connection.execute("DELETE FROM files WHERE id = ?", (id,)).rowcount == 0:
                raise _unknown(id)  # another call has deleted it
            return None

        def remove(reader: str | None) -> None:
            if reader is None:
                self.path(id).unlink(missing_ok=True)

        if (batch := await self._database.run(work, remove, frees=True)) is not None:
            raise ApiError(409, f"the batch {batch} reads this file: cancel it first", param="file_id", code="file_in_use")

    async def remove_expired(self) -> None:
        """Deletes the files whose time is over, except those that a batch still reads."""
        unused = "id NOT IN (SELECT input_file_id FROM batches WHERE ended_at IS NULL)"

        def work(connection: Connection) -> list[str]:
            query = f"DELETE FROM files WHERE expires_at <= ? AND {unused} RETURNING id"
            return [row["id"] for row in connection.execute(query, (int(time.time()),)).fetchall()]

        def remove(ids: list[str]) -> None:
            for id in ids:
                self.path(id).unlink(missing_ok=True)

        await self._database.run(work, remove, frees=True)

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes]:
        """Yields the bytes of a file; raises ApiError 404 if it has been deleted meanwhile."""
        try:
            stream = await asyncio.to_thread(open, self.path(file.id), "rb")
        except FileNotFoundError:
            raise _unknown(file.id) from None
        with stream:
            while data := await asyncio.to_thread(stream.read, PIECE_BYTES):
                yield data

    def path(self, id: str) -> Path:
        """The path of a file's content. `id` is one that this class made."""
        return self._directory / id

    def write_output(self, lines: Iterable[str]) -> tuple[str, int]:
        """Writes the lines to a new file that has no row yet; returns its id and size. Blocks. Without a row a restart removes it."""
        id = _new_id()
        part = self.path(id + _PART)
        try:
            with part.open("wb") as stream:
                for line in lines:
                    stream.write(line.encode() + b"\n")
                _complete(stream, part, self.path(id))
                return id, stream.tell()
        except BaseException:
            part.unlink(missing_ok=True)  # the caller tries again, so a full disk would collect them
            raise

    def free_bytes(self, connection: Connection) -> int:
        """Bytes that answers may still take; negative if outputs took more than is allowed."""
        return self._max_bytes - self._used_bytes(connection, "")[0]

    def room(self, connection: Connection, tenant: str) -> int:
        """Bytes that the answers of `tenant` may still take beside what others need; not positive if there is no room."""
        used, own = self._used_bytes(connection, tenant)
        free = self._max_bytes - used
        return (free - own) // 2 if self._sharing else free

    def check_room(self, connection: Connection, tenant: str) -> None:
        """Raises ApiError unless `tenant` may have another file and there is space."""
        tables = "SELECT tenant FROM files UNION ALL SELECT tenant FROM uploads"
        files, own = connection.execute(f"SELECT count(*), coalesce(sum(tenant = ?), 0) FROM ({tables})", (tenant,)).fetchone()
        if own >= MAX_FILES:
            raise _quota(f"you have {own} files, and {MAX_FILES} are allowed: delete some")
        if files >= MAX_ALL_FILES:
            raise _quota(f"the server has {files} files, the limit")
        self.check_space(connection, tenant, 1)

    def check_space(self, connection: Connection, tenant: str, size: int) -> None:
        """Raises ApiError unless an upload or a new batch of `tenant` may store `size` more bytes. A part is left for answers."""
        used, own = self._used_bytes(connection, tenant)
        allowed = self._max_bytes - self._max_bytes // ANSWERS_SHARE
        if used + size > allowed:
            message = f"the server's files take {used} bytes, and {allowed} of the {self._max_bytes} of --max-data-size are for uploads"
            raise _quota(f"{message}: delete some")
        if self._sharing and own + size > allowed - used - size:
            raise _quota(f"your files take {own} bytes, and may take no more than they leave for others, now {allowed - used}: delete some")

    def _used_bytes(self, connection: Connection, tenant: str) -> tuple[int, int]:
        """Bytes of all files and uploads, and those that open batches hold; and how many of them are those of `tenant`.

        Tenants that share the space with it count as one unless they have a share of their own.
        """
        tables = (
            "SELECT tenant, bytes FROM files UNION ALL SELECT tenant, bytes FROM uploads"
            " UNION ALL SELECT tenant, held_bytes FROM batches WHERE ended_at IS NULL"
        )
        own, value = ("tenant = ?", tenant) if tenant in self._sharing else ("tenant NOT IN (SELECT value FROM json_each(?))", self._names)
        query = f"SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE {own}), 0) FROM ({tables})"
        used, used_by_tenant = connection.execute(query, (value,)).fetchone()
        return int(used), int(used_by_tenant)


class Upload:
    """A file on its way in. Ends with `finish`, or with `discard`.

    Its row in `uploads` has its place and its bytes until it is a file. The database's thread writes the file too, so neither a call
    that is cancelled nor one that runs beside it can leave a file that is not counted.
    """

    def __init__(self, files: Files, database: Database, tenant: str) -> None:
        self._files = files
        self._database = database
        self._tenant = tenant
        self._id = _new_id()
        self._buffer = bytearray()
        self._size = 0
        self._stream: BinaryIO | None = None

    @property
    def buffered(self) -> int:
        """Bytes that are in memory, and not in the file yet."""
        return len(self._buffer)

    def insert(self, connection: Connection) -> None:
        """Takes a place among the tenant's files; raises ApiError."""
        self._files.check_room(connection, self._tenant)
        connection.execute("INSERT INTO uploads VALUES (?, ?, 0)", (self._id, self._tenant))

    async def write(self, data: bytes) -> None:
        """Appends to the file; raises ApiError for a file that is too large."""
        self._size += len(data)
        if self._size > MAX_FILE_BYTES:
            raise ApiError(
                413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file", code="file_too_large", headers={"connection": "close"}
            )
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            await self._database.run(self._flush)

    async def finish(self, filename: str, purpose: str, lifetime: int | None) -> StoredFile:
        """Makes the file visible, on the disk. `lifetime` is in seconds."""
        await self._database.run(self._flush)
        assert self._stream is not None
        await asyncio.to_thread(_complete, self._stream, self._part, self._files.path(self._id))
        now = int(time.time())
        file = StoredFile(self._id, filename, purpose, self._size, now, None if lifetime is None else now + lifetime)

        def work(connection: Connection) -> None:
            connection.execute("DELETE FROM uploads WHERE id = ?", (self._id,))
            insert_file(connection, self._tenant, file)

        await self._database.run(work)
        return file

    async def discard(self) -> None:
        """Removes an upload that is not finished."""

        def work(connection: Connection) -> None:
            if self._stream is not None:
                with suppress(OSError):  # a full disk does not take the rest of the buffer
                    self._stream.close()
            if connection.execute("DELETE FROM uploads WHERE id = ?", (self._id,)).rowcount:
                for path in (self._part, self._files.path(self._id)):
                    path.unlink(missing_ok=True)

        await asyncio.shield(self._database.run(work))

    @property
    def _part(self) -> Path:
        return self._files.path(self._id + _PART)

    def _flush(self, connection: Connection) -> None:
        """Takes the space of what is in the buffer and writes it; raises ApiError and OSError."""
        self._files.check_space(connection, self._tenant, len(self._buffer))
        connection.execute("UPDATE uploads SET bytes = bytes + ? WHERE id = ?", (len(self._buffer), self._id))
        if self._stream is None:
            self._stream = self._part.open("xb")
        self._stream.write(self._buffer)
        self._buffer.clear()


def insert_file(connection: Connection, tenant: str, file: StoredFile) -> None:
    """Inserts a file's row."""
    values = (tenant, file.id, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at)
    connection.execute(f"INSERT INTO files (tenant, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


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


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"no such file: {brief(id)}", param="file_id", code="file_not_found")


def _quota(message: str) -> ApiError:
    return ApiError(400, message, param="file", code="file_quota_exceeded", headers={"connection": "close"})
