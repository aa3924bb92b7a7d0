"""What two machines send before they trust each other: proofs of a secret, of bounded size, in bounded time."""

import asyncio
import os
import socket
import struct

import msgpack
import pytest

from chairlift.engine import handshake
from chairlift.engine.handshake import MAX_MESSAGE, BadHandshake, JoinRefused, admit, introduce, own_hello
from chairlift.engine.secret import Secret, read_secret
from chairlift.errors import InvalidSetting

SECRET = Secret(b"s" * 32)


def message(content):
    payload = msgpack.dumps(content)
    return struct.pack(">H", len(payload)) + payload


def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


async def meet(server, engine):
    """What both ends return or raise."""
    ours, theirs = pair()
    with ours, theirs:
        results = await asyncio.gather(admit(ours, server), introduce(theirs, engine), return_exceptions=True)
        theirs.send(b"the next byte")
        return *results, ours.recv(100)


def test_both_ends_prove_the_secret_and_no_byte_more_is_read():
    server, engine, rest = asyncio.run(meet(SECRET, Secret(b"s" * 32)))
    assert (server.role, engine.role, rest) == ("engine", "server", b"the next byte")


def test_another_secret_is_refused_on_both_sides():
    server, engine, _ = asyncio.run(meet(SECRET, Secret(b"t" * 32)))
    assert (type(server), type(engine)) == (JoinRefused, JoinRefused)
    assert "another secret" in str(server)
    assert "another secret" in str(engine)
    assert isinstance(engine, InvalidSetting)  # exit status 2


@pytest.mark.parametrize("old", ["admit", "introduce"])
def test_another_protocol_is_refused_on_both_sides(monkeypatch, old):
    async def main():
        ours, theirs = pair()
        hello = {
            name: getattr(own_hello("engine" if old == "introduce" else "server"), name) for name in ("role", "version", "nonce", "clock")
        }
        with ours, theirs:
            theirs.send(message({**hello, "protocol": "0"}))
            new = admit if old == "introduce" else introduce
            with pytest.raises(JoinRefused, match="install the same version"):
                await new(ours, SECRET)
            assert theirs.recv(1000)  # a hello, from which the other end sees it too

    asyncio.run(main())


class Recorded(Secret):
    """A secret that was never used."""

    def prove(self, role, transcript):
        raise AssertionError("a proof for an end that sent garbage")


GARBAGE = {
    "half a message": message({"a": 1})[:-1],
    "half a length": b"\0",
    "nothing": b"",
    "not msgpack": b"\0\x05\xc1\xc1\xc1\xc1\xc1",
    "another map": message({"role": "engine"}),
    "a list": message([1]),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "wrong role": message({"role": "server", "protocol": "", "version": "", "nonce": b"n" * 32, "clock": 1}),
    "no nonce": message({"role": "engine", "protocol": "", "version": "", "nonce": "", "clock": 1}),
    "a text as clock": message({"role": "engine", "protocol": "", "version": "", "nonce": b"n" * 32, "clock": ""}),
    "keys that are numbers": message({1: 2}),
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(sent):
    async def main():
        ours, theirs = pair()
        with ours:
            with theirs:
                theirs.send(sent)
            with pytest.raises(BadHandshake):
                await admit(ours, Recorded(b""))

    asyncio.run(main())


def test_a_message_that_is_too_long_is_not_waited_for():
    async def main():
        ours, theirs = pair()
        with ours, theirs:
            theirs.send(struct.pack(">H", MAX_MESSAGE + 1))
            with pytest.raises(BadHandshake, match="at most 512"):
                await admit(ours, Recorded(b""))

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"\0", message({"a": 1})[:-1]], ids=["nothing", "half a length", "half a message"])
@pytest.mark.parametrize("end", [admit, introduce])
def test_an_end_that_stops_sending_is_given_up(monkeypatch, sent, end):
    monkeypatch.setattr(handshake, "SECONDS", 0.02)

    async def main():
        ours, theirs = pair()
        with ours, theirs:
            theirs.send(sent)
            with pytest.raises(BadHandshake, match="did not complete the handshake"):
                await end(ours, SECRET)

    asyncio.run(main())


def test_a_proof_is_of_one_role_and_of_one_pair_of_hellos():
    proofs = {SECRET.prove(role, transcript) for role in ("engine", "server") for transcript in (b"1", b"2")}
    assert len(proofs) == 4
    assert own_hello("engine").nonce != own_hello("engine").nonce


def test_the_secret_is_of_its_owner_alone_and_is_not_shown(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4 + "\n")
    file.chmod(0o600)
    secret = read_secret(str(file))
    assert secret.prove("engine", b"") == Secret(b"0123456789abcdef" * 4).prove("engine", b"")
    assert "0123456789" not in repr(secret) + str(secret)
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(InvalidSetting, match="chmod 600"):
            read_secret(str(file))
    for content in ("short", "x" * 5000, ""):
        file.chmod(0o600)
        file.write_text(content)
        with pytest.raises(InvalidSetting, match="32 to 4096 bytes"):
            read_secret(str(file))
    os.unlink(file)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_secret(str(file))
