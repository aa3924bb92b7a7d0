import asyncio
import json
from dataclasses import replace

import httpx
from fake_hub import fake_hub
from gguf_files import gguf_of, tiny_model
from scripted_engine import ScriptedEngine
from server_here import MODEL

from chairlift.engine.stats import Stats
from chairlift.server.admin import AdminApp, serve_admin
from chairlift.server.http.sockets import open_path
from chairlift.server.model import ServedModel
from chairlift.server.service import Service


def test_the_operator_needs_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    engine, drained = ScriptedEngine(), []
    engine.counters = {"running": 3, "slots": 4}
    service = Service([ServedModel(MODEL, engine)])
    service.loader.serve_started(service.default)
    path = tmp_path / "admin"

    async def ask():
        await engine.start()
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        with open_path(str(path), 0o600) as listener:
            async with (
                serve_admin(listener, AdminApp(service, lambda: drained.append(True), 30)),
                httpx.AsyncClient(transport=transport, base_url="http://admin") as client,
            ):
                assert (await client.get("/health")).json() == {"status": "healthy"}
                assert b"chairlift_num_requests_running" in (await client.get("/metrics")).content
                assert (await client.get("/state")).json() == {
                    **Stats(running=3, slots=4).pack(),
                    "http": {"open": 0, "waiting": 0},
                    "state": "ready",
                    "restarts": 0,
                }
                unknown = await client.get("/v1/requests/x/explain")
                assert unknown.json()["error"]["code"] == "request_not_found"
                for model in ("../x", "/etc", "x/../y", ".a/b", 7):
                    assert (await client.post("/api/pull", json={"model": model, "stream": False})).status_code in (400, 404)
                    assert (await client.request("DELETE", "/api/delete", json={"model": model})).status_code in (400, 404)
                assert (await client.request("DELETE", "/api/delete", json={"model": "org/other"})).json()["error"]
                model_path = tmp_path / "hub" / "models--org--name"
                model_path.mkdir(parents=True)
                lines = (await client.post("/api/pull", json={"model": "nothing"})).text.splitlines()
                assert [list(json.loads(line)) for line in lines] == [["status"], ["error"]]
                assert (await client.request("DELETE", "/api/delete", json={"name": "org/name:latest"})).status_code == 200
                assert not model_path.exists()
                assert (await client.get("/drain")).status_code == 405
                assert not drained
                assert (await client.post("/drain")).status_code == 202
                assert drained == [True]
                for api, body in (("completions", {"prompt": "a"}), ("messages", {"messages": []})):
                    assert (await client.post(f"/v1/{api}", json=body)).status_code == 404

    asyncio.run(ask())
    assert not path.exists()


def test_a_pull_tells_its_progress_and_what_is_served_is_not_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    service = Service([ServedModel(MODEL, ScriptedEngine())])
    served = service.default.engine.config
    app = AdminApp(service, lambda: None, 30)

    async def ask(hub):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
            lines = [json.loads(line) for line in (await client.post("/api/pull", json={"model": "hf.co/org/repo:Q8_0"})).text.splitlines()]
            assert [lines[0], lines[-1]] == [{"status": "pulling hf.co/org/repo:Q8_0"}, {"status": "success"}]
            assert lines[-2] == {"status": "pulling org/repo/m-Q8_0.gguf", "completed": len(content), "total": len(content)}
            for name, status in (("org/repo", 409), ("hf.co/org/repo:q8_0", 409), ("org/repo:Q4_0", 404), ("org/other", 404)):
                service.default.engine.config = replace(served, model="org/repo:Q8_0")
                assert (await client.request("DELETE", "/api/delete", json={"model": name})).status_code == status
            service.default.engine.config = served
            assert (await client.request("DELETE", "/api/delete", json={"model": "org/repo:Q8_0"})).status_code == 200
            assert not list(tmp_path.rglob("*Q8_0.gguf"))

    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("org/repo", {"m-Q8_0.gguf": content})
        asyncio.run(ask(hub))
