"""What takes the server's own time is shared among groups of tenants, in virtual time."""

import asyncio
import functools
import math
import sys

import pytest
from fast_forward import FastForward

from chairlift.server import pacing as module
from chairlift.server.errors import ApiError
from chairlift.server.pacing import CREDIT, MAX_COST, MAX_WAIT, MAX_WAITING, SHARE, Pacing
from chairlift.server.work import Work

CORES = 4.0
RATE = SHARE * CORES
"""Seconds of work that all groups may take in a second."""


def in_virtual_time(test):
    """Runs an asynchronous test in an event loop that never waits."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with asyncio.Runner(loop_factory=FastForward) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now():
    return asyncio.get_running_loop().time()


async def request(pacing, group, seconds=0.0, *, lasts=0.0, starts=False, background=False):
    """A request that works for so long, may start in an engine at once, and ends after `lasts` seconds. Returns when it began."""
    work = Work()
    async with pacing.turn(group, work, background=background) as engine_started:
        began = now()
        if starts:
            engine_started()
        await asyncio.sleep(lasts)
        work.seconds = seconds
    return began


async def until_waiting():
    """Lets all tasks go on as far as they do without a timer."""
    for _ in range(10):
        await asyncio.sleep(0)


@in_virtual_time
async def test_a_group_alone_never_waits():
    pacing = Pacing(CORES)
    for _ in range(100):
        assert await request(pacing, "a", 5.0) == 0
    # Its own open requests are no reason to wait either.
    own = asyncio.create_task(request(pacing, "a", lasts=10))
    await until_waiting()
    assert not pacing.must_wait("a")
    assert await request(pacing, "a", 5.0) == 0
    await own


@in_virtual_time
async def test_a_group_beyond_its_share_waits_until_it_is_paid():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=1000))
    assert await request(pacing, "a", 1.0) == 0
    assert pacing.must_wait("a")
    assert not pacing.must_wait("b")
    assert await request(pacing, "a") == pytest.approx(1.0 / RATE - CREDIT)
    other.cancel()


@in_virtual_time
async def test_it_goes_on_at_once_when_the_others_end():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=2))
    assert await request(pacing, "a", 100.0) == 0
    assert await request(pacing, "a") == 2
    await other


@in_virtual_time
async def test_two_groups_that_wait_for_each_other_do_not():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "c", lasts=1))
    await asyncio.gather(*(request(pacing, group, 100.0) for group in "ab"))
    began = await asyncio.gather(*(request(pacing, group, lasts=3) for group in "ab"))
    assert sorted(began) == [1, 4]
    await other


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("at_once", [1, 8])
@in_virtual_time
async def test_all_groups_together_stay_within_the_share(groups, at_once):
    pacing, whole = Pacing(CORES), 2000.0
    other = asyncio.create_task(request(pacing, "victim", lasts=whole))
    worked = dict.fromkeys(range(groups), 0.0)

    async def flood(group):
        while now() < whole:
            await request(pacing, str(group), 0.5, lasts=0.5)
            worked[group] += 0.5

    floods = [asyncio.create_task(flood(group)) for group in worked for _ in range(at_once)]
    await asyncio.wait([other])
    for task in floods:
        task.cancel()
    # The first requests of a group that are sent together begin together: nothing is known of them.
    assert whole * RATE * 0.95 < sum(worked.values()) < whole * RATE * 1.05 + 0.5 * groups * at_once
    assert max(worked.values()) < 1.1 * min(worked.values())


@in_virtual_time
async def test_what_was_expected_and_not_worked_is_given_back():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await request(pacing, "a", 1.0)
    for _ in range(20):
        began = await request(pacing, "a")  # those that an engine started have no work of their own
    assert began == pytest.approx(1.0 / RATE - CREDIT)
    other.cancel()


@pytest.mark.parametrize("requests", [1, 10])
@in_virtual_time
async def test_a_group_that_was_given_all_back_has_no_part_in_the_share(requests):
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await request(pacing, "idle", 1.0)
    await asyncio.sleep(100)
    assert await asyncio.gather(*(request(pacing, "idle", starts=True) for _ in range(requests))) == [now()] * requests
    assert len(pacing) == 1
    await request(pacing, "a", 1.0)
    sent = now()
    assert await request(pacing, "a") == pytest.approx(sent + 1.0 / RATE - CREDIT)
    other.cancel()


@in_virtual_time
async def test_requests_that_an_engine_has_started_keep_none_waiting():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await request(pacing, "a", 1.0)
    paid = await request(pacing, "a", 1.0, starts=True)
    assert await asyncio.gather(*(request(pacing, "a", 1.0, lasts=60, starts=True) for _ in range(50))) == [paid] * 50
    other.cancel()


@pytest.mark.parametrize("starts", [False, True])
@in_virtual_time
async def test_of_requests_that_ran_together_the_mean_is_expected_of_the_next(starts):
    pacing = Pacing(CORES)
    await request(pacing, "a", 0.1)
    await asyncio.gather(*(request(pacing, "a", 0.1, lasts=1, starts=starts) for _ in range(50)))
    await asyncio.sleep(1000)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await request(pacing, "a", 0.1)
    began = await asyncio.gather(*(request(pacing, "a", 0.1, lasts=50) for _ in range(20)))
    assert 0 < began[-1] - began[0] < 20 * 0.1 / RATE
    other.cancel()


@in_virtual_time
async def test_one_request_makes_the_next_wait_for_a_minute_at_most():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "other", lasts=100_000))
    for group in range(50):
        await request(pacing, str(group), 0.001)
    await request(pacing, "a", 1000.0)
    assert await request(pacing, "a") == pytest.approx(MAX_COST - CREDIT)
    other.cancel()


@in_virtual_time
async def test_a_long_request_pays_while_it_runs():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await request(pacing, "a", 1.0)
    for _ in range(20):
        await asyncio.sleep(30)
        await request(pacing, "a", 1.0, lasts=100)
    assert not pacing.must_wait("a")
    other.cancel()


@in_virtual_time
async def test_a_request_waits_behind_those_that_wait():
    pacing = Pacing(CORES)
    async with pacing.turn("b", Work()):
        await request(pacing, "a", 100.0)
        waiting = asyncio.create_task(request(pacing, "a"))
        await until_waiting()
    # The other request has ended, and the one that waits does not know that yet.
    assert pacing.must_wait("a")
    assert await waiting == 0


@in_virtual_time
async def test_too_many_that_wait_are_refused():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100))
    await request(pacing, "a", 2.0)
    waiting = [asyncio.create_task(request(pacing, "a")) for _ in range(MAX_WAITING)]
    await until_waiting()
    with pytest.raises(ApiError) as caught:
        await request(pacing, "a")
    assert (caught.value.status, int(caught.value.headers["retry-after"])) == (429, math.ceil(2.0 / RATE - CREDIT))
    assert await request(pacing, "c") == 0
    assert await asyncio.gather(*waiting) == [pytest.approx(2.0 / RATE - CREDIT)] * MAX_WAITING
    other.cancel()


@pytest.mark.parametrize("at_once", [1, 5, 30])
@in_virtual_time
async def test_no_request_waits_for_long(at_once):
    """Requests that become longer than those before, or that were sent together, are each a minute's share."""
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    waits, refused = [], []

    async def send():
        sent = now()
        try:
            began = await request(pacing, "a", MAX_COST * RATE, lasts=1)
            waits.append(began - sent)
        except ApiError as error:
            waits.append(now() - sent)
            refused.append((error.status, int(error.headers["retry-after"])))

    await asyncio.gather(*(send() for _ in range(at_once)))
    await asyncio.gather(*(send() for _ in range(MAX_WAITING - 1)))
    assert max(waits) <= MAX_WAIT
    assert len(refused) >= MAX_WAITING - 1 - MAX_WAIT / MAX_COST - 1
    assert max(waits) >= MAX_WAIT - MAX_COST or at_once == 30
    await asyncio.sleep(max(seconds for _, seconds in refused))
    assert {status for status, _ in refused} == {429}
    before = len(refused)
    await send()
    assert (len(refused), now() < 100_000) == (before, True)
    other.cancel()


