import asyncio

import httpx
from fake_async_engine import MODEL, FakeEngine

from chairlift.server.admin import AdminApp, serve_admin
from chairlift.server.http.sockets import open_path
from chairlift.server.observability.metrics import Metrics
from chairlift.server.service import Service


def test_the_operator_needs_no_key(tmp_path):
    engine, drained = FakeEngine(), []
    engine.counters = {"running": 3}
    service = Service(engine, MODEL, Metrics(MODEL, engine.stats, lambda: engine.facts))
    service.lifecycle.ready()
    path = tmp_path / "admin"

    async def ask():
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        with open_path(str(path), 0o600) as listener:
            async with (
                serve_admin(listener, AdminApp(service, lambda: drained.append(True))),
                httpx.AsyncClient(transport=transport, base_url="http://admin") as client,
            ):
                assert (await client.get("/health")).json() == {"status": "healthy"}
                assert b"chairlift_num_requests_running" in (await client.get("/metrics")).content
                assert (await client.get("/state")).json() == {
                    "running": 3,
                    "http": {"open": 0, "waiting": 0},
                    "state": "ready",
                    "restarts": 0,
                }
                unknown = await client.get("/v1/requests/x/explain")
                assert unknown.json()["error"]["code"] == "request_not_found"
                assert (await client.get("/drain")).status_code == 405
                assert not drained
                assert (await client.post("/drain")).status_code == 202
                assert drained == [True]
                assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 404

    asyncio.run(ask())
    assert not path.exists()
