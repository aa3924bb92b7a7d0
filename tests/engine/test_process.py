"""The child process: what it answers, when it waits, and that it never outlives its parent."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import zlib
from contextlib import contextmanager

import counting_engine
import pytest
from counting_engine import BROKEN, CRASHING, ENDLESS, FULL, HANGING, PANICKING, PATIENT, REFUSED, CountingEngine

from chairlift.child_process import STOPS, start_python
from chairlift.config import EngineConfig
from chairlift.engine import hosted_engine
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import (
    Abort,
    Add,
    Alive,
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
    receive,
    send,
)
from chairlift.engine.process_signals import LEAVE
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

GUARD = 60
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


class Child:
    """A process with the engine that counts, driven frame by frame."""

    def __init__(self, **options):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(GUARD)
        self.process = start_python("-m", "counting_engine", str(theirs.fileno()), pass_fds=[theirs.fileno()], **options)
        theirs.close()
        self.file = self.socket.makefile("rb")

    def send(self, frame):
        send(self.socket, frame)

    def receive(self):
        received = receive(self.file)
        frame = received and received[1]
        # Whether the settings are there when the imports are done is a matter of time, and so is when the watchdog speaks.
        by_chance = isinstance(frame, Alive) or (isinstance(frame, Phase) and frame.name == "locate")
        return self.receive() if by_chance else frame

    def add(self, tag, prompt, scheduling=None, **params):
        self.send(Add(tag, EngineRequest.of(tag, prompt, SamplingParams(**params), scheduling).pack()))

    def start(self, **settings):
        """Sends settings and takes what comes up to the first, empty step."""
        self.send(Load({"model": "/m", **settings}))
        frames = [self.receive() for _ in range(4)]
        assert [type(frame) for frame in frames] == [Phase, Phase, Ready, StepOutputs], frames
        return frames


@contextmanager
def child(**options):
    it = Child(**options)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.wait()
        it.file.close()
        it.socket.close()


def test_the_process_does_not_import_what_only_some_engines_need():
    code = (
        "import sys; from chairlift.engine.process import load; load('none'); "
        "others = 'asyncio chairlift.engine.disk_cache difflib fractions pydantic statistics torch'.split(); "
        "print([name for name in others if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout == "[]\n"


def test_the_threads_of_numpy_sleep_in_a_child_unless_the_user_says_otherwise(monkeypatch):
    code = "import os; print(os.environ['OPENBLAS_THREAD_TIMEOUT'], end='')"
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert start_python("-S", "-c", code, stdout=subprocess.PIPE, text=True).communicate()[0] == "4"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "9")
    assert start_python("-S", "-c", code, stdout=subprocess.PIPE, text=True).communicate()[0] == "9"


def test_it_reports_phases_then_limits_then_counters(monkeypatch):
    counting_engine.install_engine(monkeypatch.setattr)
    twin = CountingEngine(EngineConfig(model="/m"))
    twin.step()
    with child() as it:
        imports, weights, ready, step = it.start()
        assert imports.name == "imports"
        assert weights == Phase("weights", 0.25)
        assert EngineInfo.unpack(ready.info) == twin.info
        assert step == StepOutputs(stats={**twin.stats().pack(), **twin.usage()}, started=[], ended=[])
        assert (step.stats["steps"], step.stats["total_blocks"]) == (1, 125_000)


def test_one_frame_a_step_carries_every_request():
    with child() as it:
        it.start()
        for tag in (5, 6):
            it.add(tag, [100 * tag], max_tokens=3)
        seen = {5: [], 6: []}
        ended = []
        while len(ended) < 2:
            step = it.receive()
            tags = struct.unpack(f"<{len(step.finishes)}Q", step.tags)
            assert len(set(tags)) == len(tags)
            for tag, token, finish in zip(tags, struct.unpack(f"<{len(tags)}i", step.tokens), step.finishes, strict=True):
                seen[tag].append((token, finish))
            ended += step.ended
        assert seen == {tag: [(100 * tag, 0), (100 * tag + 1, 0), (100 * tag + 2, 2)] for tag in (5, 6)}
        accounts = sorted((account["tag"], account["finish"], account["output_tokens"]) for account in ended)
        assert accounts == [(5, "length", 3), (6, "length", 3)]


def test_an_idle_engine_waits_for_frames_and_does_nothing_else():
    with child() as it:
        it.start()
        for steps in (2, 3, 4):
            # One look for work a frame, whatever the time between them: were it to poll, the count would run ahead.
            it.send(Abort([1]))
            step = it.receive()
            assert step.stats["steps"] == steps


def test_an_engine_that_waits_for_its_time_is_woken_then():
    with child() as it:
        it.start(**PATIENT)
        it.add(1, [100], max_tokens=2)
        while not (step := it.receive()).finishes:
            assert step.stats["waiting"] == 1
        # Once for the request and once for the time: were it to poll, the count would run ahead.
        assert it.receive().finishes == b"\2"
        assert it.receive().stats["steps"] <= 6


def test_counters_are_sent_when_they_are_due_and_when_it_goes_idle(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(hosted_engine.time, "monotonic", lambda: now[0])
    counting_engine.install_engine(monkeypatch.setattr)
    counters = hosted_engine.Counters(CountingEngine(EngineConfig()))

    def reported(after, *, idle=False):
        now[0] += after
        return {"steps", "tenants"} & counters.news(idle=idle).keys()

    assert reported(0) == {"steps", "tenants"}
    assert reported(0.1) == set()
    assert reported(0.11) == {"steps"}
    assert reported(0.01, idle=True) == {"steps", "tenants"}
    assert reported(0.1) == set()
    assert reported(0.85) == {"steps"}
    assert reported(0.1) == {"tenants"}


def test_abort_reaches_the_engine_in_the_middle_of_a_request():
    with child() as it:
        it.start()
        it.add(1, [100], max_tokens=ENDLESS)
        assert it.receive().finishes == b"\0"
        it.send(Abort([1]))
        while not (step := it.receive()).stats or step.stats["running"]:
            assert step.finishes == b"\0"
        assert step.stats["expired"] == 1


def test_a_missed_deadline_is_told_without_a_token():
    with child() as it:
        it.start()
        it.add(1, [100], Scheduling(deadline_ms=0.001), max_tokens=1)
        step = it.receive()
        [account] = step.ended
        assert (step.finishes, account["tag"], account["finish"]) == (b"", 1, "deadline")
        assert (account["started"], account["first_token"]) == (None, None)


def test_a_sequence_is_explained_idle_and_at_work():
    with child() as it:
        it.start()
        it.add(3, [100], max_tokens=1)
        it.add(4, [100], max_tokens=1)
        ended = []
        while len(ended) < 2:
            ended += it.receive().ended
        it.send(Explain(7, [3, 5, 4]))
        while not isinstance(frame := it.receive(), Explained):
            pass
        explained = [{name: account[name] for name in ended[0]} for account in frame.timelines]
        assert (frame.ask, explained) == (7, sorted(ended, key=lambda account: account["tag"]))
        it.add(1, [100], max_tokens=ENDLESS)
        it.send(Explain(8, [1]))
        while not isinstance(frame := it.receive(), Explained):
            pass
        assert (frame.ask, [(account["tag"], account["finish"]) for account in frame.timelines]) == (8, [(1, None)])


def test_what_there_is_can_be_looked_at_at_work():
    with child() as it:
        it.start()
        it.add(1, [100], max_tokens=ENDLESS)
        while not it.receive().finishes:
            pass
        it.send(SnapshotRequest(9))
        while not isinstance(frame := it.receive(), Snapshot):
            pass
        assert (frame.ask, [one["tag"] for one in frame.snapshot["running"]]) == (9, [1])


def test_a_refused_request_disturbs_nobody():
    with child(stderr=subprocess.DEVNULL) as it:
        it.start()
        it.add(1, [REFUSED], max_tokens=2)
        it.add(2, [BROKEN], max_tokens=2)
        request = EngineRequest.of(6, [100], SamplingParams()).pack()
        it.send(Add(6, {**request, "scheduling": {"priority": "high"}}))
        it.add(7, [FULL])
        it.send(Add(3, {**request, "sampling": {"temperature": float("nan")}}))
        it.send(Add(4, {**request, "sampling": {"no such thing": 1}}))
        it.add(5, [100], max_tokens=2)
        rejected, tokens = {}, []
        while len(tokens) < 2:
            frame = it.receive()
            if isinstance(frame, Rejected):
                rejected[frame.tag] = frame
            else:
                tokens += struct.unpack(f"<{len(frame.finishes)}i", frame.tokens)
        assert tokens == [100, 101]
        assert rejected[1] == Rejected(1, "InvalidRequest", "it can never fit: needs 12 blocks of 10", "prompt", "never_fits")
        assert rejected[2].error == "RequestFailed"
        assert "(RuntimeError)" in rejected[2].message
        assert (rejected[3].error, rejected[3].param) == ("InvalidRequest", "temperature")
        assert rejected[4].error == "RequestFailed"
        assert (rejected[6].error, rejected[6].param) == ("InvalidRequest", "priority")
        assert rejected[7] == Rejected(7, "QueueFull", "4 requests wait, and no more may", retry_after=2.5)


def test_stop_ends_it_in_peace_and_closes_the_engine():
    with child(stderr=subprocess.PIPE) as it:
        it.start()
        it.send(Stop())
        assert it.receive() is None
        assert it.process.wait(GUARD) == 0
        assert it.process.stderr.read() == b"closed\n"
        it.process.stderr.close()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(CRASHING, Failed("ZeroDivisionError", "a bug in the model")), (PANICKING, Failed("BaseException", "as the core's panics are"))],
)
def test_a_step_that_fails_is_named_and_ends_it(prompt, words):
    with child(stderr=subprocess.PIPE) as it:
        it.start()
        it.add(1, [prompt])
        assert it.receive() == words
        it.send(Stop())
        assert it.process.wait(GUARD) == 0
        assert b"Traceback" in (said := it.process.stderr.read())
        assert said.endswith(b"closed\n")
        it.process.stderr.close()


def test_its_log_is_written_as_the_commands(monkeypatch):
    monkeypatch.setenv("_CHAIRLIFT_LOG", "error json")
    with child(stderr=subprocess.PIPE) as it:
        it.start()
        it.add(1, [CRASHING])
        it.receive()
        it.send(Stop())
        assert it.process.wait(GUARD) == 0
        line = json.loads(it.process.stderr.readline())
        assert (line["level"], line["message"]) == ("error", "the engine failed")
        assert "ZeroDivisionError: a bug in the model" in line["exception"]
        it.process.stderr.close()


def test_a_start_that_fails_is_named_without_a_trace():
    with child(stderr=subprocess.PIPE) as it:
        it.send(Load({"model": "/m", "seed": 13}))
        assert isinstance(it.receive(), Phase)
        assert it.receive() == Failed("InvalidRequest", "an unlucky seed")
        it.send(Stop())
        assert it.process.wait(GUARD) == 0
        assert it.process.stderr.read() == b""
        it.process.stderr.close()


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 8, struct.pack(">II", 1, 0) + b"x", struct.pack(">II", 3, zlib.crc32(b"\x81\xa1t")) + b"\x81\xa1t"]
)
def test_garbage_ends_it_with_a_word(garbage):
    with child(stderr=subprocess.DEVNULL) as it:
        it.start()
        it.socket.sendall(garbage)
        frame = it.receive()
        assert isinstance(frame, Fatal)
        assert frame.error == "BadFrame"


@pytest.mark.parametrize("prompt", [None, [HANGING]], ids=["idle", "in a step"])
def test_it_ends_when_the_socket_does(prompt):
    with child(stdout=subprocess.PIPE) as it:
        it.start()
        if prompt:
            it.add(1, prompt)
            assert it.process.stdout.readline() == b"hanging\n"
        it.process.stdout.close()
        it.socket.shutdown(socket.SHUT_RDWR)
        assert it.process.wait(GUARD) == 1


@pytest.mark.parametrize("unblocked", [(), (signal.SIGINT, signal.SIGTERM)])
def test_signals_are_the_parents_business(unblocked):
    """`unblocked` are those that multiprocessing unblocks when it starts its resource tracker."""
    with child(preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)) as it:
        it.start()
        for number in unblocked or STOPS:
            it.process.send_signal(number)
        it.add(1, [100], max_tokens=1)
        assert it.receive().finishes == b"\2"


def test_it_goes_on_after_it_was_told_to_leave():
    with child() as it:
        it.start()
        it.process.send_signal(LEAVE)
        assert it.receive() == Leaving()
        it.add(1, [100], max_tokens=1)
        assert it.receive().finishes == b"\2"


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux only")
def test_it_dies_with_its_parent_even_where_the_socket_stays_open():
    ours, theirs = socket.socketpair()
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'counting_engine', sys.argv[1]], pass_fds=[int(sys.argv[1])])\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    parent = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=ENVIRONMENT)
    theirs.close()
    ours.settimeout(GUARD)
    with ours, ours.makefile("rb") as file:
        assert isinstance(receive(file)[1], Phase)
        parent.kill()
        parent.wait()
        assert receive(file) is None  # the child's end, and with it the child, is gone; ours was open all the time


def test_every_setting_crosses():
    from dataclasses import asdict

    settings = EngineConfig(model="/m", max_model_len=99, tenant_weights={"a": 2}, batching="dynamic", batch_timeout_ms=1.5)
    with child() as it:
        it.start(**asdict(settings))
