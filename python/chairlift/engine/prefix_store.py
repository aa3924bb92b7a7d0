"""KV blocks of prompt beginnings in files, which outlive the engine."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from chairlift.directories import private_directory
from chairlift.errors import InvalidSetting

log = logging.getLogger("chairlift")

CHECKS = 20
"""The limit is checked once a process has written this part of it. So each process may exceed it by as much for a short time."""
TEMPORARY_SECONDS = 3600.0
"""A file that is older and was not renamed is no longer written."""
_MAGIC = b"chairlift-kv-1\n\0"
_DIGEST_BYTES = 16
_OWN = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}(\.\d+-\d+)?")
"""The folder and the name of each file of a store. The directory may have others, which the user has put there."""


class PrefixStore:
    """Files with one KV block each, in a folder for one fingerprint. Several processes may share a directory.

    A block's name is the hash of its tokens and of the name before it, which for a first block stands for the group of its tenants. A file
    has the fingerprint, the parent's name, the tokens, the KV and a checksum. All are compared when it is read, and a file that differs is
    not used. Methods may be called in any thread.
    """

    def __init__(self, directory: str, limit: int, fingerprint: str) -> None:
        """Creates the directory, for this user alone. Raises InvalidSetting if it cannot be used."""
        self._directory, self._limit = store_directory(directory), limit
        self._folder = private_directory("--prefix-cache-dir", str(self._directory / fingerprint))
        self._fingerprint = bytes.fromhex(fingerprint)
        self._failed = False
        self.blocks_evicted = 0
        self._unchecked = 0  # bytes written since the last check of the limit
        sizes = self._trim()
        self.contents = f"{directory} has {len(sizes):,} blocks, {sum(sizes.values()) / 1e6:,.0f} of {limit / 1e6:,.0f} MB"
        """What the directory had at the start, in words."""

    def root(self, group: str) -> bytes:
        """The parent of a prompt's first block in a group of tenants that share blocks; "" if all tenants do."""
        if not group:
            return bytes(_DIGEST_BYTES)
        return hashlib.blake2b(group.encode(), digest_size=_DIGEST_BYTES, key=self._fingerprint).digest()

    def name(self, parent: bytes, tokens: bytes) -> bytes:
        """The name of the block with these tokens (int32) after the block `parent`."""
        return hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES, key=self._fingerprint).digest()

    def has(self, name: bytes) -> bool:
        """Whether there is a file for a block."""
        return os.path.exists(self._path(name))

    def touch(self, name: bytes) -> None:
        """Marks a block as used now. The blocks before it are used as late as it is."""
        with suppress(OSError):
            os.utime(self._path(name))

    def read(self, name: bytes, parent: bytes, tokens: bytes) -> memoryview | None:
        """The KV of a block; None if there is no file for it, or an invalid one, which is deleted."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head = self._head(parent, tokens)
        body = memoryview(content)[:-_DIGEST_BYTES]
        if content[: len(head)] != head or _checksum(body) != content[-_DIGEST_BYTES:]:
            log.warning("%s is damaged: it is deleted and its tokens are computed again", path)
            with suppress(OSError):
                path.unlink()
            return None
        self.touch(name)
        return body[len(head) :]

    def write(self, name: bytes, parent: bytes, tokens: bytes, kv: bytes) -> bool:
        """Writes a block, unless there is a file for it. False if that fails; the first failure is logged."""
        path = self._path(name)
        if os.path.exists(path):
            return True
        content = self._head(parent, tokens) + kv
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(content)
                file.write(_checksum(content))
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._failed:
                log.warning("--prefix-cache-dir %s: a block cannot be written (%s)", self._directory, error.strerror or error)
            self._failed = True
            return False
        self._unchecked += len(content) + _DIGEST_BYTES
        if self._unchecked > self._limit // CHECKS:
            self._trim()
        return True

    def _trim(self) -> dict[Path, int]:
        """If all files exceed the limit, deletes the least recently used until a tenth is free. A block is deleted before its parent.

        Returns the sizes of the files that are left.
        """
        self._unchecked = 0
        sizes: dict[Path, int] = {}
        used: dict[Path, int] = {}
        written = time.time() - TEMPORARY_SECONDS
        for path in self._directory.glob("*/*"):
            if not _OWN.fullmatch(f"{path.parent.name}/{path.name}"):
                continue
            with suppress(OSError):  # another process has deleted it
                found = path.stat()
                if stat.S_ISREG(found.st_mode) and (not path.suffix or found.st_mtime < written):
                    sizes[path], used[path] = found.st_size, found.st_mtime_ns
        excess = sum(sizes.values()) - self._limit
        if excess <= 0:
            return sizes
        excess += self._limit // 10
        parents = {path: path.parent / _parent(path) for path in sizes}
        # A block counts as used later than the blocks after it. From the latest on, each path climbs only to one that is later.
        for path in sorted(sizes, key=lambda path: -used[path]):
            climbed = {path}  # damaged files may name each other
            while (above := parents[path]) in used and used[above] <= used[path] and above not in climbed:
                used[above] = used[path] + 1
                climbed.add(path := above)
        for path in sorted(sizes, key=lambda path: used[path]):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink()
                self.blocks_evicted += 1
            excess -= sizes.pop(path)
        return sizes

    def _path(self, name: bytes) -> Path:
        return self._folder / name.hex()

    def _head(self, parent: bytes, tokens: bytes) -> bytes:
        return _MAGIC + self._fingerprint + parent + tokens


def store_directory(directory: str) -> Path:
    """Creates the directory of a store, for this user alone. Raises InvalidSetting if it cannot be used, or if others can write there."""
    path = private_directory("--prefix-cache-dir", directory)
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidSetting(f"--prefix-cache-dir {directory}: the directory must belong to this user and be writable by nobody else")
    return path


def _parent(path: Path) -> str:
    """The name of the block before the one in a file; "" if the file is short, or another process has deleted it."""
    at = len(_MAGIC) + _DIGEST_BYTES
    try:
        with path.open("rb") as file:
            return file.read(at + _DIGEST_BYTES)[at:].hex()
    except OSError:
        return ""


def _checksum(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
