"""The secret that a server and the machines whose engines join it know."""

from __future__ import annotations

import hmac
import os
import stat
from typing import Literal

from chairlift.errors import InvalidSetting

MIN_BYTES, MAX_BYTES = 32, 4096
Role = Literal["engine", "server"]


class Secret:
    """A secret. It is in no message, and has no readable representation."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def prove(self, role: Role, transcript: bytes) -> bytes:
        """What shows that an end knows the secret: the HMAC-SHA256 of its role and of all that both ends have sent."""
        return hmac.digest(self._content, role.encode() + b"\0" + transcript, "sha256")

    def key(self, role: Role, transcript: bytes) -> bytes:
        """The key of what the end with this role sends after the handshake: of this connection and direction alone, 32 bytes."""
        return hmac.digest(self._content, b"frames of " + role.encode() + b"\0" + transcript, "sha256")


def read_secret(file: str) -> Secret:
    """Reads the file of `--engine-secret-file`, which only its owner may read. Raises InvalidSetting, which does not tell the secret."""
    flag = f"--engine-secret-file {file}"
    try:
        with open(os.path.expanduser(file), "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(MAX_BYTES + 2).strip()
    except OSError as error:
        raise InvalidSetting(f"{flag}: it cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidSetting(f"{flag}: others than its owner may use it: run chmod 600 {file}")
    if not MIN_BYTES <= len(content) <= MAX_BYTES:
        raise InvalidSetting(f"{flag}: a secret has {MIN_BYTES} to {MAX_BYTES} bytes: make one with 'openssl rand -hex 32'")
    return Secret(content)
