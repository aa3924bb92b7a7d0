"""The frames between client and engine process: length and CRC-32 of a msgpack map, both in 4 bytes big-endian, then the map.

Between machines the first eight bytes and the map are each followed by a tag (`engine.seal`), so that a length is authenticated before it
is believed. Each frame is a dataclass, named by the map's key `t`. The key `e` is the number of the engine that a frame is to or from; 0 if
it is absent. Frames contain only plain data, no pickle.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack

from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    import asyncio
    import socket

    from chairlift import _core
    from chairlift.engine.seal import Seal
    from chairlift.engine.snapshot import EngineSnapshot

MAX_FRAME = 64 * 2**20
"""Most bytes of a frame: a prompt of sixteen million tokens. A longer frame is an error."""

_HEADER = struct.Struct(">II")
_pack: Callable[[object], bytes] = msgpack.dumps
# Priorities are keys of the usage counters and are integers.
_unpack: Callable[[bytes], Any] = partial(msgpack.loads, strict_map_key=False)


class BadFrame(ChairliftError):
    """The socket's data is not a frame: the two ends have different versions, or one is broken."""


@dataclass(slots=True)
class Frame:
    """What client and engine send each other; each kind is a subclass."""


@dataclass(slots=True)
class Load(Frame):
    """To the process: begin an engine of this number. `settings` are the fields of `EngineConfig`; the model is a local directory.

    Engines share the process's time by `weight`, within a `priority`, of which lower ones go first. `itl` is the longest time in
    microseconds that should pass between two of its steps. With a `hash_key` of 16 bytes the engine names its cached blocks under this
    key, and reports them in `StepOutputs`.
    """

    settings: dict[str, Any]
    weight: int = 1
    priority: int = 0
    itl: int | None = None
    hash_key: bytes = b""


@dataclass(slots=True)
class Unload(Frame):
    """To the engine: end, and free the memory. The reply is `Unloaded`."""


@dataclass(slots=True)
class Add(Frame):
    """To the engine: `EngineRequest.pack` of a request with this tag."""

    tag: int
    request: dict[str, Any]


@dataclass(slots=True)
class Abort(Frame):
    """To the engine: end these sequences. Unknown tags are ignored, because sequences may have just ended.

    `stopped` if a stop string was found in their output.
    """

    tags: list[int]
    stopped: bool = False


@dataclass(slots=True)
class SetPriority(Frame):
    """To the engine: move a sequence to another class. An unknown tag is ignored."""

    tag: int
    priority: int


@dataclass(slots=True)
class Estimate(Frame):
    """To an estimated engine: the times of its steps and its number of KV blocks.

    A step takes `step_us` microseconds, and `token_ns` nanoseconds for each token of a prompt. Requests that wait are passed on when the
    other server has at most `ahead` tokens of prompts left to compute.
    """

    step_us: int
    token_ns: int
    blocks: int
    ahead: int = 0


@dataclass(slots=True)
class Answering(Frame):
    """To an estimated engine: the other server has begun to answer this sequence. An unknown tag is ignored."""

    tag: int


@dataclass(slots=True)
class ServerRestarted(Frame):
    """To an estimated engine: the other server has restarted, and its cache is empty."""


@dataclass(slots=True)
class ForkSequence(Frame):
    """To the engine: open held sequences with the handles `forks`, which share the KV of `handle`. An unknown handle is ignored."""

    handle: int
    forks: list[int]


@dataclass(slots=True)
class DropSequence(Frame):
    """To the engine: drop a held sequence. An unknown handle is ignored."""

    handle: int


@dataclass(slots=True)
class NoteSession(Frame):
    """To the engine: a tenant's session `awaits_user` or has `ended`. An unknown session is ignored."""

    tenant: str
    session: str
    event: str


@dataclass(slots=True)
class LoadAdapter(Frame):
    """To the engine: load the LoRA adapter in the directory `path` under a name. `ask` identifies the reply."""

    ask: int
    name: str
    path: str


@dataclass(slots=True)
class UnloadAdapter(Frame):
    """To the engine: unload an adapter. `ask` identifies the reply."""

    ask: int
    name: str


@dataclass(slots=True)
class Explain(Frame):
    """To the engine: a request for the timelines of these sequences. `ask` identifies the reply."""

    ask: int
    tags: list[int]


