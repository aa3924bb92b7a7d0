"""The SQLite database in the data directory. One thread owns its connection."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from chairlift.errors import InvalidSetting
from chairlift.server.errors import ApiError, unavailable
from chairlift.server.work import WorkThreads

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")

logger = logging.getLogger(__name__)

_VERSION = 2

RESERVE_BYTES = 8 << 20
"""Bytes of a file that is removed when a transaction that frees space finds the disk full. SQLite's log takes 4 MiB before it is reused."""

REQUEST_BYTES = "(512 + 12 * length(custom_id))"
"""What a batch's request without an answer holds, in SQL: no error line that this server writes for it is longer."""

DISK_FULL = 507
"""The status of errors for want of space on the disk."""

_DISK_ERRORS = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_CORRUPT", "SQLITE_NOTADB")
"""How the names of SQLite's errors begin that the disk causes: a quota that is used up is SQLITE_IOERR_WRITE."""

_SCHEMA = f"""
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX files_of_tenant ON files (tenant, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, ended_at INTEGER,
    fields TEXT NOT NULL, held_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_of_tenant ON batches (tenant, seq);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE requests (
    batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
CREATE TABLE answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, succeeded INTEGER NOT NULL, text TEXT NOT NULL, UNIQUE (batch, line)
);
PRAGMA user_version = {_VERSION};
"""

# Version 1 did not count the bytes of open batches.
_FROM_VERSION_1 = f"""
ALTER TABLE batches ADD COLUMN held_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE batches SET held_bytes = (SELECT coalesce(sum({REQUEST_BYTES}), 0) FROM requests WHERE batch = batches.id)
    + (SELECT coalesce(sum(length(CAST(text AS BLOB)) + 1), 0) FROM answers WHERE batch = batches.id);
PRAGMA user_version = {_VERSION};
"""

_UPLOADS = "CREATE TEMP TABLE uploads (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL)"
"""Files on their way in, which end with the process."""


class Database:
    """Runs functions in transactions, one after another, in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        """Opens or creates the database for this process alone; raises InvalidSetting."""
        import sqlite3

        self._thread = WorkThreads(1, "chairlift-data")
        self._closed = False
        self._reserve = directory / "reserve"
        try:
            self._connection: sqlite3.Connection = self._thread.submit(_open, directory / "chairlift.sqlite3").result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            reason = "another process uses it" if "locked" in str(error) else str(error)
            raise InvalidSetting(f"--data-dir {directory}: {reason}") from None
        self._fill_reserve()

    async def run(self, work: Callable[[sqlite3.Connection], T], then: Callable[[T], None] | None = None, *, frees: bool = False) -> T:
        """Returns `work(connection)`, committed to the disk; an exception rolls back.

        Raises ApiError: 503 after `close` and if the disk fails, 507 if it is full. `then` is called with the result after the commit, even
        if the caller is cancelled meanwhile. Work that `frees` space is done again with the reserve if the disk is full.
        """
        if self._closed:
            raise unavailable("the server is shutting down", "shutting_down", 5)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work, then, frees)

    def run_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Like `run`, for use outside of an event loop."""
        return self._thread.submit(self._transact, work).result()

    def close(self) -> None:
        """Finishes what was submitted and closes the database."""
        self._closed = True
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _transact(self, work: Callable[[sqlite3.Connection], T], then: Callable[[T], None] | None = None, frees: bool = False) -> T:
        try:
            result = self._commit(work)
        except ApiError as error:
            if not frees or error.status != DISK_FULL:
                raise
            self._reserve.unlink(missing_ok=True)
            result = self._commit(work)
        if then is not None:
            then(result)
        if frees:
            self._fill_reserve()
        return result

    def _commit(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            result = work(self._connection)
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_FULL":
                message = "the server's disk is full: delete files of /v1/files, or free space where --data-dir is"
                raise ApiError(DISK_FULL, message, type="server_error", code="insufficient_storage") from error
            if name.startswith(_DISK_ERRORS):
                logger.error("the database in --data-dir: %s (%s)", error, name)
                message = f"the server cannot read or write its data directory ({name}): its log has more"
                raise unavailable(message, "storage_failed", 30) from error
            raise
        return result

    def _fill_reserve(self) -> None:
        """Takes the space of the reserve, as far as there is some."""
        try:
            if not self._reserve.exists() or self._reserve.stat().st_size < RESERVE_BYTES:
                # Zeros would take no space on a file system that compresses.
                self._reserve.write_bytes(os.urandom(1 << 20) * (RESERVE_BYTES >> 20))
        except OSError as error:
            logger.warning("%s could not be written: on a full disk, files may not be deletable: %s", self._reserve, error.strerror)


def _open(path: Path) -> sqlite3.Connection:
    import sqlite3

    connection = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server must not run the same batches
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    connection.execute("COMMIT")
    if version == 0:
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
    elif version == 1:
        connection.executescript(f"BEGIN; {_FROM_VERSION_1} COMMIT;")
    elif version != _VERSION:
        raise sqlite3.DatabaseError(f"it was written by another version of chairlift (format {version}, this one reads {_VERSION})")
    connection.execute(_UPLOADS)
    return connection
