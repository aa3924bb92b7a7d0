"""No value of a wrong kind, in any field of any route, makes the server fail or keeps its event loop for long.

`make test` sends a sample of the bodies; `make hostile` (HOSTILE=1) sends all of them.
"""

import gc
import itertools
import os

import httpx
import pytest
from confused_bodies import BASES, WRONG, confused_bodies
from scripted_engine import ScriptedEngine
from server_here import serving

from chairlift.server.app import routes

SAMPLE = 1 if os.environ.get("HOSTILE") else 61
"""One of so many bodies is sent. A prime number: not always the same values."""
LIMIT = 0.02
BATCH = 500
"""Bodies after which the longest callback is looked at."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = ScriptedEngine()
    engine.describe(max_text_len=64, embedding_size=4)
    with serving(engine, data_dir=tmp_path_factory.mktemp("data")) as (base, service), httpx.Client(base_url=base, timeout=60) as client:
        gc.collect()
        gc.freeze()
        yield client, service
        gc.unfreeze()


def test_all_routes_with_a_body_are_tried():
    with_fields = {route.path for route in routes() if "POST" in (route.methods or ())}
    assert with_fields - BASES.keys() == {"/v1/files", "/v1/batches/{id}/cancel", "/api/pull"}
    assert len(set(WRONG)) >= 53


def send(client, body, sequences):
    """The response to a body; sequences are made and dropped as needed."""
    path = body.path
    if "{id}" in path:
        if not sequences:
            sequences.append(client.post("/v1/sequences", json={"prompt": "a"}).json()["id"])
        path = path.replace("{id}", sequences[-1])
    response = client.post(path, content=body.body, headers={"content-type": "application/json"})
    if response.status_code in (404, 409, 410):
        sequences.clear()
    if response.status_code == 200 and body.path in ("/v1/sequences", "/v1/sequences/{id}/fork"):
        made = response.json()
        for one in made.get("data", [made]):
            client.delete(f"/v1/sequences/{one['id']}")
    return response


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_wrong_value_makes_the_server_fail(served):
    client, service = served
    failures, sequences = [], []
    remaining = itertools.islice(confused_bodies(), 0, None, SAMPLE)
    while bodies := list(itertools.islice(remaining, BATCH)):
        service.loop_monitor.reset()
        for body in bodies:
            response = send(client, body, sequences)
            # A deadline of a millisecond is missed.
            if response.status_code >= 500 and response.status_code != 504:
                failures.append(f"{response.status_code} {body}")
        if service.loop_monitor.longest[0] > LIMIT:
            # It may be the garbage collector or a busy machine, so each is tried alone.
            failures += [str(body) for body in bodies if all(_longest(client, service, body, sequences) > LIMIT for _ in range(4))]
    assert failures == []


def _longest(client, service, body, sequences):
    service.loop_monitor.reset()
    send(client, body, sequences)
    return service.loop_monitor.longest[0]
