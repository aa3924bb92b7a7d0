import asyncio
import json
import threading

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, wait_until

from chairlift.engine.stats import Stats
from chairlift.server.admission import Admission
from chairlift.server.app import routes
from chairlift.server.errors import ApiError
from chairlift.server.keys import Tenant
from chairlift.server.model import ServedModel

COMPLETIONS = "/v1/completions"
HELD = {"prompt": "held", "max_tokens": 2}


@pytest.fixture
def engine():
    """One whose queue has four places."""
    return ScriptedEngine(max_num_queued_reqs=4)


@pytest.fixture(autouse=True)
def _headers_at_once(monkeypatch):
    monkeypatch.setattr("chairlift.server.streaming.FIRST_EVENT_TIMEOUT", 0.05)


def counted(service):
    return service.admission.waiting, service.admission.open


def test_a_burst_gets_as_many_in_as_may_wait():
    engine = ScriptedEngine(max_num_queued_reqs=10)
    encoded = []
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **options: encoded.append(text) or encode(text, **options)

    async def burst(base, service):
        async with httpx.AsyncClient(base_url=base, timeout=30, limits=httpx.Limits(max_connections=100)) as client:
            requested = [asyncio.create_task(client.post(COMPLETIONS, json=HELD | {"user": f"u{i}"})) for i in range(100)]
            while sum(one.done() for one in requested) < 90:
                await asyncio.sleep(0.01)
            assert (engine.started, len(encoded), counted(service)) == (10, 10, (10, 10))
            engine.released = True
            return await asyncio.gather(*requested)

    with serving(engine) as (base, service):
        answers = asyncio.run(burst(base, service))
        wait_until(lambda: counted(service) == (0, 0))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert (len(refused), engine.finished) == (90, 10)
    assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_every_route_that_waits_and_no_other_finds_the_queue_full():
    engine = ScriptedEngine(max_num_queued_reqs=1)
    messages = [{"role": "user", "content": "hi"}]
    generating = {
        COMPLETIONS: HELD,
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"model": MODEL, "messages": messages, "max_tokens": 4},
    }
    counting = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [97]},
        "/api/show": {"model": MODEL},
        "/v1/messages/count_tokens": {"model": MODEL, "messages": messages},
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    with serving(engine) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        with http.stream("POST", COMPLETIONS, json=HELD | {"stream": True}):
            for path, body in generating.items():
                answer = http.post(path, json=body)
                assert (path, answer.status_code, answer.headers.get("retry-after")) == (path, 503, "1")
            for path, body in counting.items():
                assert (path, http.post(path, json=body).status_code) == (path, 200)
        wait_until(lambda: counted(service) == (0, 0))


FREE = {
    *(("GET", path) for path in ("/", "/live", "/ready", "/health", "/ping", "/version", "/openapi.json", "/metrics")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name:path}", "/api/tags", "/api/ps", "/api/version")),
    *(("GET", path) for path in ("/dashboard", "/dashboard/data", "/v1/requests/{name:path}/explain")),
    *(("POST", "/api/pull"), ("DELETE", "/api/delete")),  # refused at once
    ("POST", "/close_session"),
    *(("GET", "/v1/sequences"), ("PATCH", "/v1/sequences/{id}"), ("DELETE", "/v1/sequences/{id}")),
    *(("GET", "/v1/files"), ("GET", "/v1/files/{id}"), ("DELETE", "/v1/files/{id}")),
    *(("GET", "/v1/batches"), ("GET", "/v1/batches/{id}"), ("POST", "/v1/batches/{id}/cancel")),
}
"""Routes that count towards no limit: they neither tokenize nor compute nor store, and some end what a tenant at its limit waits for."""


