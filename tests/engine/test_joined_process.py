"""The server's end of a connection to an engine on another machine: what it makes of bad frames, of the end, and of other clocks."""

import asyncio
import socket
import struct
import zlib

import pytest
from async_engine import GUARD

from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.frames import MAX_FRAME, Add, Alive, Explained, Phase, StepOutputs, encode
from chairlift.engine.joined_process import JoinedProcess
from chairlift.errors import EngineDead


class Client:
    """Notes what it is told."""

    def __init__(self):
        self.frames, self.death = [], asyncio.get_running_loop().create_future()

    def on_frame(self, frame):
        self.frames.append(frame)

    def on_exit(self):
        pass

    def on_death(self, error):
        self.death.set_result(error)


def framed(payload, checksum=None):
    return struct.pack(">II", len(payload), zlib.crc32(payload) if checksum is None else checksum) + payload


STEP = encode(StepOutputs(b"\1" * 8, b"\2" * 4, b"\0"))
BROKEN = {
    "half a frame": (encode(Alive())[:-1], "the connection to the engine of there ended"),
    "half a header": (b"\0\0\0\0", "the connection to the engine of there ended"),
    "nothing": (b"", "the connection to the engine of there ended"),
    "too long": (struct.pack(">II", MAX_FRAME + 1, 0), "broke: a frame of 67108865 bytes: at most 67108864 are allowed"),
    "not msgpack": (framed(b"\xc1"), "broke: a frame of 1 bytes is invalid"),
    "of no kind": (framed(b"\x80"), "broke: a frame of 1 bytes is invalid"),
    "a flipped bit of a token": (STEP.replace(b"\2" * 4, b"\2\2\2\6"), "bytes was changed on its way"),
}


@pytest.mark.parametrize(("sent", "message"), BROKEN.values(), ids=BROKEN)
def test_a_connection_that_breaks_ends_the_engine_for_good(sent, message, caplog):
    async def main():
        ours, theirs = socket.socketpair()
        process, client = EngineProcess(joined=JoinedProcess(ours, "there", 0)), Client()
        async with asyncio.timeout(GUARD):
            await process.attach(client)
            theirs.sendall(encode(Phase("imports", 1.0)) + sent)
            if "ended" in message:
                theirs.close()
            assert message in str(await client.death)
            assert client.frames == [Phase("imports", 1.0)]
            with pytest.raises(EngineDead, match="has ended"):
                await process.attach(Client())
            await process.close()
        theirs.close()

    asyncio.run(main())
    assert "Traceback" not in caplog.text


def test_closing_ends_a_connection_that_nobody_used_or_answers():
    async def main():
        async with asyncio.timeout(GUARD):
            for used in (False, True):
                ours, theirs = socket.socketpair()
                process = EngineProcess(joined=JoinedProcess(ours, "there", 0))
                if used:
                    await process.attach(Client())
                await process.close()
                with theirs:
                    assert theirs.recv(1) == b""

    asyncio.run(main())


def test_times_are_those_of_this_machine():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        joined = JoinedProcess(ours, "there", 1_000)
        assert joined.sent(Add(1, b"", {}, submitted=5)).submitted is None
        there = {
            "tag": 1,
            "arrived": 1_100,
            "submitted": 1_200,
            "started": 1_300,
            "first_token": None,
            "ended": 1_500,
            "states": {"queued": 7},
        }
        here = {"tag": 1, "arrived": 100, "submitted": 200, "started": 300, "first_token": None, "ended": 500, "states": {"queued": 7}}
        assert joined.received(StepOutputs(ended=[there])) == StepOutputs(ended=[here])
        assert joined.received(Explained(3, [there])) == Explained(3, [here])
        assert joined.received(Alive()) == Alive()
