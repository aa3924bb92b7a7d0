"""Frames: what goes in comes out, and what is no frame is named so."""

import asyncio
import io
import socket
import struct
import threading
import zlib

import msgpack
import pytest

from chairlift.engine import frames
from chairlift.engine.engine_request import Continues, EngineRequest, ResumedChoice
from chairlift.engine.frames import (
    Abort,
    Add,
    Alive,
    BadFrame,
    Explain,
    Explained,
    Failed,
    Fatal,
    Leaving,
    Load,
    Phase,
    Ready,
    Rejected,
    Snapshot,
    SnapshotRequest,
    StepOutputs,
    Stop,
    Unload,
    Unloaded,
)
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

FRAMES = [
    Load({"model": "/models/m", "max_model_len": None, "enable_prefix_caching": True}, 3, -1, 50_000),
    Unload(),
    Leaving(),
    Unloaded(),
    Failed("OutOfMemory", "too little"),
    Add(2**64 - 1, {"prompt": b"\1\0\0\0", "sampling": {"seed": -(2**63), "top_p": 0.5, "stop": ["ü"]}, "submitted": None}),
    Add(1, {"scheduling": {"tenant": "ä", "deadline_ms": 0.5, "priority": -(2**31)}}),
    Abort([1, 2, 3]),
    Explain(7, [1, 2**64 - 1]),
    Stop(),
    Phase("weights", 0.5),
    Ready({"max_model_len": 8192, "eos_token_ids": [2]}, [71, 72]),
    StepOutputs(b"\1" * 8, b"\2" * 4, b"\0", b"\0" * 4, [[1, 0, 5]], [{"tag": 1, "limit": None, "states": {"decode": 7}}], {"running": 1}),
    StepOutputs(started=[], ended=[], stats={"classes": {-1: {"waiting": 2}}, "tenants": {"a": {"waiting": 2}}}),
    StepOutputs(started=[], ended=[], details={2**64 - 1: b"\0\xff"}, refusals={2**64 - 1: b"[]"}),
    Rejected(9, "InvalidRequest", "too long", "prompt", "context_length_exceeded"),
    Rejected(9, "QueueFull", "too many", retry_after=0.25),
    Explained(7, [{"tag": 1, "finish": None}]),
    Alive(),
    Alive("run", 12.5),
    SnapshotRequest(3),
    Snapshot(3, {"kv_map": b"\3\0", "running": [{"tag": 1}]}),
    Fatal("ZeroDivisionError", "division by zero"),
]
NUMBERED = [(number % 3, frame) for number, frame in enumerate(FRAMES)]


def read_all(data: bytes):
    """The frames of a byte stream that comes in one-byte pieces, read the parent's way."""

    async def main():
        reader = asyncio.StreamReader()

        async def trickle():
            for byte in data:
                reader.feed_data(bytes([byte]))
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(trickle())
        read = []
        try:
            while (frame := await frames.read(reader)) is not None:
                read.append(frame)
        finally:
            feeding.cancel()
        return read

    return asyncio.run(main())


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame):
    for engine in (0, 1, 2**32):
        encoded = frames.encode(frame, engine)
        assert struct.unpack(">II", encoded[:8]) == (len(encoded) - 8, zlib.crc32(encoded[8:]))
        assert frames.decode(encoded[8:]) == (engine, frame)


def test_child_reads_frames_whole_however_they_arrive():
    ours, theirs = socket.socketpair()
    data = b"".join(frames.encode(frame, engine) for engine, frame in NUMBERED)
    with ours, theirs, theirs.makefile("rb") as file:

        def trickle():
            for byte in data:
                ours.send(bytes([byte]))
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=trickle)
        thread.start()
        assert [frames.receive(file) for _ in FRAMES] == NUMBERED
        assert frames.receive(file) is None
        thread.join()


def test_parent_reads_frames_whole_however_they_arrive():
    assert read_all(b"".join(frames.encode(frame, engine) for engine, frame in NUMBERED)) == NUMBERED


def test_send_writes_one_frame():
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as file:
        frames.send(ours, FRAMES[1], 5)
        assert frames.receive(file) == (5, FRAMES[1])


@pytest.mark.parametrize("cut", [1, 7, 8, 20])
def test_stream_that_ends_inside_a_frame(cut):
    data = frames.encode(Ready({"name": "a model with a name"}))[:cut]
    with pytest.raises(BadFrame, match="ended"):
        frames.receive(io.BytesIO(data))
    assert read_all(data) == []  # an engine that was killed is no error of the protocol


def test_no_flipped_bit_passes():
    whole = frames.encode(StepOutputs(b"\1" * 8, b"\2" * 4, b"\0"))
    for at in range(8 * 4, 8 * len(whole)):  # all but the length, whose end never comes
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(BadFrame, match="was changed on its way"):
            frames.receive(io.BytesIO(flipped))
        with pytest.raises(BadFrame, match="was changed on its way"):
            read_whole(flipped)


def read_whole(data: bytes):
    """The first frame of a byte stream, read the parent's way."""

    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await frames.read(reader)

    return asyncio.run(main())


def test_frame_too_long_is_refused_before_it_is_read():
    header = struct.pack(">II", frames.MAX_FRAME + 1, 0)
    with pytest.raises(BadFrame, match=f"at most {frames.MAX_FRAME}"):
        frames.receive(io.BytesIO(header))
    with pytest.raises(BadFrame, match=f"at most {frames.MAX_FRAME}"):
        read_all(header)


def test_frame_too_long_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(BadFrame, match="at most 100"):
        frames.encode(Fatal("x", "y" * 100))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        msgpack.packb(5),
        msgpack.packb({"no": "kind"}),
        msgpack.packb({"t": "unknown"}),
        msgpack.packb({"t": []}),
        msgpack.packb({"t": "add", "tag": 1}),
        msgpack.packb({"t": "stop", "extra": 1}),
        msgpack.packb({"t": "stop"}) + b"\0",
    ],
)
def test_garbage_is_named_so(payload):
    with pytest.raises(BadFrame, match="is invalid"):
        frames.decode(payload)


def test_a_request_crosses_as_it_is():
    params = SamplingParams(
        max_tokens=None, temperature=0.5, top_k=3, seed=2**63 - 1, stop=("a", "b"), stop_token_ids=(1, 2), ignore_eos=True, n=2, best_of=3
    )
    scheduling = Scheduling(priority=-1, tenant="a", deadline_ms=5, ttft_deadline_ms=0.5, cache_salt="s", session="x", parent_session="y")
    resumed = ResumedChoice(1, b"\4\0\0\0", 2, 1, 100, 200, None), ResumedChoice(2, b"", 0, 0, 100, 200, 300)
    whole = EngineRequest.of(
        2**64 - 4, [1, 2**31 - 1], params, scheduling, submitted=7, spent={"receive": 5}, resumed=resumed, continues=Continues(9, 1)
    )
    for request in (whole, EngineRequest.of(1, [], SamplingParams())):
        crossed = frames.decode(frames.encode(Add(request.tag, request.pack()))[8:])[1]
        assert EngineRequest.unpack(crossed.request) == request
