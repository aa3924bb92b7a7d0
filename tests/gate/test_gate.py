"""The gate passes requests on unchanged, when it is their turn."""

import concurrent.futures
import json
import random
import threading
import time

import httpx
import pytest
from client_bodies import Sent, client_bodies
from confused_bodies import confused_bodies
from gate_here import with_gate
from raw_connection import connected
from server_here import wait_until
from upstream import Upstream, gate

from chairlift.engine.client import AsyncEngine

pytestmark = pytest.mark.slow


def chat(content, **fields):
    return {"messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture(scope="module")
def upstream():
    server = Upstream()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def base(upstream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    flags = {"max_num_seqs": "2", "scheduling_policy": "fair", "usage_log": str(folder / "usage")}
    with gate(upstream, log=folder / "log", **flags) as address:
        yield address
    assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(autouse=True)
def fresh(upstream):
    wait_until(lambda: upstream.running == 0)  # requests of the test before
    upstream.requests.clear()
    upstream.started.clear()
    upstream.cancelled.clear()
    upstream.most = 0
    while upstream.go.acquire(blocking=False):
        pass


OWN = {"date", "x-request-id", "request-id", "x-upstream-request-id", "connection"}


def answer_of(response):
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in OWN]
    return response.status_code, sorted(headers), response.read()


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("POST", "/v1/chat/completions", {"json": chat("hello", unknown={"deep": [1, None]})}),
        ("POST", "/v1/chat/completions", {"json": chat("hello", stream=True)}),
        ("POST", "/v1/chat/completions", {"json": chat("refuse")}),
        ("POST", "/v1/chat/completions", {"json": chat("hello", priority=10**30)}),
        ("POST", "/v1/completions", {"content": b"this is no JSON \xff"}),
        (
            "POST",
            "/v1/audio/transcriptions",
            {"content": bytes(range(256)), "headers": {"content-type": "multipart/form-data; boundary=x"}},
        ),
        ("POST", "/v1/audio/transcriptions", {"content": bytes(3 << 20)}),
        ("HEAD", "/v1/other", {}),
        ("OPTIONS", "/v1/other", {}),
        ("GET", "/v1/unknown%2Fpath/?a=1&a=%20b", {}),
        ("GET", "/v1/[a]|{}%zz?a=[1]&b=%zz&c='+%C3%A9&d=;,/?:@&e", {}),
        ("GET", "/v1/other", {"headers": [(b"x-name", "caf\u00e9".encode())]}),
        ("PATCH", "/v1/other", {"json": {"a": 1}}),
        ("GET", "/gzip", {"headers": {"accept-encoding": "gzip"}}),
        ("GET", "/redirect", {}),
        ("GET", "/v1/models", {}),
    ],
)
def test_the_answer_is_the_one_without_the_gate(upstream, base, method, path, arguments):
    def answer(address):
        with httpx.Client() as client:
            return answer_of(client.send(client.build_request(method, address + path, **arguments)))

    direct, through = answer(upstream.url), answer(base)
    assert through == direct
    if len(upstream.requests) == 2:
        first, second = upstream.requests
        assert first[:2] == second[:2]
        assert first[3] == second[3]
        changed = {"x-request-id", "x-chairlift-gate", "host", "connection"}
        headers = [{name: value for name, value in one[2].items() if name not in changed} for one in (first, second)]
        assert headers[0] == headers[1]


def many_bodies():
    """Two hundred: those of clients, and of the rest some in which a field has a wrong value. The gate itself refuses deadlines."""
    confused = [one for one in confused_bodies() if b"deadline_ms" not in one.body and len(one.body) < 10_000]
    mine = list(client_bodies())
    others = random.Random(48).sample(confused, 200 - len(mine))
    return mine + [Sent(one.path, one.body, {"content-type": "application/json"}) for one in others]