@in_virtual_time
async def test_background_work_waits_and_keeps_no_other_group_waiting():
    pacing = Pacing(CORES)
    lines = [asyncio.create_task(request(pacing, "a", 5.0, lasts=10, background=True)) for _ in range(2)]
    await request(pacing, "b", 100.0)
    assert not pacing.must_wait("b")
    await asyncio.wait(lines)
    other = asyncio.create_task(request(pacing, "b", lasts=100_000))
    await until_waiting()
    began = now()
    lines = [request(pacing, "a", background=True) for _ in range(2 * MAX_WAITING)]
    assert min(await asyncio.gather(*lines)) > began + 2 * 5.0 / RATE - 20
    other.cancel()


@in_virtual_time
async def test_a_request_visits_no_accounts_of_other_groups():
    visited = []
    for groups in (10, 1000):
        pacing = Pacing(CORES)
        for number in range(groups):
            await request(pacing, str(number), 1.0)
        assert len(pacing) == groups
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename == module.__file__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        await request(pacing, "a", 1.0)
        sys.settrace(before)
        visited.append(lines)
    assert visited[0] == visited[1] > 10


@in_virtual_time
async def test_a_request_that_is_cancelled_leaves_its_place_and_owes_nothing():
    pacing = Pacing(CORES)
    other = asyncio.create_task(request(pacing, "b", lasts=100))
    await request(pacing, "a", 2.0)
    waiting = [asyncio.create_task(request(pacing, "a", 1.0)) for _ in range(MAX_WAITING)]
    await until_waiting()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert await request(pacing, "a") == pytest.approx(2.0 / RATE - CREDIT)
    other.cancel()


@in_virtual_time
async def test_requests_of_no_group_never_wait_but_others_wait_for_them():
    pacing = Pacing(CORES)
    operators = asyncio.create_task(request(pacing, None, 100.0, lasts=2))
    await request(pacing, "a", 100.0)
    assert not pacing.must_wait(None)
    assert await request(pacing, None, 100.0) == 0
    assert await request(pacing, "a") == 2
    await operators


@in_virtual_time
async def test_accounts_of_idle_groups_are_dropped():
    pacing = Pacing(CORES)
    for number in range(1000):
        await request(pacing, f"idle{number}")
    assert len(pacing) == 0
    for number in range(1000):
        await request(pacing, f"busy{number}", 0.001 * RATE)
        assert len(pacing) == 1
        await asyncio.sleep(1)
    assert len(pacing) == 0
