"""How one prompt goes through the engines of its model."""

import asyncio
from types import SimpleNamespace

import pytest

from chairlift.errors import DeadlineMissed
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.observability.request_context import RequestContext
from chairlift.server.submission import MAX_LOSSES, Submission


def test_a_deadline_counts_while_another_suspect_has_the_engine():
    async def outputs():
        model = SimpleNamespace(probation=asyncio.Lock(), lifecycle=Lifecycle())
        scheduling = Scheduling(deadline_ms=20.0)
        submission = Submission(
            model, [1], SamplingParams(max_tokens=1), scheduling, request_id="r", context=RequestContext("r"), buffered=True
        )
        submission._losses = MAX_LOSSES  # noqa: SLF001
        async with model.probation, asyncio.timeout(60):
            return [output async for output in submission.outputs(lambda: None, lambda output: None, lambda: None)]

    with pytest.raises(DeadlineMissed):
        asyncio.run(outputs())


@pytest.mark.parametrize(("outputs", "each"), [(20, 64), (200, 16), (1000, 1)])
def test_other_tasks_run_while_buffered_outputs_are_passed_on(outputs, each):
    async def arrive(stream, **rest):
        for _ in range(outputs):
            yield RequestOutput("", [1] * each, [1], None, None, index=0)

    async def at_once():
        async def prepare(*rest, **names):
            return SimpleNamespace(num_received=0)

        engine = SimpleNamespace(info=SimpleNamespace(fingerprint=b""), prepare_tokens=prepare, run=arrive)
        model = SimpleNamespace(probation=asyncio.Lock(), lifecycle=Lifecycle(), engine=engine)
        model.lifecycle.ready()
        submission = Submission(
            model, [1], SamplingParams(max_tokens=outputs * each), Scheduling(), request_id="r", context=RequestContext("r"), buffered=True
        )
        turns, seen = [0], 0

        def turn():
            turns.append(0)
            asyncio.get_running_loop().call_soon(turn)

        asyncio.get_running_loop().call_soon(turn)
        async for output in submission.outputs(lambda: None, lambda output: None, lambda: None):
            turns[-1] += len(output.token_ids)
            seen += len(output.token_ids)
        return max(turns), seen

    most, seen = asyncio.run(at_once())
    assert seen == outputs * each
    assert most <= 64