@dataclass(slots=True)
class SnapshotRequest(Frame):
    """To the engine: a request for a snapshot. `ask` identifies the reply."""

    ask: int


@dataclass(slots=True)
class ShareService(Frame):
    """To the process: charge tenants for their service in other processes, in microseconds as `Scheduler.take_service` gives it.

    The reply is `ServiceShared`.
    """

    external: dict[str, int]


@dataclass(slots=True)
class Pulse(Frame):
    """To the process of another machine once a second. It shows there that no frame before it is missing."""


@dataclass(slots=True)
class Stop(Frame):
    """To the process: exit after the current step."""


@dataclass(slots=True)
class Phase(Frame):
    """From the engine while it starts: a finished phase and its duration."""

    name: str
    seconds: float


@dataclass(slots=True)
class Ready(Frame):
    """From the engine, once: it takes requests.

    `info` has the fields of `EngineInfo`, `sentinels` the ids of threads that exit when the process dies, and not before; the process's
    first engine sends them.
    """

    info: dict[str, Any]
    sentinels: Sequence[int] = ()


@dataclass(slots=True)
class StepOutputs(Frame):
    """From the engine after each step: the tokens of all requests, and changed counters.

    `tags` (u64), `tokens` (i32) and `finishes` (u8: 0 none, 1 stop, 2 length, 3 error) are little-endian with one entry per token.
    `logprobs` (f32) has one entry per token if any request needs log-probabilities, else none. `started` has (tag, cached tokens,
    those of them that its tenant used before, microseconds queued) for each admitted sequence, including those admitted again after a
    preemption. `ended` has the timelines of ended sequences; a sequence that missed its deadline is in no other field. `stats` are
    counters, which are not sent every time.
    `details` (by tag) and `prompts` (pairs with a request's first tag) are log-probabilities of tokens and of prompt tokens, in lines of
    4-byte numbers: token, log-probability (f32), rank, top tokens, their log-probabilities (f32). The `details` of a request for an
    embedding are its numbers (f32). Those of a sequence that ended with an error mean nothing.
    `starved` are the tags in `ended` that failed because the device was out of memory. `cached` and `dropped` are the names (u64) of the
    KV blocks that prompts can reuse since the last frame, and of those that they cannot reuse any more.
    `refusals` (by tag) say why sequences ended with an error, if their own fields were the reason (see `InvalidRequest.packed`).
    """

    tags: bytes = b""
    tokens: bytes = b""
    finishes: bytes = b""
    logprobs: bytes = b""
    started: Sequence[Sequence[int]] = ()
    ended: Sequence[_core.Timeline] = ()
    stats: dict[str, Any] = field(default_factory=dict)
    details: Mapping[int, bytes] = field(default_factory=dict)
    prompts: Sequence[tuple[int, bytes]] = field(default_factory=list)
    starved: Sequence[int] = field(default_factory=list)
    cached: bytes = b""
    dropped: bytes = b""
    refusals: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        return not any(getattr(self, item) for item in _SHAPES[StepOutputs][1])


@dataclass(slots=True)
class Rejected(Frame):
    """From the engine: a rejected request. `error` is the name of a class in `chairlift.errors`, the other fields are its attributes."""

    tag: int
    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


@dataclass(slots=True)
class Explained(Frame):
    """From the engine: the timelines of the requested sequences that it remembers."""

    ask: int
    timelines: list[_core.Timeline]


@dataclass(slots=True)
class AdapterChanged(Frame):
    """From the engine: an adapter was loaded or unloaded, or `error` is the class in `chairlift.errors` that says why not.

    `digest` is the hash of a loaded adapter's files.
    """

    ask: int
    error: str | None = None
    message: str = ""
    code: str | None = None
    digest: bytes = b""


@dataclass(slots=True)
class Alive(Frame):
    """From the process once a second, even during a step. If it is stuck, `stage` and `seconds` say where and for how long."""

    stage: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Snapshot(Frame):
    """From the engine: the result of `Engine.snapshot`."""

    ask: int
    snapshot: EngineSnapshot


@dataclass(slots=True)
class ServiceShared(Frame):
    """From the process: the service of each tenant at all its engines since the last `ShareService`; nothing after the first."""

    service: dict[str, int]


