"""The model of an engine with Continuum's times to live, in benches/continuum.py."""

from pathlib import Path

import continuum
import numpy as np
import pytest

from chairlift.bench.sessions import RecordedSession, SessionTurn, read_sessions

ROOT = Path(__file__).parents[2]


def session(*, think: float, tokens: int = 6400, turns: int = 3, output: int = 4) -> RecordedSession:
    """A session of one thread whose prompts grow by ten blocks."""
    blocks = [tokens // 64 + 10 * turn for turn in range(turns)]
    requests = [SessionTurn(think if at else 0.0, 64 * leaf, output, leaf, True) for at, leaf in enumerate(blocks)]
    return RecordedSession(64, [requests], [0, *range(blocks[-1])])


def test_a_context_is_kept_for_the_time_that_pays():
    # Nine of ten tools take a second, one takes a minute.
    times = continuum.Lifetimes(np.array([1.0] * 9 + [60.0]), memoryfulness=0.5)
    assert times.seconds(reload=1.0, wait=0.0) == 0.0, "0.9 x 1 - 1 < 0"
    assert times.seconds(reload=2.0, wait=0.0) == 1.0, "0.9 x 2 - 1 > 0"
    assert times.seconds(reload=2.0, wait=1200.0) == 60.0, "602 - 60 > 0.9 x 602 - 1"


def test_turns_had_tell_the_turns_left_where_sessions_have_equal_lengths():
    assert continuum.Lifetimes.of([session(think=1.0)] * 3).memoryfulness == pytest.approx(1.0)
    mixed = continuum.Lifetimes.of([session(think=1.0, turns=turns) for turns in (3, 30)])
    assert mixed.memoryfulness < 1.0
    assert mixed.times.tolist() == [1.0] * 201


def test_what_is_kept_is_found_again_where_lru_finds_little(monkeypatch):
    # Eight users, of whose contexts four fit, and whose tools are quick.
    monkeypatch.setattr(continuum, "SPAN", 3600.0)
    monkeypatch.setattr(continuum, "WARM_UP", 600.0)
    sessions = [session(think=1.0, tokens=64_000, turns=20, output=300)]
    lru, kept = (continuum.Engine(sessions, 8, 320_000, 1, keeps).run() for keeps in (None, continuum.Constant(2.0)))
    assert lru.found < 0.3 < 0.8 < kept.found
    assert kept.requests > 2 * lru.requests
    free = continuum.Engine(sessions, 4, 10**9, 1, None).run()
    assert free.slowdown == pytest.approx(1.0, abs=0.3)
    assert free.found > 0.9


def test_a_prompt_alone_takes_as_long_as_its_steps():
    pieces = [(0, 2048), (2048, 2048), (4096, 904)]
    steps = [continuum.STEP + continuum.TOKEN * new + continuum.PAIR * new * (at + new / 2) for at, new in pieces]
    assert continuum.prompt_time(0, 5000) == pytest.approx(sum(steps))


def test_the_shared_tokens_of_recorded_sessions_are_counted():
    sessions = read_sessions(ROOT / "tests" / "data" / "traces" / "agents_small.jsonl.gz")
    shared = sum(work.shared for one in sessions for thread in continuum.works(one) for work in thread)
    assert 0.5 < shared / sum(turn.prompt_tokens for one in sessions for thread in one.threads for turn in thread) < 1.0
