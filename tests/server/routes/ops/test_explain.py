import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from raw_connection import connected
from scripted_engine import ScriptedEngine
from server_here import serving, timeline, wait_until

from chairlift.server import registry
from chairlift.server.observability.explanation import summary_line, summary_text
from chairlift.server.registry import MAX_REFUSALS, Refusal, RequestRegistry


def ask(http, **changes):
    headers = changes.pop("headers", {})
    response = http.post("/v1/completions", json={"prompt": "secret words", "max_tokens": 2, **changes}, headers=headers)
    return response.json()["id"], response.headers["x-request-id"]


def test_a_request_is_explained_by_either_of_its_names(http, engine):
    answer_id, request_id = ask(http)
    engine.timelines[answer_id] = [timeline()]
    body = http.get(f"/v1/requests/{answer_id}/explain").json()
    assert body.keys() == {"id", "object", "summary", "sequences"}
    assert body["summary"] == (
        "Waited 1.50 s: 1.50 s for KV blocks. Computed for 500 ms: 250 ms prompt (5 tokens), 250 ms output (3 tokens). "
        "Ended after 2.00 s (length)."
    )
    assert (body["id"], body["object"]) == (answer_id, "request.explanation")
    [sequence] = body["sequences"]
    assert sequence["states"] == {"wait_blocks": 1.5, "prefill": 0.25, "decode": 0.25}
    assert sequence["summary"] == "2.00 s: 1.50 s waiting for KV blocks, 0.25 s prefill, 0.25 s decode"
    assert (sequence["prompt_tokens"], sequence["finish"], sequence["preempted_by"]) == (5, "length", [])
    assert http.get(f"/v1/requests/{request_id}/explain").json() == body


def test_chats_are_explained_and_ids_may_have_slashes(http):
    request = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 1}
    answered = http.post("/v1/chat/completions", json=request, headers={"x-request-id": "a/b:1"}).json()
    explained = http.get("/v1/requests/a/b:1/explain")
    assert explained.json()["id"] == answered["id"]
    assert "secret" not in explained.text


def test_every_sequence_of_a_request_is_there(http):
    answer_id, _ = ask(http, prompt=["a", "b", "c"], n=2, best_of=4)
    assert len(http.get(f"/v1/requests/{answer_id}/explain").json()["sequences"]) == 12


def test_a_thousand_sequences_of_a_request_are_there(http):
    answer_id, _ = ask(http, prompt=["a"] * 8, n=128, max_tokens=1)
    body = http.get(f"/v1/requests/{answer_id}/explain").json()
    assert len(body["sequences"]) == 1024
    assert body["summary"].startswith("The longest of 1024 sequences")


def test_a_failed_request_is_found_by_the_id_that_it_came_with(http):
    http.post("/v1/completions", json={"prompt": "late"}, headers={"x-request-id": "mine"})
    assert len(http.get("/v1/requests/mine/explain").json()["sequences"]) == 1


@pytest.mark.parametrize("name", ["cmpl-nothing", "..", "x" * 5000])
def test_requests_that_are_not_known(http, name):
    response = http.get(f"/v1/requests/{name}/explain")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == ("not_found" if name == ".." else "request_not_found")
    assert len(response.content) < 500


def test_the_oldest_are_forgotten(http, server, monkeypatch):
    monkeypatch.setattr(registry, "MAX_REQUESTS", 2)
    ids = [ask(http)[0] for _ in range(3)]
    assert [http.get(f"/v1/requests/{one}/explain").status_code for one in ids] == [404, 200, 200]


def test_tenants_see_their_own_requests_only():
    readers = {"alice": "sk-1", "bob": "sk-2", "unnamed": "sk-3", "operator": "sk-4"}
    with serving(ScriptedEngine(), "alice=sk-1,bob=sk-2,sk-3", operator_key="sk-4") as (base, _), httpx.Client(base_url=base) as client:
        keys = {name: {"authorization": f"Bearer {key}"} for name, key in readers.items()}
        for owner in ("alice", "unnamed"):
            names = ask(client, headers=keys[owner])
            for name in names:
                seen = {reader: client.get(f"/v1/requests/{name}/explain", headers=key).status_code for reader, key in keys.items()}
                assert seen == dict.fromkeys(readers, 404) | {owner: 200, "operator": 200}
        refused = {"x-request-id": "refused"}
        client.post("/v1/completions", json={"prompt": 1}, headers=keys["alice"] | refused)
        seen = [client.get("/v1/requests/refused/explain", headers=key).status_code for key in keys.values()]
        assert seen == [200, 404, 404, 200]


