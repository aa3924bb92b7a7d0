"""Authenticates what two machines send each other after the handshake.

Each direction has a key of its own. What is sent is followed by a tag: the first 16 bytes of the HMAC-SHA256 of its number in this
direction and of itself. So a change, a repetition, an omission, another order or a reflection is noticed. Others can read what is sent.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from chairlift.engine.frames import BadFrame

TAG_BYTES = 16
_NUMBER = struct.Struct(">Q")


class Seal:
    """One end of one direction: either sends with `close`, or receives with `open`."""

    extra = TAG_BYTES
    """The bytes by which `close` lengthens a part."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, part: bytes) -> bytes:
        """The next part with its tag."""
        return part + self._tag(part)

    def open(self, sealed: bytes) -> bytes:
        """The next part without its tag. Raises BadFrame if the other end has not sent it, or not now."""
        part, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(part)):
            raise BadFrame("a frame was changed on its way, repeated, left out or moved")
        return part

    def _tag(self, part: bytes) -> bytes:
        number = _NUMBER.pack(self._number)
        self._number += 1
        return hmac.digest(self._key, number + part, "sha256")[:TAG_BYTES]


class Seals(NamedTuple):
    """Both directions of a connection, at one end."""

    outgoing: Seal
    incoming: Seal
