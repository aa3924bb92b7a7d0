"""The server's end of a connection to an engine on another machine: what it makes of bad frames, of the end, and of other clocks."""

import asyncio
import socket
import struct
import zlib

import pytest
from async_engine import GUARD

from chairlift.engine import engine_process
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.frames import MAX_FRAME, Add, Alive, Explained, Load, LoadAdapter, Phase, Pulse, StepOutputs, encode, read
from chairlift.engine.joined_process import JoinedProcess
from chairlift.engine.seal import Seal, Seals
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


def sealed(*parts):
    """What the process sends after its first frame."""
    seal = theirs()
    encode(Phase("imports", 1.0), 0, seal)
    return b"".join(map(seal.close, parts))


def header(payload):
    return struct.pack(">II", len(payload), zlib.crc32(payload))


def seals():
    """The server's."""
    return Seals(Seal(b"s" * 32), Seal(b"e" * 32))


def theirs():
    return Seal(b"e" * 32)


FIRST = encode(Phase("imports", 1.0), 0, theirs())
STEP = encode(StepOutputs(b"\1" * 8, b"\2" * 4, b"\0"))
SEALED_STEP, NEXT_STEP = sealed(STEP[:8], STEP[8:]), sealed(b"", b"", STEP[:8], STEP[8:])[32:]
ENDED, CHANGED = "the connection to the engine of there ended", "broke: a frame was changed on its way, repeated, left out or moved"
BROKEN = {
    "half a frame": (SEALED_STEP[:-1], ENDED),
    "half a header": (b"\0\0\0\0", ENDED),
    "nothing": (b"", ENDED),
    "too long": (sealed(struct.pack(">II", MAX_FRAME + 1, 0)), "broke: a frame of 67108865 bytes: at most 67108864 are allowed"),
    "not msgpack": (sealed(header(b"\xc1"), b"\xc1"), "broke: a frame of 1 bytes is invalid"),
    "of no kind": (sealed(header(b"\x80"), b"\x80"), "broke: a frame of 1 bytes is invalid"),
    "a flipped bit of a token": (SEALED_STEP.replace(b"\2" * 4, b"\2\2\2\6"), CHANGED),
    "a length that nobody sent": (b"\0\1" + SEALED_STEP[2:], CHANGED),
    "a flipped bit of a tag": (SEALED_STEP[:-1] + bytes([SEALED_STEP[-1] ^ 1]), CHANGED),
    "repeated": (FIRST, CHANGED),
    "left out": (NEXT_STEP, CHANGED),
    "without tags": (STEP + bytes(100), CHANGED),
    "of this end": (encode(Pulse(), 0, seals().outgoing), CHANGED),
}


@pytest.mark.parametrize(("sent", "message"), BROKEN.values(), ids=BROKEN)
def test_a_connection_that_breaks_ends_the_engine_for_good(sent, message, caplog):
    async def main():
        ours, theirs = socket.socketpair()
        process, client = EngineProcess(joined=JoinedProcess(ours, "there", 0, seals())), Client()
        async with asyncio.timeout(GUARD):
            await process.attach(client)
            theirs.sendall(FIRST + sent)
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
                process = EngineProcess(joined=JoinedProcess(ours, "there", 0, seals()))
                if used:
                    await process.attach(Client())
                await process.close()
                with theirs:
                    assert theirs.recv(1) == b""

    asyncio.run(main())


def test_frames_are_sealed_in_their_order_and_a_pulse_shows_that_none_is_missing(monkeypatch):
    monkeypatch.setattr(engine_process, "PULSE_SECONDS", 0.0)

    async def main():
        ours, theirs = socket.socketpair()
        process = EngineProcess(joined=JoinedProcess(ours, "there", 0, seals()))
        async with asyncio.timeout(GUARD):
            number = await process.attach(Client())
            process.write(number, Load({"model": "m", "journal": "/j"}))
            process.write(number, LoadAdapter(1, "a", "/a"))
            reader, writer = await asyncio.open_connection(sock=theirs)
            seal = seals().outgoing
            received = [await read(reader, seal) for _ in range(5)]
            assert [(number, type(frame)) for number, frame in received] == [(0, Load), (0, LoadAdapter)] + [(0, Pulse)] * 3
            assert (received[0][1].settings["journal"], received[1][1].path) == (None, "")
            await process.close()
            writer.close()

    asyncio.run(main())


def test_times_are_those_of_this_machine():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        joined = JoinedProcess(ours, "there", 1_000, seals())
        assert joined.sent(Add(1, {"submitted": 5, "prompt": b""})) == Add(1, {"submitted": None, "prompt": b""})
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