def test_a_tenants_requests_are_explained_one_after_the_other():
    class Counting(ScriptedEngine):
        explains, most = 0, 0

        async def explain(self, request_id):
            self.explains += 1
            self.most = max(self.most, self.explains)
            await asyncio.sleep(0.05)
            self.explains -= 1
            return await super().explain(request_id)

    engine = Counting()
    with serving(engine, "alice=sk-1,bob=sk-2") as (base, _), httpx.Client(base_url=base) as client, ThreadPoolExecutor(6) as pool:

        def explain(name):
            return client.get(f"/v1/requests/{name}/explain", headers={"authorization": "Bearer sk-1"}).status_code

        name, _ = ask(client, headers={"authorization": "Bearer sk-1"})
        assert list(pool.map(explain, [name] * 6)) == [200] * 6
    assert engine.most == 1


def test_an_explanation_ends_with_its_client():
    events = []

    async def explain(reader, name):
        events.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    with serving(ScriptedEngine()) as (base, service):
        service.explain = explain
        with connected(base) as client:
            client.sendall(b"GET /v1/requests/a/explain HTTP/1.1\r\nhost: localhost\r\n\r\n")
            wait_until(lambda: events == ["begun"])
        wait_until(lambda: events == ["begun", "cancelled"])


def test_a_tenant_cannot_take_the_names_of_anothers_requests():
    with serving(ScriptedEngine(), "alice=sk-1,bob=sk-2", operator_key="sk-3") as (base, _), httpx.Client(base_url=base) as client:
        alice, bob, operator = ({"authorization": f"Bearer sk-{number}"} for number in (1, 2, 3))
        answer_id, _ = ask(client, headers=alice | {"x-request-id": "mine"})
        taken = [ask(client, headers=bob | {"x-request-id": name})[0] for name in ("mine", answer_id)]
        for reader, name, found in ((alice, "mine", answer_id), (alice, answer_id, answer_id), (bob, "mine", taken[0])):
            assert client.get(f"/v1/requests/{name}/explain", headers=reader).json()["id"] == found
        assert client.get(f"/v1/requests/{answer_id}/explain", headers=operator).json()["id"] == answer_id


def test_a_tenant_is_not_told_which_prompts_others_have_sent():
    """Neither by cached nor by computed tokens, nor by the time that reading the disk took."""
    engine = ScriptedEngine()
    with serving(engine, "alice=sk-1", operator_key="sk-2") as (base, _), httpx.Client(base_url=base) as client:
        answer_id, _ = ask(client, headers={"authorization": "Bearer sk-1"})
        states = {"wait_step": 0.25, "read_cache": 0.5, "decode": 0.25}
        engine.timelines[answer_id] = [timeline(tenant="alice", cached_tokens=4, own_cached_tokens=1, computed_tokens=3, states=states)]
        alice, operator = (
            client.get(f"/v1/requests/{answer_id}/explain", headers={"authorization": f"Bearer {key}"}).json() for key in ("sk-1", "sk-2")
        )
        unanswered = timeline(tenant="alice", cached_tokens=4, own_cached_tokens=1, computed_tokens=3, first_token=None, finish=None)
        engine.timelines[answer_id] = [unanswered]
        early = client.get(f"/v1/requests/{answer_id}/explain", headers={"authorization": "Bearer sk-1"}).json()["sequences"][0]
    assert early["computed_tokens"] == 0, "the first step's tokens would tell where the cached ones end"
    fields = ("cached_tokens", "own_cached_tokens", "computed_tokens", "states")
    assert [alice["sequences"][0][name] for name in fields] == [1, 1, 6, {"wait_step": 0.75, "decode": 0.25}]
    assert [operator["sequences"][0][name] for name in fields] == [4, 1, 3, states]
    assert "disk" not in str(alice)
    assert "disk" in str(operator)