def test_two_hundred_bodies_and_their_answers_are_the_ones_without_the_gate(upstream, base):
    with httpx.Client() as direct, httpx.Client() as through:
        for path, body, headers in many_bodies():
            upstream.requests.clear()
            answers = [
                answer_of(client.send(client.build_request("POST", address + path, content=body, headers=headers)))
                for client, address in ((direct, upstream.url), (through, base))
            ]
            assert answers[0] == answers[1], (path, body[:500])
            assert [one[1] for one in upstream.requests] == [path] * 2
            assert [one[3] for one in upstream.requests] == [body] * 2
            assert [one[2].get("content-type") for one in upstream.requests] == [headers["content-type"]] * 2


def status_of(base, target, body=b"", *headers):
    """Sends a target as it is, which clients would normalize. Returns the final status: leaving after 100 would cancel the request."""
    head = [f"POST {target} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(body)}", *headers]
    with connected(base) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        lines = connection.makefile("rb")
        statuses = (int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1 "))
        return next(status for status in statuses if status != 100)


def test_no_path_names_another_server(upstream, base):
    other = Upstream()
    other.start()
    assert status_of(base, f"%2F@{other.url.removeprefix('http://')}/secret") == 400
    assert not other.requests
    other.stop()
    assert not upstream.requests


@pytest.mark.parametrize("up", ["..", "%2e%2e"])
def test_a_path_stays_as_it_is(upstream, base, up):
    # Shortened, it would be that of a chat which has not waited for its turn.
    assert status_of(base, f"/v1/x/{up}/chat/completions", json.dumps(chat("hello")).encode()) == 207
    assert not upstream.started


@pytest.mark.parametrize(
    ("target", "waits"),
    [
        ("/v1/chat/completions", True),
        ("//v1//chat/completions", True),
        ("/v1/./chat/completions", True),
        ("/v1/x/../chat/completions", True),
        ("/v1/x/%2e%2e/chat/completions", True),
        ("/v1/chat%2Fcompletions/", True),
        ("/../v1/chat/completions?x=/y", True),
        ("/v1/chat/completions/batch", True),
        ("/v1/x/chat/completions", False),
    ],
)
def test_a_path_that_a_proxy_may_read_as_one_that_generates_waits_for_its_turn(base, target, waits):
    name = f"turn-{abs(hash(target))}"
    assert status_of(base, target, json.dumps(chat("hello")).encode(), f"X-Request-Id: {name}") in (200, 207)
    assert httpx.get(f"{base}/v1/requests/{name}/explain").status_code == (200 if waits else 404)


def test_the_upstream_is_not_asked_whether_it_expects_the_body(upstream, base):
    assert status_of(base, "/v1/other", b"body", "Expect: 100-continue") == 207
    wait_until(lambda: upstream.requests)
    assert "expect" not in upstream.requests[0][2]


def test_an_answer_after_the_deadline_still_passes(upstream, base):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, base + "/v1/chat/completions", json=chat("wait", deadline_ms=200), timeout=60)
        time.sleep(0.5)
        upstream.go.release()
        assert answer.result().status_code == 200  # `base` looks for errors in the log


