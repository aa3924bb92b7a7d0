import httpx
import pytest
from fake_async_engine import MODEL, FakeEngine, serving

import chairlift
from chairlift.errors import InvalidSetting
from chairlift.server.door import read_keys

KEY = "sk-schlüssel"


@pytest.fixture(scope="module")
def locked():
    with serving(FakeEngine(), KEY) as (base, _), httpx.Client(base_url=base) as client:
        yield client


BAD_KEYS = [b"", b"Bearer nope", b"Bearer " + KEY.encode()[:-1], b"Bearer \xe9\xff", b"Basic c2s6", b"Bearer", b"Bearer " + b"k" * 16384]


@pytest.mark.parametrize("given", BAD_KEYS, ids=lambda value: f"{value!r:.24}")
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/version", "/V1/models", "/nothing"])
def test_without_the_key_every_route_is_closed(locked, path, given):
    response = locked.get(path, headers=[(b"authorization", given), (b"x-forwarded-for", b"127.0.0.1")])
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_key_opens(locked):
    assert locked.get("/v1/models", headers=[(b"authorization", b"Bearer " + KEY.encode())]).status_code == 200
    assert locked.get("/live").status_code == 200


def test_two_keys_are_none(locked):
    good, bad = (b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer nope")
    assert locked.get("/v1/models", headers=[bad, good]).status_code == 401
    assert locked.get("/v1/models", headers=[good, bad]).status_code == 401


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (None, {}),
        ("sk-1", {"sk-1": ""}),
        ("alice=sk-1,bob=sk-2", {"sk-1": "alice", "sk-2": "bob"}),
        ("alice=sk-1,alice=sk-2,sk-3", {"sk-1": "alice", "sk-2": "alice", "sk-3": ""}),
        ("alice=a=b", {"a=b": "alice"}),
        # Base64 ends in signs of equality: a name followed by nothing secret would be an open door.
        ("c2VjcmV0cw==", {"c2VjcmV0cw==": ""}),
        ("c2VjcmV0cyE=", {"c2VjcmV0cyE=": ""}),
    ],
)
def test_keys_may_have_tenants(text, keys):
    assert read_keys(text) == keys


@pytest.mark.parametrize("text", ["", "a,", ",a", "alice=a,,bob=b", "alice=a, bob=b", "alice= a", "alice=a,bob=a"])
def test_keys_that_would_open_too_much(text):
    with pytest.raises(InvalidSetting, match="--api-key: "):
        read_keys(text)


def test_a_key_says_whose_request_it_is():
    engine = FakeEngine()
    with serving(engine, "alice=sk-1,bob=sk-2,sk-3") as (base, _), httpx.Client(base_url=base) as client:

        def ask(key, **headers):
            headers |= {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code

        assert [ask(key) for key in ("sk-1", "sk-2", "sk-3", "alice=sk-1", "alice", "sk-4")] == [200, 200, 200, 401, 401, 401]
        assert ask("sk-2", **{"x-tenant-id": "alice"}) == 200
        assert ask("sk-3", **{"x-tenant-id": "carol"}) == 200
    assert [one.tenant for one in engine.scheduled] == ["alice", "bob", "", "bob", "carol"]


def test_request_ids_come_back_or_are_made(http):
    assert http.get("/live", headers={"x-request-id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    made = [http.get("/v1/nothing", headers={"x-request-id": odd}).headers["x-request-id"] for odd in ('a"<script>', "", "x" * 129)]
    assert len(set(made)) == 3
    assert all(len(one) == 32 for one in made)


def test_no_web_page_of_others_may_read_answers(http):
    response = http.options("/v1/completions", headers={"origin": "https://evil.example", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in response.headers


def test_models(client, http):
    [model] = client.models.list()
    assert model.id == MODEL
    assert model.owned_by == "chairlift"
    assert client.models.retrieve(MODEL) == model
    assert http.get(f"/v1/models/{MODEL}").status_code == 200


def test_version(http):
    assert http.get("/version").json() == {"version": chairlift.__version__}


def probes(http):
    return [http.get(path).status_code for path in ("/live", "/ready", "/health", "/ping")]


def test_probes_follow_the_engine(http, server, engine):
    assert probes(http) == [200, 200, 200, 200]
    server[1].draining = True
    assert probes(http) == [200, 503, 200, 200]
    server[1].draining = False
    engine.ready = False
    assert probes(http) == [200, 503, 503, 503]
    engine.alive = False
    assert probes(http) == [200, 503, 503, 503]


@pytest.mark.parametrize(
    ("alive", "ready", "draining", "code"), [(1, 0, 0, "not_ready"), (0, 0, 0, "engine_dead"), (1, 1, 1, "shutting_down")]
)
def test_requests_that_cannot_be_served_now_may_come_back(http, server, engine, alive, ready, draining, code):
    engine.alive, engine.ready, server[1].draining = bool(alive), bool(ready), bool(draining)
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = http.post(path, json={"prompt": "a", "messages": []})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == code
        assert int(response.headers["retry-after"]) > 0


def test_an_engine_that_dies_ends_its_requests_with_an_error(base, engine):
    request = {"prompt": "slow", "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=request) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        engine.alive = False
        *_, last, _ = lines
    assert '"code":"engine_dead"' in last
