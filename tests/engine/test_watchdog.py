"""The watchdog: what it takes for a stall, what it says of one, and what the parent makes of its words and its silence."""

import asyncio
import os
import signal
from types import SimpleNamespace

import counting_engine
import pytest
from counting_engine import ENDLESS, HANGING, CharacterTokenizer

from chairlift.engine import frames, heartbeat, watchdog
from chairlift.engine.client import AsyncEngine
from chairlift.engine.frames import Alive, Load
from chairlift.engine.heartbeat import Heartbeat
from chairlift.engine.stats import Stats
from chairlift.engine.watchdog import IDLE, STUCK_SECONDS, StallDetector, Watchdog
from chairlift.errors import EngineDead, ModelNotFound
from chairlift.sampling import SamplingParams

GUARD = 60


class Engine:
    """What the watchdog sees of an engine."""

    stage = ("plan", 0.0)
    progress = 0
    first_step = 0.1
    predicted_step_us = 0

    def stats(self):
        return Stats(predicted_step_us=self.predicted_step_us, running=3)


@pytest.fixture
def wait(monkeypatch):
    """A clock of the test's own: lets so many seconds pass."""
    now = [100.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds):
        now[0] += seconds

    return wait


def check(dog, wait, seconds):
    """The heartbeat after one check per second."""
    for _ in range(seconds):
        wait(1)
        said = dog.check()
    return said


def test_time_that_nobody_was_awake_for_does_not_count(wait):
    stall = StallDetector()
    assert stall.check("a") == 0
    wait(1)
    assert stall.check("a") == 1
    wait(1000)
    assert stall.check("a") == 3
    assert stall.check("b") == 0


def test_a_stage_that_lasts_is_named_and_everything_is_dumped_once(wait, capfd):
    engine = Engine()
    dog = Watchdog(engine, print)
    engine.stage = ("commit", 1.0)
    assert check(dog, wait, 10) == Alive()
    assert check(dog, wait, 1) == Alive("commit", 10.0)
    assert check(dog, wait, 5) == Alive("commit", 15.0)
    dump = capfd.readouterr().err
    assert dump.count("the engine is stuck: 10 s in 'commit'") == 1
    assert '"running": 3' in dump
    assert "in test_a_stage_that_lasts" in dump
    engine.stage = ("commit", 2.0)  # the same stage of the next step
    assert check(dog, wait, 10) == Alive()
    assert check(dog, wait, 1).stage == "commit"
    assert "the engine is stuck" in capfd.readouterr().err


def test_a_long_step_that_makes_progress_is_not_stuck(wait):
    engine = Engine()
    dog = Watchdog(engine, print)
    for _ in range(30):
        assert check(dog, wait, 10) == Alive()
        engine.progress += 1
    assert check(dog, wait, 11) == Alive("plan", 10.0)


def test_an_idle_engine_is_never_stuck(wait):
    engine = Engine()
    engine.stage = (IDLE, 1.0)
    assert check(Watchdog(engine, print), wait, 1000) == Alive()


@pytest.mark.parametrize(("predicted_step_us", "first", "seconds"), [(3_000_000, 0.1, 60), (0, 2.0, 40), (100, 2.0, STUCK_SECONDS)])
def test_a_step_that_should_be_long_may_be_longer(wait, predicted_step_us, first, seconds):
    engine = Engine()
    engine.predicted_step_us, engine.first_step = predicted_step_us, first
    dog = Watchdog(engine, print)
    dog.check()
    assert check(dog, wait, int(seconds) - 1) == Alive()
    assert check(dog, wait, 1) == Alive("plan", seconds)


def test_an_engine_that_stays_silent_or_stuck_is_killed(monkeypatch):
    monkeypatch.setattr(heartbeat, "KILL_AFTER", 0.02)
    counting_engine.hurry(0.02, monkeypatch.setattr)

    async def main(speaks):
        killed = []
        heart = Heartbeat(lambda: killed.append(heart.stuck[0]), lambda: False)
        watching = asyncio.create_task(heart.watch())
        async with asyncio.timeout(GUARD):
            while not watching.done():
                if speaks:
                    heart.on_message(Alive("run", 12.5))
                await asyncio.sleep(0)
        return killed

    assert asyncio.run(main(speaks=False)) == ["process"]
    assert asyncio.run(main(speaks=True)) == ["run"]


