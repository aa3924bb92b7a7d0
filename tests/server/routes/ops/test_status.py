"""The probes, without a server."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.routes.ops.status import health


@pytest.mark.parametrize(("state", "reason"), [(ModelState.STARTING, "still loading"), (ModelState.RESTARTING, "has stopped")])
def test_an_engine_that_has_not_joined_yet_has_not_stopped(state, reason):
    model = SimpleNamespace(engine=SimpleNamespace(alive=False, ready=False), lifecycle=Lifecycle(state))
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(models=[model]))))
    answer = asyncio.run(health(request))
    assert answer.status_code == 503
    assert reason in json.loads(answer.body)["reason"]