SENTENCES = [
    (
        {
            "states": {"wait_blocks": 1.8, "prefill": 0.16, "prefill_shared": 0.05, "decode": 0.3},
            "preemptions": 1,
            "swaps": 1,
            "preempted_by": (17,),
            "preempted_for": {"kv_blocks": 1},
        },
        "2.31 s: 1.80 s waiting for KV blocks, 0.21 s prefill (0.05 s shared), 0.30 s decode; preempted once for KV blocks "
        "(swapped), for request 17",
    ),
    (
        {"states": {"decode": 0.0042, "decode_shared": 0.0003}, "preemptions": 2, "preempted_by": (3, 4)},
        "4.5 ms: 4.5 ms decode (0.3 ms shared); preempted twice (recomputed), for requests 3 and 4",
    ),
    (
        {"states": {"preempted": 1.0, "recompute": 0.5}, "preemptions": 3, "swaps": 1},
        "1.50 s: 1.00 s preempted, 0.50 s recompute; preempted 3 times (1 of them swapped)",
    ),
    (
        {"states": {"wait_slots": 0.5, "wait_step": 0.05}, "finish": None},
        "0.55 s so far: 0.05 s waiting for the current step, 0.50 s waiting for a batch slot",
    ),
    (
        {"states": {"wait_policy": 2.0}, "finish": "deadline"},
        "2.00 s: 2.00 s waiting for requests that the policy puts first; it missed its deadline",
    ),
    ({"states": {}, "finish": "abort"}, "0 ms; its client disconnected"),
]


@pytest.mark.parametrize(("changes", "reported"), SENTENCES, ids=range(len(SENTENCES)))
def test_a_timeline_in_one_sentence(changes, reported):
    assert summary_line(timeline(**changes)) == reported


def test_preemptors_are_named_by_their_tenants_in_the_sentence_too():
    reported = summary_line(timeline(preemptions=2, preempted_by=(3, 4)), {3: "beta", 4: ""})
    assert reported.endswith("; preempted twice (recomputed), for requests 3 of tenant beta and 4")


PARAGRAPHS = [
    (
        [
            {
                "states": {
                    "wait_blocks": 0.3,
                    "wait_fairness": 0.112,
                    "prefill": 0.04,
                    "prefill_shared": 0.01,
                    "decode": 0.3,
                    "swapped": 0.0,
                },
                "queued_behind": {"x": 3.0, "y": 1.0},
                "served_before": {"arrival": 1, "tier": 11},
                "preemptions": 1,
                "swaps": 1,
                "preempted_by": (17,),
                "preempted_for": {"fairness": 1},
                "cached_tokens": 2,
                "lost_hit_tokens": 3,
                "accepted_draft_tokens": 1,
            }
        ],
        "Waited 412 ms: 300 ms for KV blocks, 112 ms behind tenant x; preempted once by tenant y "
        "for a tenant that has used less of its share (swapped). "
        "12 requests started before it: 11 of a more urgent tier, 1 that arrived earlier. "
        "Computed for 350 ms: 300 ms output (3 tokens, 1 of them drafted), "
        "50 ms prompt (5 tokens, 2 of them cached, 3 cached without a state). "
        "Ended after 762 ms (length).",
    ),
    (
        [{"states": {"wait_policy": 0.02, "wait_fairness": 0.03}, "finish": None, "preemptions": 2, "preempted_by": (9, 9)}],
        "Waited 50 ms: 50 ms behind other requests; preempted twice by request 9 (recomputed). "
        "Nothing was computed. Arrived 50 ms ago and is still running.",
    ),
    (
        [{"states": {"decode": 1.0}}, {"states": {"decode": 12.25, "recompute": 0.004}, "recomputed_tokens": 8, "finish": "abort"}],
        "The longest of 2 sequences: did not wait. Computed for 12.3 s: 12.2 s output (3 tokens), 4.0 ms recompute (8 tokens). "
        "Ended after 12.3 s (abort).",
    ),
]


@pytest.mark.parametrize(("sequences", "reported"), PARAGRAPHS, ids=range(len(PARAGRAPHS)))
def test_a_request_in_one_paragraph(sequences, reported):
    assert summary_text([timeline(**changes) for changes in sequences], {17: "y"}) == reported


