"""How two machines make sure that both know a secret, before anything else is read from a connection.

The machine that joins sends a hello, and the server answers with its own. Each has a role, the version of the frames and a nonce. Then the
machine that joins proves that it knows the secret, and the server does: a proof is the HMAC-SHA256 of both hellos under the secret. Only
then do they compare their versions, so that nobody else can make them give up. The keys under which frames are authenticated afterwards
(`engine.seal`) are HMACs of both hellos too. Nothing is encrypted. A message is a 2-byte big-endian length, then a msgpack map of at most
MAX_MESSAGE bytes.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
import struct
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

import chairlift
from chairlift.config import EngineConfig
from chairlift.engine import clock
from chairlift.engine.engine_request import Continues, EngineRequest, ResumedChoice
from chairlift.engine.frames import KINDS
from chairlift.engine.seal import Seal, Seals
from chairlift.engine.secret import Role, Secret
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.sampling import ReasoningBudget, SamplingParams, StructuredOutput
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    import socket

MAX_MESSAGE = 512
"""Most bytes of a message of the handshake."""
SECONDS = 10.0
"""Most seconds that a handshake takes at the machine that joins."""
PROOF_SECONDS = 5.0
"""Most seconds in which it proves to the server that it knows the secret: two times there and back."""
NONCE_BYTES = 32
_LENGTH = struct.Struct(">H")
_pack: Callable[[object], bytes] = msgpack.dumps
_unpack: Callable[[bytes], Any] = msgpack.loads


class BadHandshake(ChairliftError):
    """The other end has not proved that it knows the secret: it may be anybody. A later attempt may succeed."""


class JoinRefused(InvalidSetting):
    """The two ends know the same secret, and have other versions."""


def protocol() -> str:
    """Names the version of the frames: two processes with the same one understand each other."""
    parts = SamplingParams, StructuredOutput, ReasoningBudget, Scheduling, ResumedChoice, Continues
    shapes = [(kind.__name__, inspect.get_annotations(kind)) for kind in (*KINDS.values(), EngineRequest, *parts, EngineConfig)]
    return f"{zlib.crc32(repr(shapes).encode()):08x}"


@dataclass(frozen=True, slots=True)
class Hello:
    """What an end says of itself."""

    role: Role
    protocol: str
    version: str
    nonce: bytes
    clock: int
    """Its monotonic clock in microseconds."""

    def encode(self) -> bytes:
        """The message."""
        return _encode({item.name: getattr(self, item.name) for item in fields(self)})


def own_hello(role: Role) -> Hello:
    """The hello of this process."""
    return Hello(role, protocol(), chairlift.__version__, secrets.token_bytes(NONCE_BYTES), clock.now())


class Peer(NamedTuple):
    """What an end knows of the other one after the handshake."""

    hello: Hello
    keys: tuple[bytes, bytes]
    """Those of what this end sends, and of what it receives."""

    def seals(self) -> Seals:
        """Authenticates the frames. To be called once: frames are counted."""
        return Seals(*map(Seal, self.keys))


async def admit(sock: socket.socket, secret: Secret) -> Peer:
    """The server's part, on a connection that it accepted. Raises BadHandshake and JoinRefused."""
    return await _within(PROOF_SECONDS, _admit(sock, secret))


async def introduce(sock: socket.socket, secret: Secret) -> Peer:
    """The part of the machine that joins. Raises BadHandshake and JoinRefused."""
    return await _within(SECONDS, _introduce(sock, secret))


async def _within(seconds: float, handshake: Coroutine[Any, Any, Peer]) -> Peer:
    try:
        async with asyncio.timeout(seconds):
            return await handshake
    except TimeoutError:
        raise BadHandshake(f"the other end did not complete the handshake within {seconds:.0f} s") from None
    except OSError as error:
        raise BadHandshake(f"the connection broke in the handshake: {error.strerror or error}") from None


