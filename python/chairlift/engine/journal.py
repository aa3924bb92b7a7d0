"""The file in which the scheduler's inputs are recorded."""

from __future__ import annotations

import logging
import os
from typing import BinaryIO

from chairlift.errors import InvalidSetting

log = logging.getLogger("chairlift")

BUFFER = 2**20
"""Bytes that are kept before they are written, while there is work."""


class Journal:
    """A file that grows with what is recorded; when it can grow no further, that is logged once and the work goes on."""

    def __init__(self, path: str) -> None:
        """Makes the file anew; raises InvalidSetting where it can't be."""
        try:
            # Tenants' names and the names of prompts' blocks are nobody else's business.
            self._file: BinaryIO | None = open(path, "wb", BUFFER, opener=_private)  # noqa: SIM115 (open for as long as the engine is)
        except OSError as error:
            raise InvalidSetting(
                f"--journal {path}: cannot write there ({error.strerror}); name a file in a directory that exists"
            ) from None

    def append(self, record: bytes, *, flush: bool) -> None:
        """Takes what was recorded; `flush` writes out everything so far."""
        if self._file is None:
            return
        try:
            self._file.write(record)
            if flush:
                self._file.flush()
        except OSError as error:
            log.warning("the journal ends here, it cannot be written: %s", error)
            self._file = None

    def close(self) -> None:
        """Writes out the rest."""
        self.append(b"", flush=True)
        if self._file is not None:
            self._file.close()
            self._file = None


def _private(path: str, flags: int) -> int:
    handle = os.open(path, flags, 0o600)
    os.chmod(path, 0o600)  # it may have been there before
    return handle