@pytest.mark.parametrize("limit", ["max_requests", "max_queued"])
def test_every_route_counts_towards_a_tenants_limits_unless_it_is_known_to_be_free(limit, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nkey = "a"\n{limit} = 1\n[bob]\nkey = "b"\n')
    engine = ScriptedEngine()
    ways = {(method, route.path) for route in routes() for method in route.methods - {"HEAD"}}
    assert ways >= FREE, "each free route exists"
    with (
        serving(engine, api_key_file=str(keys), data_dir=str(tmp_path / "data")) as (base, service),
        httpx.Client(base_url=base, timeout=30, headers={"x-api-key": "a"}) as http,
    ):
        with http.stream("POST", COMPLETIONS, json=HELD | {"stream": True}):
            refused = {way for way in sorted(ways) if http.request(way[0], path_of(way[1]), json={}).status_code == 429}
            assert ways - refused == FREE
            others = {
                way for way in sorted(ways) if http.request(way[0], path_of(way[1]), json={}, headers={"x-api-key": "b"}).status_code == 429
            }
            assert others == set()
        wait_until(lambda: counted(service) == (0, 0))


def path_of(route):
    return route.replace("{id}", "x").replace("{name:path}", "x")


def test_a_tenant_at_its_limit_may_not_tokenize_beside(engine, tmp_path, monkeypatch):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\nmax_requests = 2\n')
    tokenizing, done = [], threading.Event()

    async def encode(model, request, text, **options):
        tokenizing.append(text)
        await asyncio.to_thread(done.wait)
        return [97]

    monkeypatch.setattr(ServedModel, "encode", encode)

    async def burst(base):
        async with httpx.AsyncClient(base_url=base, timeout=30, headers={"x-api-key": "a"}) as client:
            requested = [asyncio.create_task(client.post("/tokenize", json={"prompt": "hi"})) for _ in range(6)]
            while sum(one.done() for one in requested) < 4:
                await asyncio.sleep(0.01)
            done.set()
            return sorted([answer.status_code for answer in await asyncio.gather(*requested)])

    with serving(engine, api_key_file=str(keys)) as (base, service):
        assert asyncio.run(burst(base)) == [200, 200, 429, 429, 429, 429]
        assert tokenizing == ["hi", "hi"]
        wait_until(lambda: counted(service) == (0, 0))


def test_a_prompt_that_no_tokens_could_make_fit_is_not_tokenized(engine):
    engine.tokenizer.encode = None
    with serving(engine) as (base, _), httpx.Client(base_url=base, timeout=30) as http:
        error = http.post(COMPLETIONS, json={"prompt": "a" * 9000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "9000 characters, which are at least 2250 tokens" in error["message"]


def test_what_runs_does_not_wait(engine):
    with serving(engine) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        streams = [http.stream("POST", COMPLETIONS, json={"prompt": "paused", "max_tokens": 999, "stream": True}) for _ in range(6)]
        for stream in streams:
            stream.__enter__()
        wait_until(lambda: counted(service) == (0, 6))
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: counted(service) == (0, 0))


def test_every_prompt_of_a_request_waits(engine):
    with serving(engine) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        refused = http.post(COMPLETIONS, json=HELD | {"prompt": ["held"] * 5})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            400,
            "5 prompts in one request, at most 4 may wait: send fewer",
        )
        wait_until(lambda: counted(service) == (0, 0))
        with http.stream("POST", COMPLETIONS, json=HELD | {"prompt": ["held"] * 4, "stream": True}) as stream:
            assert counted(service) == (4, 1)
            assert http.post(COMPLETIONS, json=HELD).status_code == 503
            engine.released = True
            stream.read()
        wait_until(lambda: counted(service) == (0, 0))
        assert engine.started == 4


ENDS = {
    "served": (HELD, 200),
    "no json": (b"{", 400),
    "a wrong field": (HELD | {"temperature": "hot"}, 400),
    "too long a prompt": (HELD | {"prompt": "a" * 9000}, 400),
    "refused by the engine": (HELD | {"prompt": "full"}, 503),
    "failed": (HELD | {"prompt": "boom", "max_tokens": 5}, 500),
    "a bug": (HELD | {"prompt": "bug", "max_tokens": 5}, 500),
    "late": (HELD | {"prompt": "late", "max_tokens": 5}, 504),
    "no such model": (HELD | {"model": "x"}, 404),
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_given_back_once_whatever_happens(engine, stream):
    engine.released = True
    with serving(engine) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        for body, status in ENDS.values():
            content = body if isinstance(body, bytes) else json.dumps(body | {"stream": stream})
            answer = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert answer.status_code in (status, 200 if stream else status)
            wait_until(lambda: counted(service) == (0, 0))


def test_a_tenant_has_limits_of_its_own():
    admission = Admission(3, Stats)
    alice, bob = Tenant("alice", max_queued=1, max_requests=2), Tenant("bob")
    first, second, third = (admission.ticket(alice) for _ in range(3))
    first.admit()
    assert refusal(second) == (429, "tenant alice has 1 requests waiting, its limit: try again later")
    first.started()
    second.admit()
    second.started()
    assert refusal(third) == (429, "tenant alice has 2 requests in flight, its limit: wait for one to end")
    others = [admission.ticket(bob) for _ in range(3)]
    for one in others:
        one.admit()
    assert refusal(admission.ticket(bob)) == (503, "3 requests are waiting, the limit is 3 (--max-num-queued-reqs)")
    first.release()
    assert refusal(third)[0] == 503  # now the server is full
    others[0].release()
    third.admit()
    for one in (second, third, *others):
        one.release()
        one.release()
    assert (admission.waiting, admission.open) == (0, 0)


def test_the_prompts_of_a_request_that_is_not_queued_take_no_place():
    admission = Admission(1, Stats)
    place = admission.ticket(Tenant("alice"))
    place.admit(queued=False)
    place.add_prompts(3)
    assert (admission.waiting, admission.open) == (0, 1)
    place.started()
    assert (admission.waiting, admission.open) == (0, 1)
    place.release()
    assert (admission.waiting, admission.open) == (0, 0)


def test_prompts_that_never_may_wait_are_not_told_to_come_back():
    admission = Admission(4, Stats)
    for tenant, prompts, most in ((Tenant("alice", max_queued=2), 3, 2), (Tenant("bob"), 5, 4)):
        place = admission.ticket(tenant)
        place.admit()
        with pytest.raises(ApiError, match=f"{prompts} prompts in one request, at most {most} may wait") as caught:
            place.add_prompts(prompts)
        assert caught.value.status == 400
        place.add_prompts(most)
        place.release()
    first, second = admission.ticket(tenant), admission.ticket(tenant)
    first.admit()
    second.admit()
    with pytest.raises(ApiError) as caught:
        second.add_prompts(4)
    assert caught.value.status == 503, "it may, when the other has begun"


def refusal(place):
    with pytest.raises(ApiError) as caught:
        place.admit()
    assert int(caught.value.headers["retry-after"]) >= 1
    kinds = {429: ("rate_limit_error", "rate_limit_exceeded"), 503: ("server_error", "queue_full")}
    error = caught.value.envelope["error"]
    assert (error["type"], error["code"]) == kinds[caught.value.status]
    return caught.value.status, error["message"]


@pytest.mark.parametrize(
    ("stats", "seconds"),
    [
        ({}, 1),
        ({"predicted_wait_us": 2_500_000, "waiting": 4}, 3),
        ({"predicted_wait_us": 2_500_000, "waiting": 9}, 3),
        # Four are waiting, and the engine spoke when there was one.
        ({"predicted_wait_us": 2_500_000, "waiting": 1}, 7),
    ],
)
def test_when_to_come_back_is_what_the_engine_predicts(stats, seconds):
    admission = Admission(4, lambda: Stats(**stats))
    for _ in range(4):
        admission.ticket(Tenant()).admit()
    with pytest.raises(ApiError) as caught:
        admission.ticket(Tenant()).admit()
    assert caught.value.headers["retry-after"] == str(seconds)


def test_when_a_tenant_may_come_back_is_how_long_its_requests_take(monkeypatch):
    clock = iter([0.0, 12.0, 20.0, 20.0]).__next__
    monkeypatch.setattr("chairlift.server.admission.time.monotonic", clock)
    admission = Admission(None, Stats)
    alice = Tenant("alice", max_requests=2)
    first, second, third, fourth = (admission.ticket(alice) for _ in range(4))
    first.admit()
    first.release()
    second.admit()
    third.admit()
    with pytest.raises(ApiError) as caught:
        fourth.admit()
    assert caught.value.headers["retry-after"] == "6"


def test_limits_come_with_the_key(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\nmax_requests = 1\n[bob]\nkey = "b"\n')
    engine = ScriptedEngine()
    with serving(engine, api_key_file=str(keys)) as (base, service), httpx.Client(base_url=base, timeout=30) as http:

        def ask(key, **more):
            return http.post(COMPLETIONS, json=HELD | more, headers={"x-api-key": key})

        with http.stream("POST", COMPLETIONS, json=HELD | {"stream": True}, headers={"x-api-key": "a"}):
            answer = ask("a")
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert ask("b", prompt="b").status_code == 200
        wait_until(lambda: service.admission.open == 0)
        assert ask("a", prompt="a").status_code == 200