async def _admit(sock: socket.socket, secret: Secret) -> Peer:
    loop = asyncio.get_running_loop()
    message, theirs = await _receive_hello(sock, "engine")
    own = own_hello("server").encode()
    await loop.sock_sendall(sock, own)
    transcript = message + own
    if not await _proves(sock, theirs, secret.prove("engine", transcript)):
        await loop.sock_sendall(sock, _encode({"refused": "secret"}))
        raise BadHandshake("it has another secret than --engine-secret-file of this server")
    await loop.sock_sendall(sock, _encode({"proof": secret.prove("server", transcript)}))
    _check_protocol(theirs)
    return Peer(theirs, (secret.key("server", transcript), secret.key("engine", transcript)))


async def _introduce(sock: socket.socket, secret: Secret) -> Peer:
    loop = asyncio.get_running_loop()
    own = own_hello("engine").encode()
    await loop.sock_sendall(sock, own)
    message, theirs = await _receive_hello(sock, "server")
    transcript = own + message
    await loop.sock_sendall(sock, _encode({"proof": secret.prove("engine", transcript)}))
    if not await _proves(sock, theirs, secret.prove("server", transcript)):
        raise BadHandshake("the server has another secret than --engine-secret-file of this machine")
    _check_protocol(theirs)
    return Peer(theirs, (secret.key("engine", transcript), secret.key("server", transcript)))


async def _receive_hello(sock: socket.socket, role: Role) -> tuple[bytes, Hello]:
    """The other end's hello, also as the message that it was."""
    message = await _receive(sock)
    try:
        hello = Hello(**_parse(message))
    except TypeError:
        raise BadHandshake("the other end is not Chairlift, or one of another version") from None
    texts = isinstance(hello.protocol, str) and isinstance(hello.version, str)
    if hello.role != role or not texts or not isinstance(hello.clock, int):
        raise BadHandshake(f"the other end is not a Chairlift {role}")
    if not isinstance(hello.nonce, bytes) or len(hello.nonce) != NONCE_BYTES:
        raise BadHandshake("the other end sent no nonce")
    return message, hello


async def _receive(sock: socket.socket) -> bytes:
    """The next message, with its length. Reads no byte after it."""
    header = await _receive_exactly(sock, _LENGTH.size)
    length = _LENGTH.unpack(header)[0]
    if length > MAX_MESSAGE:
        raise BadHandshake(f"a message of {length} bytes in the handshake: at most {MAX_MESSAGE} are allowed")
    return header + await _receive_exactly(sock, length)


def _parse(message: bytes) -> dict[str, Any]:
    try:
        content = _unpack(message[_LENGTH.size :])
    except (ValueError, msgpack.UnpackException):
        content = None
    if not isinstance(content, dict):
        raise BadHandshake("the other end is not Chairlift: its message is not a msgpack map")
    return content


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(received))
        if not part:
            raise BadHandshake("the other end closed the connection in the handshake")
        received += part
    return received


def _encode(content: dict[str, Any]) -> bytes:
    payload = _pack(content)
    return _LENGTH.pack(len(payload)) + payload


async def _proves(sock: socket.socket, theirs: Hello, proof: bytes) -> bool:
    """Receives the other end's proof. If an end of another version sends none, the error says that it may be that."""
    try:
        sent = _parse(await _receive(sock)).get("proof")
    except (BadHandshake, OSError):
        if theirs.protocol == protocol():
            raise
        raise BadHandshake(f"it proved nothing; {_other_version(theirs)}") from None
    return isinstance(sent, bytes) and hmac.compare_digest(sent, proof)


def _check_protocol(theirs: Hello) -> None:
    if theirs.protocol != protocol():
        raise JoinRefused(_other_version(theirs))


def _other_version(theirs: Hello) -> str:
    return (
        f"the {theirs.role} has other frames (protocol {theirs.protocol!r:.20}, version {theirs.version!r:.20}) than this process "
        f"(protocol {protocol()!r}, version {chairlift.__version__!r}): install the same version on both machines"
    )
