"""AsyncEngine and its child process with an engine that counts: start, close, and the child's death."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import counting_engine
import pytest
from async_engine import GUARD, collect, ids, run, until
from counting_engine import CRASHING, DYING, ENDLESS, HANGING

from chairlift.engine import client
from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.exit_watch import PIDFD_THREAD
from chairlift.engine.stats import Stats
from chairlift.errors import ChairliftError, EngineClosed, EngineDead, InvalidRequest, ModelNotFound
from chairlift.sampling import SamplingParams


@pytest.fixture(autouse=True)
def _counting(monkeypatch):
    counting_engine.install(monkeypatch.setattr)


def test_every_open_stream_hears_of_the_engines_crash(capfd):
    async def test(engine):
        jobs = [asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS)) for _ in range(5)]
        await until(lambda: engine.stats().running == 5)
        jobs.append(asyncio.create_task(collect(engine, [CRASHING])))
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert "ZeroDivisionError: a bug in the model" in str(result)
        assert not engine.alive
        assert not engine.ready
        with pytest.raises(EngineDead, match="a bug in the model"):
            await collect(engine, [1000])

    run(test)
    assert "Traceback" in capfd.readouterr().err


def test_what_was_finished_can_be_read_when_the_engine_is_dead():
    async def test(engine):
        stream = engine.generate("a", SamplingParams(max_tokens=2000))
        first = await anext(stream)
        await until(lambda: engine.stats().steps >= 2000 and engine.stats().running == 0)
        with pytest.raises(EngineDead):
            await collect(engine, [DYING])
        rest = [output async for output in stream]
        assert ids([first, *rest]) == list(range(97, 2097))

    run(test)


def test_a_killed_engine_is_told_by_its_signal():
    async def test(engine):
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await collect(engine, [DYING])
        assert not engine.alive

    run(test)


def test_close_in_the_middle_leaves_no_process_and_can_be_repeated(monkeypatch, capfd, caplog):
    monkeypatch.setattr("chairlift.engine.engine_process.STOP_SECONDS", 0.1)

    async def test(engine):
        process = engine.pid
        open_ones = [asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS)), asyncio.create_task(collect(engine, [HANGING]))]
        await until(lambda: "hanging" in capfd.readouterr().out)
        await asyncio.gather(engine.close(), engine.close())
        for result in await asyncio.gather(*open_ones, return_exceptions=True):
            assert isinstance(result, EngineClosed)
        assert not Path(f"/proc/{process}").exists()
        assert "killing it" in caplog.text
        await engine.close()
        with pytest.raises(EngineDead, match="closed"):
            await collect(engine, [1000])

    run(test)


def test_close_is_kind_where_it_can_be(capfd):
    async def test(engine):
        await engine.close()
        assert engine.pid is None
        assert "closed" in capfd.readouterr().err

    run(test)


def test_a_closed_engine_starts_again():
    async def main():
        engine = AsyncEngine()
        for _ in range(2):
            async with asyncio.timeout(GUARD), engine:
                assert engine.ready
                with pytest.raises(ChairliftError, match="close it first"):
                    await engine.start()
                assert ids(await collect(engine, [1000], max_tokens=2)) == [1000, 1001]

    asyncio.run(main())


def test_it_answers_only_in_the_event_loop_that_started_it():
    engine = AsyncEngine()

    async def refused(*actions):
        for action in actions:
            with pytest.raises(ChairliftError, match="only in the event loop that started it"):
                await action()

    async def main():
        await engine.start()
        await asyncio.to_thread(asyncio.run, refused(lambda: collect(engine, "a"), lambda: engine.explain("x"), engine.close))
        assert ids(await collect(engine, [1000], max_tokens=2)) == [1000, 1001]

    async def afterwards():
        process = Path(f"/proc/{engine.pid}/stat")
        await engine.close()
        assert (engine.alive, engine.pid) == (False, None)
        await until(lambda: not process.exists() or ") Z " in process.read_text())

    asyncio.run(main())
    asyncio.run(refused(lambda: collect(engine, "a")))
    asyncio.run(afterwards())


def test_before_start_it_says_so():
    engine = AsyncEngine(max_num_seqs=3)
    assert engine.config.max_num_seqs == 3
    assert (engine.alive, engine.ready, engine.stats()) == (False, False, Stats())

    async def main():
        with pytest.raises(EngineDead, match="not been started"):
            await collect(engine, [1])
        await engine.close()

    asyncio.run(main())


def test_it_is_not_ready_before_the_tokenizer_is(monkeypatch):
    read, quick = threading.Event(), client.Tokenizer

    def slow(*arguments):
        assert read.wait(GUARD)
        return quick(*arguments)

    monkeypatch.setattr("chairlift.engine.client.Tokenizer", slow)

    async def main():
        engine = AsyncEngine()
        async with asyncio.timeout(GUARD):
            starting = asyncio.create_task(engine.start())
            try:
                await until(lambda: engine.stats() != Stats())
                assert (engine.alive, engine.ready) == (True, False)
                with pytest.raises(EngineDead, match="not ready yet"):
                    await collect(engine, "a")
            finally:
                read.set()
                await starting
                assert engine.ready
                await engine.close()

    asyncio.run(main())


def test_no_model_leaves_no_process(monkeypatch):
    engines = []

    def missing(model, revision=None, cache_dir=None):
        engines.append(engine.pid)
        raise ModelNotFound("there is no such model")

    monkeypatch.setattr("chairlift.engine.client.locate", missing)
    engine = AsyncEngine()
    with pytest.raises(ModelNotFound):
        asyncio.run(engine.start())
    assert not Path(f"/proc/{engines[0]}").exists()
    assert not engine.alive


def test_what_stops_the_engines_start_arrives_as_it_was():
    engine = AsyncEngine(seed=13)
    with pytest.raises(InvalidRequest, match="an unlucky seed"):
        asyncio.run(engine.start())
    assert not engine.alive


def test_what_stops_the_engines_start_is_raised_and_not_logged_as_well(caplog):
    with pytest.raises(InvalidRequest, match="an unlucky seed"):
        asyncio.run(AsyncEngine(seed=13).start())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_engine_has_ended_when_its_socket_has_whatever_became_of_its_process(monkeypatch):
    """Its exit status may come much later: nobody is to send requests to it until then."""
    waiting, reported = threading.Event(), threading.Event()

    def wait(process, timeout=None):
        waiting.set()
        reported.wait(20)

    async def test(engine):
        ends = []
        engine.on_end = lambda: ends.append((engine.ready, engine.alive, hanging.done()))
        hanging = asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS))
        await until(lambda: engine.stats().running)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", wait)
            try:
                os.kill(engine.pid, signal.SIGKILL)
                await until(waiting.is_set)
                assert (engine.ready, engine.alive) == (False, False)
                assert ends == [(False, False, False)]
                with pytest.raises(EngineDead):
                    await collect(engine, [1000])
            finally:
                reported.set()
        with pytest.raises(EngineDead):
            await hanging
        await engine.ended()
        assert len(ends) == 1

    run(test)


@pytest.fixture
def _pidfd_of_threads():
    try:
        os.close(os.pidfd_open(threading.get_native_id(), PIDFD_THREAD))
    except (AttributeError, OSError):
        pytest.skip("needs Linux 6.9")


@pytest.mark.usefixtures("_pidfd_of_threads")
def test_a_killed_engine_is_noticed_before_its_socket_closes(monkeypatch):
    """Its memory is freed first, which may take a second: the test keeps the other end of the socket open instead."""
    socketpair, kept = socket.socketpair, []

    def pair():
        ours, theirs = socketpair()
        kept.append(theirs.dup())
        return ours, theirs

    async def test(engine):
        await engine.close()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", pair)
            await engine.start()
        ends = asyncio.Event()
        engine.on_end = ends.set
        with kept.pop():
            hanging = asyncio.create_task(collect(engine, [1000], max_tokens=ENDLESS))
            await until(lambda: engine.stats().running)
            os.kill(engine.pid, signal.SIGKILL)
            await ends.wait()
            assert (engine.ready, engine.alive) == (False, False)
            with pytest.raises(EngineDead, match="has ended"):
                await collect(engine, [1000])
            assert not hanging.done()
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await hanging
        await engine.ended()

    run(test)


def test_a_child_that_never_speaks_is_named(monkeypatch):
    monkeypatch.setattr(EngineProcess, "command", ("-c", "raise SystemExit(3)"))
    with pytest.raises(EngineDead, match="exit status 3"):
        asyncio.run(AsyncEngine().start())


def test_phases_are_logged_and_sum_to_the_total(caplog):
    async def test(engine):
        lines = [record.getMessage() for record in caplog.records if record.name == "chairlift"]
        assert "phase weights 0.25 s" in lines
        assert lines[-4:-1] == [
            "model             smollm2-135m-instruct",
            "weights           none                   --load-format says so",
            "default sampling  temperature 1          the checkpoint recommends nothing",
        ]
        total, parts = lines[-1].removeprefix("ready in ").split(" s: ")
        parts = {name: float(seconds) for name, seconds in (part.rsplit(" ", 1) for part in parts.split(" + "))}
        logged = {line.split()[1] for line in lines if line.startswith("phase ")}
        assert set(parts) == logged >= {"process", "imports", "weights"}
        assert sum(parts.values()) == pytest.approx(float(total))

    with caplog.at_level(logging.INFO, "chairlift"):
        run(test)


def test_a_parent_that_is_killed_takes_its_engine_along():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    parent = subprocess.Popen([sys.executable, "-m", "counting_engine", "parent"], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout.readline() == b"hanging\n"
    parent.kill()
    # The engine has inherited the pipe: it ends when both are gone, though the engine hangs in a step.
    parent.communicate(timeout=GUARD)