def test_an_operator_hears_who_was_in_the_way_and_a_tenant_only_that_somebody_was():
    engine = ScriptedEngine()
    engine.others = [timeline(tag=17, tenant="bob"), timeline(tag=18, tenant="alice"), timeline(tag=19, tenant="unasked")]
    with serving(engine, "alice=sk-1", operator_key="sk-3") as (base, _), httpx.Client(base_url=base) as client:
        answer_id, _ = ask(client, headers={"authorization": "Bearer sk-1"})
        crowded = {"states": {"wait_fairness": 1.0}, "queued_behind": {"bob": 2.0, "carol": 1.5, "alice": 1.0}, "tenant": "alice"}
        crowded |= {"served_before": {"fairness": 2}, "served_first": ((17, "bob", "fairness"), (18, "alice", "fairness"))}
        engine.timelines[answer_id] = [timeline(**crowded, preemptions=2, preempted_by=(17, 18))]
        operator, alice = (
            client.get(f"/v1/requests/{answer_id}/explain", headers={"authorization": f"Bearer {key}"}) for key in ("sk-3", "sk-1")
        )
    assert "1.00 s behind tenant bob; preempted twice by tenant bob and tenant alice" in operator.json()["summary"]
    assert "1.00 s behind tenant another; preempted twice by tenant another and tenant alice" in alice.json()["summary"]
    assert alice.json()["sequences"][0]["queued_behind"] == {"another": 3.5, "alice": 1.0}
    assert alice.json()["sequences"][0]["served_before"] == {"fairness": 2}
    assert alice.json()["sequences"][0]["served_first"] == [[17, "another", "fairness"], [18, "alice", "fairness"]]
    assert "bob" not in alice.text
    assert "carol" not in alice.text


def test_a_request_that_is_being_tokenized_is_found_by_those_who_may_ask():
    engine, tokenizing, finish = ScriptedEngine(), threading.Event(), threading.Event()

    def encode(text, *, add_special_tokens=True):
        tokenizing.set()
        finish.wait(60)
        return list(text.encode())

    def explained(client, key):
        response = client.get("/v1/requests/mine/explain", headers=key)
        return response.status_code, response.json()

    with (
        serving(engine, "alice=sk-1,bob=sk-2", operator_key="sk-3") as (base, service),
        httpx.Client(base_url=base) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        alice, bob, operator = ({"authorization": f"Bearer sk-{number}"} for number in (1, 2, 3))
        ask(client, headers=alice | {"x-request-id": "mine"})  # an earlier request of the same id
        engine.tokenizer.encode = encode
        requested = threads.submit(ask, client, headers=alice | {"x-request-id": "mine"})
        try:
            assert tokenizing.wait(60)
            for key in alice, operator:
                status, reported = explained(client, key)
                assert (status, reported["id"], reported["sequences"]) == (200, "mine", [])
                assert reported["preparing"]["state"] == "tokenize"
                assert reported["preparing"]["states"].keys() == {"receive", "tokenize"}
                assert "It is being tokenized. Arrived" in reported["summary"]
            assert explained(client, bob)[0] == 404
        finally:
            finish.set()
        answer_id, _ = requested.result()
        assert explained(client, alice)[1]["id"] == answer_id
        wrong = client.post("/v1/completions", content=b"{", headers=alice | {"x-request-id": "wrong", "content-type": "application/json"})
        assert wrong.status_code == 400
        wait_until(lambda: service.registry.preparing("", "wrong") is None)


def test_a_refused_request_is_told_so_and_why(engine):
    """By the id that its client got in the answer's header, or had sent."""
    with serving(engine) as (base, _), httpx.Client(base_url=base) as client:
        full = client.post("/v1/completions", json={"prompt": "full", "max_tokens": 2}, headers={"x-request-id": "mine"})
        wrong = client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
        assert (full.status_code, wrong.status_code) == (503, 400)
        reported = client.get("/v1/requests/mine/explain").json()
        assert reported["refused"] == {"status": 503, "code": "queue_full", "message": "4 requests are waiting, as many as may"}
        assert reported["summary"] == "Refused with status 503 (queue_full): 4 requests are waiting, as many as may"
        assert (reported["id"], reported["sequences"]) == ("mine", [])
        reported = client.get(f"/v1/requests/{wrong.headers['x-request-id']}/explain").json()
        assert reported["refused"] == {"status": 400, "code": None, "message": wrong.json()["error"]["message"]}
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"x-request-id": "mine"})
        assert "refused" not in client.get("/v1/requests/mine/explain").json(), "the id's newest request was taken"


def test_refusals_are_forgotten_in_time_and_a_tenants_are_its_own():
    kept = RequestRegistry()
    for number in range(MAX_REFUSALS + 1):
        kept.add_refusal("alice", str(number), Refusal.of(503, {"message": "full"}))
    assert kept.refusal("alice", "0") is kept.refusal(None, "0") is kept.refusal("bob", "1") is None
    assert kept.refusal("alice", "1") is kept.refusal(None, "1") is not None
