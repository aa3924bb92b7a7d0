"""What work costs in other work of the same moment: a bound in seconds fails where the machine is slow, or busy with other things."""

import json
import time
from collections.abc import Callable

_TEXT = json.dumps([[number, str(number)] for number in range(4000)])


def reference() -> None:
    """A fixed piece of work, in Python and in C: 5 ms on a core of 2.5 GHz that does nothing else."""
    json.dumps([[one, len(two), {two: one}] for one, two in json.loads(_TEXT)])


def cost(
    work: Callable[[], object],
    unit: Callable[[], object] = reference,
    attempts: int = 4,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """CPU time of `work` as a multiple of that of `unit`: of each the least of some times in turn, which other work disturbs least."""
    times = [(_seconds(unit, clock), _seconds(work, clock)) for _ in range(attempts)]
    units, works = zip(*times, strict=True)
    return min(works) / min(units)


def references(seconds: float) -> float:
    """CPU time that was measured a moment ago, as a multiple of the reference's."""
    return seconds / min(_seconds(reference, time.thread_time) for _ in range(4))


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return clock() - began
