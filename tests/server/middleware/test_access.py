import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, wait_until

import chairlift

KEY = "sk-schlüssel"


@pytest.fixture(scope="module")
def locked():
    with serving(ScriptedEngine(), KEY) as (base, _), httpx.Client(base_url=base) as client:
        yield client


BAD_KEYS = [b"", b"Bearer nope", b"Bearer " + KEY.encode()[:-1], b"Bearer \xe9\xff", b"Basic c2s6", b"Bearer", b"Bearer " + b"k" * 16384]


@pytest.mark.parametrize("given", BAD_KEYS, ids=lambda value: f"{value!r:.24}")
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/", "/metrics/", "/V1/models", "/nothing", "/health/x"])
def test_without_the_key_every_other_route_is_closed(locked, path, given):
    response = locked.get(path, headers=[(b"authorization", given), (b"x-forwarded-for", b"127.0.0.1")])
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_key_opens(locked):
    assert locked.get("/v1/models", headers=[(b"authorization", b"Bearer " + KEY.encode())]).status_code == 200


@pytest.mark.parametrize("given", [None, *BAD_KEYS], ids=lambda value: f"{value!r:.24}")
@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping", "/ready/"])
def test_probes_need_no_key(locked, path, given):
    assert locked.get(path, headers=[] if given is None else [(b"authorization", given)]).status_code == 200


