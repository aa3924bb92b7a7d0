"""The journal file, which records the scheduler's inputs."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import logging
import os
import stat
import time
import weakref
from typing import BinaryIO

from chairlift.errors import InvalidSetting

log = logging.getLogger("chairlift")

BUFFER = 2**20
"""Bytes buffered before a write while there is work."""
FLUSH_SECONDS = 5.0
"""Seconds after which records are written although there is work, for those who follow the journal."""


class Journal:
    """An append-only file of one engine. If a write fails, the journal ends with a warning and the engine continues."""

    def __init__(self, path: str) -> None:
        """Opens the file, or creates it, for one engine. Raises InvalidSetting if that fails, or another engine writes the file."""
        self._path, self._is_new = path, not os.path.lexists(path)
        try:
            # Readable by the owner only, because it contains tenants' names and hashes of prompts.
            self._file: BinaryIO | None = open(path, "wb", BUFFER, opener=_own)  # noqa: SIM115 (open for as long as the engine is)
        except OSError as error:
            raise _unwritable(path, error) from None
        self._flush_due = time.monotonic() + FLUSH_SECONDS
        _opened.add(self)

    def begin(self) -> None:
        """Empties the file, once the engine can write to it."""
        if self._file is not None and _is_regular(self._file.fileno()):
            self._file.truncate(0)

    def append(self, record: bytes, *, flush: bool) -> None:
        """Appends records; `flush` writes the buffer to the file."""
        if self._file is None:
            return
        try:
            self._file.write(record)
            if flush or time.monotonic() >= self._flush_due:
                self._file.flush()
                self._flush_due = time.monotonic() + FLUSH_SECONDS
        except OSError as error:
            log.warning("cannot write the journal, which ends here: %s", error)
            _unlock(self._file.fileno())
            self._file = None

    def close(self) -> None:
        """Flushes and closes the file."""
        self.append(b"", flush=True)
        if self._file is not None:
            _unlock(self._file.fileno())
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Closes the file of an engine that could not start, and removes it if it was created for that engine."""
        if self._is_new:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self.close()

    def leave(self) -> None:
        """Lets a forked process neither hold the file nor write the records that its parent writes."""
        if self._file is not None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)


_opened: weakref.WeakSet[Journal] = weakref.WeakSet()


def _leave_all() -> None:
    for journal in _opened:
        journal.leave()


os.register_at_fork(after_in_child=_leave_all)


def check_journal(path: str) -> None:
    """Raises InvalidSetting if the file cannot be written, or an engine writes it or one that follows it. Changes and creates none."""
    directory = os.path.join(os.path.dirname(os.path.abspath(path)), "")
    existing = path if os.path.exists(path) else directory
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "Is a directory")
        os.stat(directory)  # fails for a file, because of the slash at its end
        if not os.access(existing, os.W_OK):
            raise PermissionError(13, "Permission denied")
        # A server whose engine was restarted writes a file that follows.
        following = (f"{path}.{number}" for number in itertools.count(1))
        for name in (path, *itertools.takewhile(os.path.isfile, following)):
            if os.path.isfile(name):
                os.close(_locked(os.open(name, os.O_WRONLY)))
    except OSError as error:
        raise _unwritable(path, error) from None


def create_next(path: str) -> str:
    """Creates the first of PATH, PATH.1, PATH.2 and so on that does not exist, and returns its name. Raises InvalidSetting if that fails.

    Of several processes that do this at the same time, each gets a file of its own.
    """
    name, number = path, 0
    while True:
        try:
            open(name, "xb", opener=_private).close()
            return name
        except FileExistsError:
            number += 1
            name = f"{path}.{number}"
        except OSError as error:
            raise _unwritable(name, error) from None


def _unwritable(path: str, error: OSError) -> InvalidSetting:
    if isinstance(error, BlockingIOError):
        return InvalidSetting(f"--journal {path}: another engine writes it: close that one, or name another file")
    return InvalidSetting(f"--journal {path}: cannot write there ({error.strerror}); name a file in a directory that exists")


def _private(path: str, flags: int) -> int:
    handle = os.open(path, flags, 0o600)
    if _is_regular(handle):
        os.fchmod(handle, 0o600)  # the file may have existed
    return handle


def _own(path: str, flags: int) -> int:
    """Opens a file for one engine, and leaves what is in it."""
    return _locked(_private(path, flags & ~os.O_TRUNC))


def _locked(handle: int) -> int:
    """Locks an open file until it is closed, and returns it. Raises BlockingIOError, with the file closed, if another has the lock."""
    for may_wait in (True, False) if _is_regular(handle) else ():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not may_wait:
                os.close(handle)
                raise
            gc.collect()  # an `LLM` that was dropped without `close` may have it
        except OSError:
            break  # some network file systems have no locks
    return handle


def _unlock(handle: int) -> None:
    """Ends the lock of an open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


def _is_regular(handle: int) -> bool:
    """Whether it is a file and no device like /dev/null, which engines may share."""
    return stat.S_ISREG(os.fstat(handle).st_mode)
