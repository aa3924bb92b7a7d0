"""The frames between the client and the engine's process: a 4-byte big-endian length, then one msgpack map.

Each frame is a small dataclass; the key `t` of the map names which. Nothing but plain data crosses: no pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

import msgpack

from chairlift.errors import ChairliftError
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    import asyncio
    import socket

MAX_FRAME = 64 * 2**20
"""Bytes that one frame may have: a prompt of sixteen million tokens. More is taken for garbage."""

_LENGTH = struct.Struct(">I")
_pack: Callable[[object], bytes] = msgpack.dumps
# Priorities are keys of the counters, and they are numbers.
_unpack: Callable[[bytes], Any] = partial(msgpack.loads, strict_map_key=False)


class BadFrame(ChairliftError):
    """What came over the socket is not a frame; the two ends are not of one version, or one of them is broken."""


@dataclass(frozen=True, slots=True)
class Config:
    """To the engine, once: the fields of `EngineConfig`, with the model as a local directory."""

    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Add:
    """To the engine: a request, whose sequences get `tag` and the numbers after it.

    `prompt` holds int32 little-endian token ids, `params` and `scheduling` the fields of `SamplingParams` and `Scheduling`.
    `spent` says in which states it was before it was sent, and for how many microseconds. `submitted` is when it was sent, in
    microseconds of the monotonic clock: a step may be under way for long before the engine hears of it.
    """

    tag: int
    prompt: bytes
    params: dict[str, Any]
    scheduling: dict[str, Any] = field(default_factory=dict)
    submitted: int | None = None
    spent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: these sequences are not wanted any more. Unknown tags are fine: they may just have ended.

    `stopped` if that is because a stop string was found in what they gave.
    """

    tags: list[int]
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Explain:
    """To the engine: what became of these sequences? `ask` is a number for the answer to carry."""

    ask: int
    tags: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """To the engine: what is there now? `ask` is a number for the answer to carry."""

    ask: int


@dataclass(frozen=True, slots=True)
class Stop:
    """To the engine: end after the running step."""


@dataclass(frozen=True, slots=True)
class Phase:
    """From the engine while it starts: what it did, and how long that took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine, once: it takes requests.

    `facts` are its limits and the model's, `sentinels` the ids of threads that exit when its process dies, and not before.
    """

    facts: dict[str, Any]
    sentinels: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """From the engine after each step: one entry a token, for all requests together, and the newest counters.

    `tags` are u64, `tokens` i32 and `finishes` u8 (0 none, 1 stop, 2 length, 3 error), little-endian, equally many.
    `logprobs` are f32, as many where a request asks for them or is ranked by them, else none. `started` has one (tag, cached tokens,
    microseconds queued) a sequence that was admitted, again when it was preempted meanwhile. `ended` has one of the core's ledgers a
    sequence that ended; one that missed its deadline is in no other field. `stats` are counters that have news: they are not sent each
    time.
    `details` has by tag, and `prompts` as pairs with a request's first tag, what those who asked get to know of log-probabilities: of
    the token, and of the prompt's next ones. Each is a number of lines, 4 bytes a figure: token, log-probability (f32), rank, so many
    likeliest tokens, their log-probabilities (f32).
    `starved` are tags of those in `ended` that failed because the device had too little memory; they have no entry for that.
    """

    tags: bytes = b""
    tokens: bytes = b""
    finishes: bytes = b""
    logprobs: bytes = b""
    started: Sequence[Sequence[int]] = ()
    ended: Sequence[Mapping[str, Any]] = ()
    stats: dict[str, Any] = field(default_factory=dict)
    details: Mapping[int, bytes] = field(default_factory=dict)
    prompts: Sequence[Sequence[Any]] = field(default_factory=list)
    starved: Sequence[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejected:
    """From the engine: a request it did not take. `error` is the name of a class in `chairlift.errors`, the rest are its attributes."""

    tag: int
    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Explained:
    """From the engine: the ledgers of the sequences that were asked for, of those it remembers."""

    ask: int
    ledgers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Alive:
    """From the engine once a second when it is ready, whatever it does: if it is stuck, then in which `stage`, and for how long."""

    stage: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """From the engine: its rows, queue, blocks and newest steps, as `Scheduler.snapshot` has them, and its clock as `now_us`."""

    ask: int
    snapshot: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fatal:
    """From the engine, last: why it ends. `error` is the name of an exception class."""

    error: str
    message: str


Frame = Config | Add | Abort | Explain | SnapshotRequest | Stop | Phase | Ready | Step | Rejected | Explained | Snapshot | Alive | Fatal

_KINDS: dict[str, type[Frame]] = {kind.__name__.lower(): kind for kind in get_args(Frame)}
_SHAPES = {kind: (name, tuple(item.name for item in fields(kind))) for name, kind in _KINDS.items()}


def encode(frame: Frame) -> bytes:
    """The frame as it goes over the wire, length included; raises BadFrame if it is too long."""
    name, items = _SHAPES[type(frame)]
    payload = _pack({"t": name, **{item: getattr(frame, item) for item in items}})
    _check_length(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> Frame:
    """Reads what `encode` wrote, without the length; raises BadFrame for anything else."""
    try:
        content = _unpack(payload)
        return _KINDS[content.pop("t")](**content)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise BadFrame(f"a frame of {len(payload)} bytes makes no sense: {type(error).__name__}: {error}") from error


def send(sock: socket.socket, frame: Frame) -> None:
    """Writes a frame, blocking for as long as the other end does not read."""
    sock.sendall(encode(frame))


def receive(file: BinaryIO) -> Frame | None:
    """Reads the next frame, blocking until it is whole; None when the other end has closed. Raises BadFrame."""
    header = file.read(_LENGTH.size)
    if not header:
        return None
    length = _length(header)
    payload = file.read(length)
    if len(payload) < length:
        raise BadFrame(f"the stream ended {length - len(payload)} bytes before its frame did")
    return decode(payload)


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """Reads the next frame from an asyncio stream; None when the other end has closed. Raises BadFrame."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        length = _length(header)
        return decode(await reader.readexactly(length))
    except EOFError as error:  # asyncio.IncompleteReadError, without importing asyncio into the child
        if not getattr(error, "partial", b"") and getattr(error, "expected", 0) == _LENGTH.size:
            return None
        raise BadFrame("the stream ended in the middle of a frame") from error


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32 little-endian."""
    values = tuple(tokens)
    return struct.pack(f"<{len(values)}i", *values)


def pack_fields(item: SamplingParams | Scheduling) -> dict[str, Any]:
    """A part of a request as plain data; `SamplingParams(**data)` or `Scheduling(**data)` is the way back."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _length(header: bytes) -> int:
    if len(header) < _LENGTH.size:
        raise BadFrame("the stream ended in the middle of a frame's length")
    length: int = _LENGTH.unpack(header)[0]
    _check_length(length)
    return length


def _check_length(length: int) -> None:
    if length > MAX_FRAME:
        raise BadFrame(f"a frame of {length} bytes: at most {MAX_FRAME} are allowed")