def run(monkeypatch, test, last_hope=1000.0):
    """Runs `test(engine)` with an engine in a process, and watchdogs in a hurry."""
    counting_engine.install(monkeypatch.setattr)
    counting_engine.hurry(1.0, monkeypatch.setattr)
    monkeypatch.setenv("COUNTING_ENGINE_HURRY", "1.0")
    monkeypatch.setattr(heartbeat, "KILL_AFTER", last_hope)

    async def main():
        async with asyncio.timeout(GUARD), AsyncEngine() as engine:
            await test(engine)

    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def collect(engine, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens)
    return [token async for output in engine.generate(prompt, params) for token in output.token_ids]


@pytest.mark.slow
def test_a_stopped_process_is_killed_once_it_is_found_stuck(monkeypatch, caplog):
    async def test(engine):
        assert engine.stuck is None
        asking = asyncio.create_task(collect(engine, [1000], ENDLESS))
        await until(lambda: engine.stats().running)
        os.kill(engine.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, engine.pid, os.WSTOPPED)
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await asking

    run(monkeypatch, test)
    assert "the engine's process was stopped by a signal: killing its process" in caplog.text


@pytest.mark.slow
def test_a_step_that_never_ends_is_named_and_ends_the_engine(monkeypatch, capfd):
    async def test(engine):
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await collect(engine, [HANGING], 1)
        assert engine.stuck is None

    run(monkeypatch, test, last_hope=0.3)
    dump = capfd.readouterr().err
    assert dump.count("the engine is stuck") == 1
    assert "s in 'run'; its scheduler: {" in dump
    assert "counting_engine.py" in dump


@pytest.mark.slow
def test_a_parent_that_does_not_read_for_a_while_finds_an_engine_that_gets_on(monkeypatch):
    may_read, read = asyncio.Event(), frames.read
    may_read.set()

    async def slowly(reader, seal):
        await may_read.wait()
        return await read(reader, seal)

    monkeypatch.setattr(frames, "read", slowly)

    async def test(engine):
        asking = asyncio.create_task(collect(engine, [1000], ENDLESS))
        await until(lambda: engine.stats().running)
        may_read.clear()
        await until(lambda: engine.stuck)
        assert engine.stuck[0] == "process"
        may_read.set()
        await until(lambda: engine.stuck is None)
        asking.cancel()

    run(monkeypatch, test)


def test_a_token_that_cannot_be_shown_ends_its_own_request_only(monkeypatch):
    piece = CharacterTokenizer.piece

    def poisoned(self, token):
        if token == 2005:
            raise ZeroDivisionError("a bug in the tokenizer")
        return piece(self, token)

    monkeypatch.setattr(CharacterTokenizer, "piece", poisoned)

    async def test(engine):
        other = asyncio.create_task(collect(engine, [1000], 300))
        with pytest.raises(ZeroDivisionError):
            await collect(engine, [2000], ENDLESS)
        await until(lambda: engine.stats().expired == 1)
        assert await other == list(range(1000, 1300))

    run(monkeypatch, test)


@pytest.mark.parametrize(("journal", "names"), [("day.journal", ["day.journal", "day.journal.1"]), (None, [None, None])])
def test_an_engine_that_is_started_again_spares_the_journal_of_the_one_before(monkeypatch, tmp_path, journal, names):
    counting_engine.install(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    encode, journals = frames.encode, []

    def noted(frame, engine, seal):
        if isinstance(frame, Load):
            journals.append(frame.settings["journal"])
        return encode(frame, engine, seal)

    monkeypatch.setattr(frames, "encode", noted)

    def unreadable(directory):
        raise ModelNotFound("its tokenizer went")

    async def main():
        engine = AsyncEngine(journal=journal)
        for _ in names:
            # A start that fails uses no name up.
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_read_tokenizer", unreadable)
                with pytest.raises(ModelNotFound):
                    await engine.start()
            async with engine:
                pass

    asyncio.run(main())
    assert journals == [name for name in names for _ in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name for name in names if name is not None]
