"""What the process of an engine that has joined another machine's server knows beside what a child of the server does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack

from chairlift.engine.seal import Seal, Seals
from chairlift.engine.worker_files import WorkerFiles
from chairlift.errors import EngineDead

JOINED = "joined"
"""The argument of a process that reads a `Worker` from its standard input."""
_pack: Callable[[object], bytes] = msgpack.dumps
_unpack: Callable[[bytes], Any] = msgpack.loads


@dataclass(frozen=True, slots=True)
class Worker:
    """The keys of its connection, of what it sends and of what it receives, and the files of its machine."""

    keys: tuple[bytes, bytes]
    files: WorkerFiles

    def encode(self) -> bytes:
        """For the process."""
        return _pack([*self.keys, self.files.settings])

    def seals(self) -> Seals:
        """Authenticates the frames. To be called once: frames are counted."""
        return Seals(*map(Seal, self.keys))


def read_worker(file: BinaryIO) -> Worker:
    """Reads what `Worker.encode` wrote. Raises EngineDead if that is not all there."""
    try:
        outgoing, incoming, settings = _unpack(file.read())
    except (ValueError, TypeError, msgpack.UnpackException):
        raise EngineDead("the process that joined has ended") from None
    return Worker((outgoing, incoming), WorkerFiles(settings))
