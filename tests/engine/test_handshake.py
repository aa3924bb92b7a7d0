"""What two machines send before they trust each other: proofs of a secret, of bounded size, in bounded time."""

import asyncio
import os
import socket
import struct
from dataclasses import fields, replace

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
    assert (server.hello.role, engine.hello.role, rest) == ("engine", "server", b"the next byte")


def test_both_ends_have_the_keys_of_both_directions_and_no_other_connection_has_them():
    connections = [asyncio.run(meet(SECRET, SECRET))[:2] for _ in range(2)]
    for server, engine in connections:
        assert server.keys == engine.keys[::-1]
    assert len({key for server, _ in connections for key in server.keys}) == 4


def test_another_secret_is_refused_on_both_sides():
    server, engine, _ = asyncio.run(meet(SECRET, Secret(b"t" * 32)))
    assert (type(server), type(engine)) == (BadHandshake, BadHandshake)  # neither knows who the other one is
    assert "another secret" in str(server)
    assert "another secret" in str(engine)


@pytest.mark.parametrize(("knows", "refused"), [(True, JoinRefused), (False, BadHandshake)])
@pytest.mark.parametrize("old", [admit, introduce])
def test_only_an_end_that_knows_the_secret_can_refuse_for_its_version(monkeypatch, old, knows, refused):
    """The old end has another protocol until its hello is sent."""
    new = introduce if old is admit else admit
    role = "server" if old is admit else "engine"
    hello = own_hello
    monkeypatch.setattr(handshake, "own_hello", lambda one: replace(hello(one), protocol="0") if one == role else hello(one))

    async def main():
        ours, theirs = pair()
        with ours, theirs:
            _, result = await asyncio.gather(old(theirs, SECRET if knows else Secret(b"t" * 32)), new(ours, SECRET), return_exceptions=True)
        assert type(result) is refused
        assert ("install the same version" in str(result)) == knows
        assert isinstance(result, InvalidSetting) == knows  # exit status 2

    asyncio.run(main())


@pytest.mark.parametrize("end", [admit, introduce])
def test_an_end_of_another_version_that_proves_nothing_is_named_as_that(end):
    hello = own_hello("engine" if end is admit else "server")
    named = {item.name: getattr(hello, item.name) for item in fields(hello)}

    async def main():
        ours, theirs = pair()
        with ours, theirs:
            theirs.send(message({**named, "protocol": "0"}))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(BadHandshake, match=r"it proved nothing; .* install the same version"):
                await end(ours, SECRET)

    asyncio.run(main())


@pytest.mark.parametrize("sent", [{"refused": "secret"}, {"refused": ""}, {"proof": b""}, {"proof": None}, {}])
def test_whoever_does_not_know_the_secret_cannot_refuse_for_good(sent):
    hello = own_hello("server").encode()

    async def main():
        ours, theirs = pair()
        with ours, theirs:
            theirs.send(hello + message(sent))
            with pytest.raises(BadHandshake):
                await introduce(ours, SECRET)

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
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.02)

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
