"""What the process of an engine that has joined another machine's server is given, beyond what a child of the server is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import msgpack

from chairlift.engine.machine_files import MachineFiles
from chairlift.engine.seal import Seal, Seals
from chairlift.errors import EngineDead

_pack: Callable[[object], bytes] = msgpack.dumps
_unpack: Callable[[bytes], Any] = msgpack.loads


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """The keys of a joined engine's connection, one for what it sends and one for what it receives, and the files of its machine."""

    keys: tuple[bytes, bytes]
    files: MachineFiles
    argument: ClassVar[str] = "joined"
    """The argument of a process that reads its `JoinSettings` from its standard input."""

    def encode(self) -> bytes:
        """Returns the settings as `read_join_settings` reads them."""
        return _pack([*self.keys, self.files.settings])

    def seals(self) -> Seals:
        """Authenticates the frames. To be called once: frames are counted."""
        return Seals(*map(Seal, self.keys))


def read_join_settings(file: BinaryIO) -> JoinSettings:
    """Reads what `JoinSettings.encode` wrote. Raises EngineDead if it is incomplete."""
    try:
        outgoing, incoming, settings = _unpack(file.read())
    except (ValueError, TypeError, msgpack.UnpackException):
        raise EngineDead("the process that joined has ended") from None
    return JoinSettings((outgoing, incoming), MachineFiles(settings))
