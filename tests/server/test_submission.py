"""How one prompt goes through the engines of its model."""

import asyncio
from types import SimpleNamespace

import pytest

from chairlift.errors import DeadlineMissed
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