def test_metrics_without_a_key_by_flag():
    with serving(ScriptedEngine(), KEY, public_metrics=True) as (base, _), httpx.Client(base_url=base) as client:
        assert "chairlift_" in client.get("/metrics").text
        assert client.get("/metrics/").status_code == 200
        assert [client.get(path).status_code for path in ("/v1/models", "/dashboard/data", "/version")] == [401] * 3
    # Without keys the flag opens nothing: a web page of somebody else's is still kept out.
    with serving(ScriptedEngine(), public_metrics=True) as (base, _):
        assert httpx.get(f"{base}/metrics", headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(f"{base}/metrics").status_code == 200


def test_a_wrong_key_is_told_from_none(locked):
    reported = [locked.get("/v1/models", headers=headers).json()["error"]["message"] for headers in ({}, {"authorization": "Bearer nope"})]
    assert [message.partition(":")[0] for message in reported] == ["No API key provided", "Incorrect API key provided"]


def test_anthropics_clients_get_its_envelope_where_they_share_a_route(locked, http):
    wrong = {"anthropic-version": "2023-06-01", "x-api-key": "nope"}
    refused = locked.get("/v1/models", headers=wrong)
    assert (refused.status_code, refused.json()["type"], refused.json()["error"]["type"]) == (401, "error", "authentication_error")
    assert refused.headers["request-id"] == refused.headers["x-request-id"] == refused.json()["request_id"]
    assert locked.get("/v1/files/x", headers=wrong).json()["type"] == "error"
    for other in (locked.get("/v1/models", headers={"x-api-key": "nope"}), http.post("/v1/chat/completions", headers=wrong)):
        assert (other.json().keys(), "request-id" in other.headers) == ({"error"}, False)


def test_two_keys_are_none(locked):
    good, bad = (b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer nope")
    assert locked.get("/v1/models", headers=[bad, good]).status_code == 401
    assert locked.get("/v1/models", headers=[good, bad]).status_code == 401


def test_a_key_says_whose_request_it_is():
    engine = ScriptedEngine()
    with serving(engine, "alice=sk-1,bob=sk-2,sk-3") as (base, _), httpx.Client(base_url=base) as client:

        def ask(key, **headers):
            headers |= {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code

        assert [ask(key) for key in ("sk-1", "sk-2", "sk-3", "alice=sk-1", "alice", "sk-4")] == [200, 200, 200, 401, 401, 401]
        assert ask("sk-2", **{"x-tenant-id": "alice"}) == 200
        assert ask("sk-3", **{"x-tenant-id": "carol"}) == 200
    assert [one.tenant for one in engine.scheduled] == ["alice", "bob", "", "bob", "carol"]


def bearer(key, tenant=None):
    return {"authorization": f"Bearer {key}"} | ({} if tenant is None else {"x-tenant-id": tenant})


def test_an_unnamed_key_beside_named_ones_may_not_name_their_tenants():
    engine = ScriptedEngine()
    with serving(engine, "alice=sk-1,sk-2", operator_key="sk-3") as (base, _), httpx.Client(base_url=base) as client:
        body = {"prompt": "a", "max_tokens": 1}
        opened = client.post("/v1/sequences", json={"prompt": "a"}, headers=bearer("sk-1")).json()
        assert client.post("/v1/completions", json=body, headers=bearer("sk-1") | {"x-request-id": "hers"}).status_code == 200
        engine.scheduled.clear()
        for headers in (bearer("sk-2"), bearer("sk-2", "alice"), bearer("sk-2", "carol")):
            assert client.get("/v1/sequences", headers=headers).json()["data"] == []
            for method, path in (("GET", f"/v1/sequences/{opened['id']}"), ("GET", "/v1/requests/hers/explain")):
                assert client.request(method, path, headers=headers).status_code == 404
            assert client.delete(f"/v1/sequences/{opened['id']}", headers=headers).status_code == 404
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert client.get(f"/v1/sequences/{opened['id']}", headers=bearer("sk-3", "alice")).status_code == 200, (
            "the operator may act for alice"
        )
        assert client.post("/v1/completions", json=body, headers=bearer("sk-3", "alice")).status_code == 200
    assert [one.tenant for one in engine.scheduled] == ["", "", "carol", "alice"]


def test_the_owner_of_a_server_is_its_operator_and_a_tenant_is_not():
    """Without keys or with unnamed keys only, a request without X-Tenant-Id is the operator's."""

    def sees_all(client, **headers):
        return "chairlift_num_requests_running" in client.get("/metrics", headers=headers).text

    with serving(ScriptedEngine()) as (base, _), httpx.Client(base_url=base) as client:
        assert (sees_all(client), sees_all(client, **{"x-tenant-id": "bob"})) == (True, False)
    for keys in ("sk-1", "sk-1,sk-2"):
        with serving(ScriptedEngine(), keys) as (base, _), httpx.Client(base_url=base) as client:
            assert (sees_all(client, **bearer("sk-1")), sees_all(client, **bearer("sk-1", "bob"))) == (True, False)
    with serving(ScriptedEngine(), "sk-1", operator_key="sk-2") as (base, _), httpx.Client(base_url=base) as client:
        assert (sees_all(client, **bearer("sk-1")), sees_all(client, **bearer("sk-2")), sees_all(client, **bearer("sk-2", "bob"))) == (
            False,
            True,
            False,
        )
    with serving(ScriptedEngine(), "bob=sk-1,sk-2") as (base, _), httpx.Client(base_url=base) as client:
        assert (sees_all(client, **bearer("sk-1")), sees_all(client, **bearer("sk-2"))) == (False, False)
    with serving(ScriptedEngine(), "bob=sk-1", public_metrics=True) as (base, _), httpx.Client(base_url=base) as client:
        assert sees_all(client)


@pytest.mark.parametrize("name", ["none", "other", "another"])
def test_no_request_takes_a_name_that_stands_for_several_tenants(http, name):
    assert http.get("/v1/models", headers={"x-tenant-id": name}).status_code == 400


def test_a_key_may_come_as_anthropic_sends_it(locked):
    key = KEY.encode()
    good, bad, bearer = (b"x-api-key", key), (b"x-api-key", b"nope"), (b"authorization", b"Bearer " + key)
    sent = [[good], [good, bearer], [bad], [bad, bearer], [good, bad]]
    assert [locked.get("/v1/models", headers=headers).status_code for headers in sent] == [200, 200, 401, 401, 401]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST:8000"}, 200),
        ({"host": "127.0.0.2"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "app.localhost:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "[fe80::1]"}, 403),
        ({"host": "192.168.0.1"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, 403),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "null"}, 403),
    ],
)
def test_no_web_page_of_others_reaches_a_server_without_a_key(http, locked, headers, status):
    """Not by a name of its own for this machine's address either."""
    answer = http.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] in ("foreign_host", "foreign_origin")
    # A key is proof enough.
    assert locked.get("/v1/models", headers=headers | {"x-api-key": KEY.encode()}).status_code == 200
    assert [http.get(path, headers=headers).status_code for path in ("/live", "/ready", "/health")] == [200] * 3


def test_a_server_for_the_network_answers_to_any_name():
    with serving(ScriptedEngine(), host="0.0.0.0") as (base, _):
        assert httpx.get(f"{base}/v1/models", headers={"host": "llm.example"}).status_code == 200


PAGE = "https://chat.example"
ASKED = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@pytest.mark.parametrize("allowed", [(PAGE, "http://localhost:3000"), ("*",)])
def test_web_pages_that_are_allowed(allowed):
    with serving(ScriptedEngine(), "sk-1", cors_allow_origins=allowed) as (base, _), httpx.Client(base_url=base) as http:
        leave = http.options("/v1/completions", headers=ASKED)  # browsers send no key with this
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in leave.headers["access-control-allow-headers"]
        answer = http.get("/v1/models", headers={"origin": PAGE, "x-api-key": "sk-1"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"] in (PAGE, "*")) == (200, True)
        readable = set(answer.headers["access-control-expose-headers"].split(", "))
        assert readable >= {"x-request-id", "request-id", "retry-after", "x-chairlift-expected-wait"}
        closed = http.get("/v1/models", headers={"origin": PAGE})
        assert (closed.status_code, "access-control-allow-origin" in closed.headers) == (401, True)
        other = http.get("/v1/models", headers={"origin": "https://evil.example", "x-api-key": "sk-1"})
        assert ("access-control-allow-origin" in other.headers) == (allowed == ("*",))


def test_allowed_web_pages_reach_a_private_network():
    asked = {**ASKED, "access-control-request-private-network": "true"}
    with serving(ScriptedEngine(), cors_allow_origins=(PAGE,)) as (base, _), httpx.Client(base_url=base) as http:
        leave = http.options("/v1/completions", headers=asked)
        names = ("access-control-allow-origin", "access-control-allow-private-network")
        assert (leave.status_code, *(leave.headers[name] for name in names)) == (200, PAGE, "true")
        other = http.options("/v1/completions", headers=asked | {"origin": "https://evil.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        assert "access-control-allow-private-network" not in http.options("/v1/completions", headers=ASKED).headers


def test_web_pages_that_are_allowed_need_no_key_where_there_is_none():
    with serving(ScriptedEngine(), cors_allow_origins=(PAGE,)) as (base, _), httpx.Client(base_url=base) as http:
        assert http.get("/v1/models", headers={"origin": PAGE}).status_code == 200
        assert http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        assert http.get("/v1/models", headers={"origin": PAGE, "host": "evil.example"}).status_code == 403


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


def test_the_root_says_what_this_is(http):
    reported = http.get("/").json()
    assert (reported["name"], reported["version"], reported["model"]) == ("chairlift", chairlift.__version__, MODEL)
    assert {"models", "openapi", "health", "ready", "metrics"} <= reported["links"].keys()
    assert [http.get(link).status_code for link in reported["links"].values()] == [200] * len(reported["links"])


@pytest.mark.parametrize("slashes", ["/", "///", "%2F"])
def test_slashes_at_the_end_of_a_path_do_not_matter(http, slashes):
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/live", "/metrics", "/openapi.json", ""):
        assert http.get(path + slashes).status_code == 200
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions" + slashes, json=body).status_code == 200
    assert http.post("/v1/messages" + slashes, json={}).json()["type"] == "error"


def test_slashes_at_the_end_of_the_base_url_of_a_client(base):
    with openai.OpenAI(base_url=f"{base}/v1/", api_key="any", max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL


def test_what_does_not_exist_is_named(http):
    def reported(method, path):
        answer = http.request(method, path)
        return answer.status_code, answer.json()["error"]["message"]

    status, message = reported("POST", "/v1/complet")
    assert status == 404
    assert message.startswith("POST /v1/complet: no such route. GET /openapi.json lists all routes.")
    status, message = reported("GET", "/v1/completions")
    assert (status, message) == (405, "GET /v1/completions: this route takes POST")
    status, message = reported("GET", "/%0a<b>" + "x" * 5000 + "?api_key=sk-1")
    assert status == 404
    assert "\n" not in message
    assert len(message) < 300
    assert "sk-1" not in message


def test_version(http):
    assert http.get("/version").json() == {"version": chairlift.__version__}


def probes(http):
    return [http.get(path).status_code for path in ("/live", "/ready", "/health", "/ping")]


def test_probes_follow_the_engine(http, server, engine):
    assert probes(http) == [200, 200, 200, 200]
    engine.stop()
    assert probes(http) == [200, 503, 503, 503]
    engine.gated = True
    restarting = engine.restart()
    wait_until(lambda: engine.alive)
    assert probes(http) == [200, 503, 503, 503]
    engine.gated = False
    restarting.result()
    server[1].default.lifecycle.ready()
    assert probes(http) == [200, 200, 200, 200]
    server[1].default.lifecycle.drain()
    assert probes(http) == [200, 503, 200, 200]


@pytest.mark.parametrize(("event", "code"), [(None, "not_ready"), ("start_failed", "engine_dead"), ("drain", "shutting_down")])
def test_requests_that_cannot_be_served_now_may_come_back(http, server, event, code):
    server[1].default.lifecycle.__init__()
    if event is not None:
        getattr(server[1].default.lifecycle, event)()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        response = http.post(path, json={"prompt": "a", "messages": []})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == code
        assert int(response.headers["retry-after"]) > 0


def test_an_engine_that_dies_ends_its_requests_with_an_error(base, engine):
    request = {"prompt": "paused", "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=request) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        engine.stop()
        *_, last, _ = lines
    assert '"code":"engine_dead"' in last
