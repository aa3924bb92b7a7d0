"""`chairlift join`: an engine of another machine, here over loopback, that dies or is foreign costs clients nothing."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import dying_engine
import paced_engine
import pytest
from resumable import KINDS, ask, metric, order, requested, write_order
from served import Served, served, until

from chairlift.engine.seal import TAG_BYTES

pytestmark = pytest.mark.slow

FLAGS = ("--max-num-seqs", "12", "--num-kv-blocks", "200", "--threads", "1", "--served-model-name", "tiny", "--log-level", "info")
FLAGS += ("--shutdown-timeout", "0.01")


def write_secret(file: Path, content: str) -> str:
    file.write_text(content)
    file.chmod(0o600)
    return str(file)


def address_of(server: Served) -> str:
    return str(re.findall(r"listening for engines on (\S+)", server.log())[0])


@contextmanager
def joining(
    server: Served, secret: str, log: Path, environment: dict[str, str] | None = None, address: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`chairlift join` in a process of its own."""
    address = address or address_of(server)
    command = [sys.executable, dying_engine.__file__, "join", address, "--engine-secret-file", secret, "--model", server.model]
    variables = os.environ | {paced_engine.GATE: str(server.directory / "gate")} | (environment or {})
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, env=variables) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
            print(log.read_text())


def states(server: Served) -> list[str]:
    return [one["state"] for one in server.replicas()]


def child(process: subprocess.Popen[bytes]) -> int:
    """The engine's process."""
    [pid] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("secret") / "secret", "0123456789abcdef" * 4)


@pytest.fixture(scope="module")
def server(byte_model: Path, secret: str) -> Iterator[Served]:
    (byte_model / "chat_template.jinja").write_text("{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}")
    flags = *FLAGS, "--engine-listen", "127.0.0.1:0", "--engine-secret-file", secret
    with served(str(byte_model), *flags, script=dying_engine.__file__, load_format="dummy") as one:
        yield one


def slow_answers(server: Served, threads: ThreadPoolExecutor) -> dict[str, Future[Any]]:
    """Streams of all kinds, of which the joined engine runs some, in slow steps until the file `gate` is deleted."""
    order(server, step=10**9, where="launch")  # only makes steps slow
    while True:
        answers = {kind: threads.submit(ask, server, *request) for kind, request in KINDS.items()}
        until(lambda answers=answers: all(one.done() for one in answers.values()) or server.replicas()[1]["sequences"] > 2)
        # On a busy machine they may have ended before they were seen.
        if not all(one.done() for one in answers.values()):
            return answers


def test_a_joined_engine_is_killed_and_its_streams_go_on(server: Served, secret: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        with joining(server, secret, tmp_path / "log") as process:
            until(lambda: states(server) == ["ready", "ready"])
            lost = server.log().count("lost its engine")
            answers = slow_answers(server, threads)
            os.kill(child(process), signal.SIGKILL)
            assert {kind: answer.result() for kind, answer in answers.items()} == {kind: expected[kind] for kind in KINDS}
            (server.directory / "gate").unlink()
            assert server.log().count("lost its engine") > lost
            assert "the connection to the engine of 127.0.0.1:" in server.log()
            until(lambda: states(server) == ["ready", "ready"])  # it has joined again
            os.kill(server.engine(), signal.SIGKILL)  # now the joined one serves
            assert requested(server, threads) == expected
            until(lambda: states(server) == ["ready", "ready"])
        until(lambda: states(server) == ["ready"])
        assert requested(server, threads) == expected
    assert "0123456789abcdef" not in server.log() + (tmp_path / "log").read_text()


def test_a_machine_that_stops_is_given_up_and_its_streams_go_on(server: Served, secret: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        with joining(server, secret, tmp_path / "log") as process:
            until(lambda: states(server) == ["ready", "ready"])
            given_up = server.log().count("does not answer: killing its process")
            answers = slow_answers(server, threads)
            stopped = child(process)
            for one in (process.pid, stopped):
                os.kill(one, signal.SIGSTOP)
            assert {kind: answer.result() for kind, answer in answers.items()} == {kind: expected[kind] for kind in KINDS}
            (server.directory / "gate").unlink()
            assert server.log().count("does not answer: killing its process") == given_up + 1
            os.kill(process.pid, signal.SIGCONT)  # it ends the engine, which is still stopped, and joins again
            until(lambda: states(server) == ["ready", "ready"])
            assert child(process) != stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_engine_that_leaves_costs_no_request(server: Served, secret: str, tmp_path: Path, number: signal.Signals) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        with joining(server, secret, tmp_path / "log") as process:
            until(lambda: states(server) == ["ready", "ready"])
            moved, dead = metric(server, "requests_resumed_total"), server.log().count("engine dead")
            answers = slow_answers(server, threads)
            process.send_signal(number)
            assert {kind: answer.result() for kind, answer in answers.items()} == {kind: expected[kind] for kind in KINDS}
            assert process.wait(60) == 0
            (server.directory / "gate").unlink()
        assert metric(server, "requests_resumed_total") > moved
        assert server.log().count("engine dead") == dead
        until(lambda: states(server) == ["ready"])
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("where", "end", "word"), [("half", signal.SIGKILL, "ended"), ("flip", 0, "was changed on its way")])
def test_streams_of_a_broken_connection_go_on(server: Served, secret: str, tmp_path: Path, where: str, end: int, word: str) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        (tmp_path / "engine").mkdir()
        gate = {paced_engine.GATE: str(tmp_path / "engine" / "gate")}  # the order is for the joined engine alone
        with joining(server, secret, tmp_path / "log", gate):
            until(lambda: states(server) == ["ready", "ready"])
            lost = server.log().count("lost its engine")
            write_order(tmp_path / "engine", step=9, where=where, signal=end)
            assert requested(server, threads) == expected
            assert server.log().count("lost its engine") > lost
            assert word in server.log().rpartition("the connection to the engine")[2].partition("\n")[0]
            until(lambda: states(server) == ["ready", "ready"])


class Meddler:
    """Stands between an engine and the server, and does `change` to the next two frames that one of them sends after `meddle` is set."""

    def __init__(self, address: str, sender: str, change: Callable[[bytes, bytes], bytes]) -> None:
        self.meddle = threading.Event()
        self._server, self._sender, self._change = address.split(":"), sender, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                engine, server = self._listener.accept()[0], socket.create_connection((self._server[0], int(self._server[1])))
                for ends in ((engine, server, "engine"), (server, engine, "server")):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, sender: str) -> None:
        with suppress(OSError, struct.error), source.makefile("rb") as file:
            for _ in range(2):  # the handshake
                header = file.read(2)
                sink.sendall(header + file.read(*struct.unpack(">H", header)))
            while True:
                if sender == self._sender and self.meddle.is_set():
                    self.meddle.clear()
                    sink.sendall(self._change(self._frame(file), self._frame(file)))
                sink.sendall(self._frame(file))
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _frame(file: BinaryIO) -> bytes:
        header = file.read(8 + TAG_BYTES)
        return header + file.read(struct.unpack(">I", header[:4])[0] + TAG_BYTES)

    def close(self) -> None:
        self._listener.close()


CHANGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "repeats": lambda one, two: one + one + two,
    "drops": lambda one, two: two,
    "reorders": lambda one, two: two + one,
}


@pytest.mark.parametrize(("sender", "change"), [("engine", "repeats"), ("server", "drops"), ("engine", "reorders")])
def test_streams_go_on_elsewhere_if_somebody_between_changes_frames(
    server: Served, secret: str, tmp_path: Path, sender: str, change: str
) -> None:
    meddler = Meddler(address_of(server), sender, CHANGES[change])
    with ThreadPoolExecutor(len(KINDS) + 1) as threads, joining(server, secret, tmp_path / "log", address=meddler.address):
        expected = requested(server, threads)
        until(lambda: states(server) == ["ready", "ready"])
        before = len(server.log())
        if sender == "server":
            meddler.meddle.set()
            assert requested(server, threads) == expected
        else:
            answers = slow_answers(server, threads)
            meddler.meddle.set()
            assert {kind: answer.result() for kind, answer in answers.items()} == {kind: expected[kind] for kind in KINDS}
            (server.directory / "gate").unlink()
        until(lambda: "lost its engine" in server.log()[before:])
        assert server.log()[before:].count("a frame was changed on its way, repeated, left out or moved") == 1
        assert ("the engine ends: a frame was changed" in (tmp_path / "log").read_text()) == (sender == "server")
        until(lambda: states(server) == ["ready", "ready"])
    meddler.close()


def test_an_engine_with_other_numerics_is_refused(server: Served, secret: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (tmp_path / "other").mkdir()
    foreign.touch()
    (tmp_path / dying_engine.FOREIGN).touch()
    with joining(server, secret, tmp_path / "log", {paced_engine.GATE: str(tmp_path / "gate")}):
        until(lambda: "has other numerics than replica 0" in server.log())
        until(lambda: states(server) == ["ready"])
        assert server.answer(max_tokens=4)


def test_a_wrong_secret_is_one_line_and_tried_again_until_it_leaves(server: Served, tmp_path: Path) -> None:
    wrong = write_secret(tmp_path / "wrong", "f" * 64)
    with joining(server, wrong, tmp_path / "log") as process:
        until(lambda: "joining" in (tmp_path / "log").read_text())
        process.terminate()
        assert process.wait(60) == 0
    [line, left] = (tmp_path / "log").read_text().splitlines()
    assert "the server has another secret than --engine-secret-file of this machine: joining" in line
    assert "SIGTERM: leaving" in left
    assert "it has another secret than --engine-secret-file of this server" in server.log()
    assert states(server) == ["ready"]


def test_a_rolling_restart_lets_a_joined_engine_join_again(server: Served, secret: str, tmp_path: Path) -> None:
    with joining(server, secret, tmp_path / "log") as process:
        until(lambda: states(server) == ["ready", "ready"])
        before = child(process)
        assert server.administer("/models/restart", {"model": "tiny"}).status_code == 202
        until(lambda: (tmp_path / "log").read_text().count("joined the server") == 2)
        until(lambda: states(server) == ["ready", "ready"])
        assert child(process) != before