def waiting(base, state="waiting"):
    """Requests in the gate's queue, or in another state."""
    page = httpx.get(base + "/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"chairlift_num_requests_{state}{{"))


def test_no_more_run_at_a_time_than_there_are_slots_and_tenants_share_them(upstream, base):
    def send(tenant, content):
        return httpx.post(base + "/v1/chat/completions", json=chat(content), headers={"x-tenant-id": tenant}, timeout=60)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        flood = [pool.submit(send, "flood", f"wait flood {index}") for index in range(8)]
        wait_until(lambda: len(upstream.started) == 2 and waiting(base) == 6)
        honest = pool.submit(send, "honest", "wait honest")
        wait_until(lambda: waiting(base) == 7)
        for _ in range(9):
            upstream.go.release()
        assert all(one.result().status_code == 200 for one in [*flood, honest])
    assert upstream.most == 2
    # Its tenant had nothing, so it goes before all of the flood that still waits.
    assert "wait honest" in upstream.started[2:4]


def test_each_answer_takes_a_slot(upstream, base):
    def send(content, **fields):
        return httpx.post(base + "/v1/chat/completions", json=chat(content, **fields), timeout=60)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        wait_until(lambda: waiting(base, "running") == 0)  # the gate's figure may still be that of the test before
        two = pool.submit(send, "wait two", n=2)
        wait_until(lambda: waiting(base, "running") == 2)
        one = pool.submit(send, "wait one")
        wait_until(lambda: waiting(base) == 1)
        assert upstream.started == ["wait two"]
        upstream.go.release()
        assert two.result().status_code == 200
        upstream.go.release()
        assert one.result().status_code == 200


def test_a_client_that_leaves_cancels_the_request_at_the_upstream(upstream, base):
    with (
        httpx.Client() as client,
        client.stream("POST", base + "/v1/chat/completions", json=chat("wait for ever", stream=True)) as response,
    ):
        next(response.iter_bytes())
    wait_until(lambda: upstream.cancelled == ["wait for ever"])
    assert httpx.post(base + "/v1/chat/completions", json=chat("hello")).status_code == 200


def test_a_stream_that_breaks_off_ends_with_an_error(base):
    response = httpx.post(base + "/v1/chat/completions", json=chat("break", stream=True))
    last = [line for line in response.text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_failed"


def test_an_answer_that_breaks_off_breaks_off(base):
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(base + "/v1/chat/completions", json=chat("cut"))  # `base` looks for errors in the log


def test_explain_and_the_usage_log_know_the_request(upstream, base, tmp_path_factory):
    headers = {"x-request-id": "mine", "x-tenant-id": "me", "x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    response = httpx.post(base + "/v1/chat/completions", json=chat("hello"), headers=headers)
    assert response.headers["x-request-id"] == "mine"
    explained = httpx.get(base + "/v1/requests/mine/explain", headers={"x-tenant-id": "me"}).json()
    assert explained["sequences"][0]["finish"] == "stop"
    folder = next(path for path in tmp_path_factory.getbasetemp().glob("gate*/usage"))
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    record = next(line for line in lines if line["request_id"] == "mine")
    assert (record["tenant"], record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == ("me", 7, 2, 3)
    assert record["session"] == "s/a"


def test_a_turn_that_misses_the_upstreams_cache_is_explained(base):
    history = []
    for content in ("long first", "long second"):
        history.append({"role": "user", "content": content})
        headers = {"x-request-id": content.replace(" ", "-"), "x-session-id": "misses"}
        assert httpx.post(base + "/v1/chat/completions", json={"messages": history}, headers=headers).status_code == 200
        history.append({"role": "assistant", "content": "An answer."})
    first, second = (httpx.get(f"{base}/v1/requests/long-{name}/explain").json() for name in ("first", "second"))
    assert "cache_miss" not in first
    assert (second["cache_miss"]["reason"], second["cache_miss"]["missed_tokens"]) == ("upstream_missed", 2000)
    assert 'reason="upstream_missed"} 2000.0' in httpx.get(base + "/metrics").text


def test_a_session_that_is_closed_is_closed_here_too(upstream, base):
    for name in ("third", "fourth"):  # which would have missed what the third left
        headers = {"x-request-id": f"long-{name}", "x-session-id": "closed"}
        assert httpx.post(base + "/v1/chat/completions", json=chat(f"long {name}"), headers=headers).status_code == 200
        closed = httpx.post(base + "/close_session", json={"session_id": "closed"})
        assert closed.content == b"echo " + closed.request.content
    history = [chat("long third")["messages"][0], chat("long fourth")["messages"][0]]
    assert [one[1] for one in upstream.requests].count("/close_session") == 2
    headers = {"x-request-id": "long-fifth", "x-session-id": "closed"}
    httpx.post(base + "/v1/chat/completions", json={"messages": history}, headers=headers)
    assert "cache_miss" not in httpx.get(base + "/v1/requests/long-fifth/explain").json()


def test_a_request_that_the_upstream_refuses_has_no_record(base, tmp_path_factory):
    def records(request_id):
        folder = next(path for path in tmp_path_factory.getbasetemp().glob("gate*/usage"))
        return sum(f'"{request_id}"' in line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines())

    def rejected():
        lines = httpx.get(base + "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'reason="upstream"' in line)

    before = rejected()
    headers = {"x-request-id": "refused"}
    assert httpx.post(base + "/v1/chat/completions", json=chat("refuse"), headers=headers).status_code == 418
    wait_until(lambda: rejected() == before + 1)
    assert httpx.post(base + "/v1/chat/completions", json=chat("hello"), headers={"x-request-id": "answered"}).status_code == 200
    wait_until(lambda: records("answered"))  # it is written after the answer is sent
    assert (records("refused"), records("answered")) == (0, 1)


def test_the_time_to_the_first_token_begins_before_the_head_of_the_answer(base):
    def total():
        lines = httpx.get(base + "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("chairlift_time_to_first_token_seconds_sum"))

    before = total()
    httpx.post(base + "/v1/chat/completions", json=chat("late", stream=True))
    # What happened is recorded after the last event is sent.
    wait_until(lambda: total() - before >= 0.3)


def test_keys_stay_where_they_belong_and_a_gate_may_stand_before_another(upstream):
    def test(address):
        upstream.requests.clear()
        assert httpx.post(address + "/v1/chat/completions", json=chat("hello")).status_code == 401
        assert not upstream.requests
        headers = {"authorization": "Bearer of-the-gate", "x-chairlift-gate": "another"}
        response = httpx.post(address + "/v1/chat/completions", json=chat("hello"), headers=headers)
        assert response.status_code == 200
        assert "of-the-upstream" not in str(response.headers) + response.text

    with_gate(upstream.url, test=test, api_key="of-the-gate", upstream_api_key="of-the-upstream")
    assert upstream.requests[0][2]["authorization"] == "Bearer of-the-upstream"
    assert "of-the-gate" not in str(upstream.requests[0])


def test_prompts_wait_for_room_in_the_upstreams_kv(upstream, monkeypatch):
    frames = threading.Semaphore(0)
    tell = AsyncEngine.tell

    def note(engine, frame):
        tell(engine, frame)
        frames.release()

    monkeypatch.setattr(AsyncEngine, "tell", note)

    def test(address):
        assert frames.acquire(timeout=20)  # the engine knows of the KV, for 8192 tokens
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            fill(address, pool)

    def fill(address, pool):
        def send(content, **headers):
            return pool.submit(httpx.post, address + "/v1/chat/completions", json=chat(content), headers=headers, timeout=60)

        # By our count the first is larger than the KV, but it runs until its answer has ended.
        first = send("wait this " + "this" * 9000, **{"x-session-id": "first"})
        wait_until(lambda: upstream.started)
        # A client may rather be told that other sessions have their turn.
        refused = send("wait there " + "there" * 5000, **{"x-session-id": "second", "prefer": "wait=0"}).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "session_wait")
        assert int(refused.headers["retry-after"]) > 0
        second = send("wait that " + "that" * 7000)
        time.sleep(2)  # several steps, by the first estimate
        assert len(upstream.started) == 1
        upstream.go.release()
        upstream.go.release()
        assert first.result().status_code == second.result().status_code == 200

    with_gate(upstream.url, test=test)


def test_a_tenants_key_reaches_only_what_serves_its_own_requests(upstream):
    alice, operator = ({"authorization": f"Bearer {key}"} for key in ("of-alice", "of-the-operator"))

    def test(address):
        upstream.requests.clear()
        for path in (
            "/slots",
            "/sleep",
            "/v1/files",
            "/v1/load_lora_adapter",
            "/abort_request",
            "/v1/x/../../flush_cache",
            "/v1/%2e%2e/sleep",
        ):
            assert status_of(address, path, b"{}", "Authorization: Bearer of-alice") == 403
        assert not upstream.requests
        for path in ("/slots", "/v1/files"):
            assert httpx.post(address + path, headers=operator).status_code == 207
        for path in ("/v1/models", "/v1/models/m", "/v1/audio/transcriptions", "/tokenize", "/v1/embeddings"):
            assert httpx.post(address + path, headers=alice).status_code in (207, 405)
        assert httpx.post(address + "/v1/chat/completions", json=chat("hello"), headers=alice).status_code == 200
        refused = httpx.get(address + "/slots", headers=alice).json()
        assert refused["error"]["code"] == "operator_only"
        assert "--operator-key" in refused["error"]["message"]

    with_gate(upstream.url, test=test, api_key="alice=of-alice", operator_key="of-the-operator")