@dataclass(slots=True)
class Leaving(Frame):
    """From the process: its machine ends it. It waits for its requests to end or to be moved, and then for `Stop`."""


@dataclass(slots=True)
class Unloaded(Frame):
    """From the engine, last: it has ended, and its memory is free."""


@dataclass(slots=True)
class Failed(Frame):
    """From the engine, last: it could not be loaded, or a step failed. Others in the process go on. `error` names an exception class."""

    error: str
    message: str


@dataclass(slots=True)
class Fatal(Frame):
    """From the process, last: the reason for its exit. `error` is the name of an exception class."""

    error: str
    message: str


# A dataclass with slots replaces the class that it is made of, which is a subclass of `Frame` too: the later one counts.
KINDS: dict[str, type[Frame]] = {kind.__name__.lower(): kind for kind in Frame.__subclasses__()}
"""The kinds of frames, by the name in the map's key `t`."""
_SHAPES = {kind: (name, tuple(item.name for item in fields(kind))) for name, kind in KINDS.items()}


def encode(frame: Frame, engine: int = 0, seal: Seal | None = None) -> bytes:
    """Encodes a frame to or from an engine, including its length. Raises BadFrame if it is too long."""
    name, items = _SHAPES[type(frame)]
    content = {"t": name, **{item: getattr(frame, item) for item in items}}
    if engine:
        content["e"] = engine
    payload = _pack(content)
    _check_length(len(payload))
    header = _HEADER.pack(len(payload), zlib.crc32(payload))
    return header + payload if seal is None else seal.close(header) + seal.close(payload)


def decode(payload: bytes) -> tuple[int, Frame]:
    """Decodes a frame without its header. Returns its engine's number too. Raises BadFrame."""
    try:
        content = _unpack(payload)
        return content.pop("e", 0), KINDS[content.pop("t")](**content)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise BadFrame(f"a frame of {len(payload)} bytes is invalid: {type(error).__name__}: {error}") from error


def send(sock: socket.socket, frame: Frame, engine: int = 0, seal: Seal | None = None) -> None:
    """Writes a frame. Blocks while the other end does not read."""
    sock.sendall(encode(frame, engine, seal))


def receive(file: BinaryIO, seal: Seal | None = None) -> tuple[int, Frame] | None:
    """Reads the next frame and its engine's number; blocks until it is complete. None if the other end has closed. Raises BadFrame."""
    extra = 0 if seal is None else seal.extra
    header = file.read(_HEADER.size + extra)
    if not header:
        return None
    length, checksum = _read_header(header, seal)
    payload = file.read(length + extra)
    if len(payload) < length + extra:
        raise BadFrame(f"the stream ended {length + extra - len(payload)} bytes before its frame did")
    return _checked(payload, checksum, seal)


async def read(reader: asyncio.StreamReader, seal: Seal | None = None) -> tuple[int, Frame] | None:
    """Reads the next frame and its engine's number from an asyncio stream. Raises BadFrame.

    None if the other end has closed or died, also within a frame.
    """
    extra = 0 if seal is None else seal.extra
    try:
        length, checksum = _read_header(await reader.readexactly(_HEADER.size + extra), seal)
        return _checked(await reader.readexactly(length + extra), checksum, seal)
    except EOFError:  # asyncio.IncompleteReadError, without importing asyncio into the child
        return None


def _read_header(header: bytes, seal: Seal | None) -> tuple[int, int]:
    """The length and the checksum of the rest."""
    if len(header) < _HEADER.size + (0 if seal is None else seal.extra):
        raise BadFrame("the stream ended in the middle of a frame's header")
    length, checksum = _HEADER.unpack(header if seal is None else seal.open(header))
    _check_length(length)
    return length, checksum


def _checked(payload: bytes, checksum: int, seal: Seal | None) -> tuple[int, Frame]:
    """Decodes a frame that has arrived as it was sent. TCP's own checksum misses errors, which would be wrong tokens here."""
    if seal is not None:
        payload = seal.open(payload)
    if zlib.crc32(payload) != checksum:
        raise BadFrame(f"a frame of {len(payload)} bytes was changed on its way")
    return decode(payload)


def _check_length(length: int) -> None:
    if length > MAX_FRAME:
        raise BadFrame(f"a frame of {length} bytes: at most {MAX_FRAME} are allowed")
