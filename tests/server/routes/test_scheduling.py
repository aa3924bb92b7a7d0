import httpx
import openai
import pytest
from events import events
from scripted_engine import CACHED, ScriptedEngine, answer
from server_here import MODEL, serving, wait_until

from chairlift.errors import QueueFull
from chairlift.scheduling import BACKGROUND, Scheduling
from chairlift.server import streaming
from chairlift.server.errors import api_error
from chairlift.server.tiers import ServiceTiers, Tier

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def request_body(path, prompt="a b c", **fields):
    """A request of three tokens for either route."""
    question = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {**question, "max_tokens": 3, **fields}


def asked(**fields):
    """What the engine gets of a tenant without a key: it is of the group of all such tenants."""
    return Scheduling(cache_group="", limit_group="", **fields)


def text(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def delta(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_reach_the_scheduler(http, engine, path):
    fields = {"priority": -3, "deadline_ms": 5000, "ttft_deadline_ms": 250.5, "cache_salt": "salt", "predicted_tokens": 7}
    headers = {"x-tenant-id": "team-1.a:b_c", "x-request-deadline-ms": "1"}
    response = http.post(path, json=request_body(path, **fields), headers=headers)
    assert response.status_code == 200
    assert "x-chairlift-ignored" not in response.headers
    assert engine.scheduled == [asked(tenant="team-1.a:b_c", **fields)]
    assert engine.named == [response.json()["id"]]


def test_nothing_said_means_nothing_asked(http, engine):
    names = ("priority", "service_tier", "deadline_ms", "ttft_deadline_ms", "cache_salt", "predicted_tokens", "n", "best_of")
    http.post(COMPLETIONS, json=request_body(COMPLETIONS))
    http.post(CHAT, json=request_body(CHAT, user="somebody", **dict.fromkeys(names)))
    assert engine.scheduled == [asked(), asked()]
    assert [one.n for one in engine.seen] == [1, 1]


def test_deadlines_come_in_headers_too(http, engine):
    headers = {"x-request-deadline-ms": "1500", "x-request-ttft-deadline-ms": "99.5"}
    http.post(COMPLETIONS, json=request_body(COMPLETIONS), headers=headers)
    http.post(COMPLETIONS, json=request_body(COMPLETIONS, ttft_deadline_ms=7), headers=headers)
    assert [(one.deadline_ms, one.ttft_deadline_ms) for one in engine.scheduled] == [(1500, 99.5), (1500, 7)]


SERVICE_TIERS = [("auto", "default"), ("default", "default"), ("scale", "default"), ("priority", "priority"), ("flex", "flex")]
SERVICE_TIERS += [("fast", "priority"), ("ultrafast", "priority")]


@pytest.mark.parametrize(("asked_for", "served"), SERVICE_TIERS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_answer_and_the_engine_have_the_tier_that_serves_it(http, engine, path, asked_for, served):
    assert http.post(path, json=request_body(path, service_tier=asked_for)).json()["service_tier"] == served
    *chunks, _ = events(http.post(path, json=request_body(path, service_tier=asked_for, stream=True)))
    assert {chunk["service_tier"] for chunk in chunks} == {served}
    http.post(path, json=request_body(path, service_tier=asked_for, priority=4))
    assert engine.scheduled == [asked(tier=served), asked(tier=served), asked(tier=served, priority=4)]


def test_a_response_has_the_tier_that_serves_it(http):
    tiers = [http.post("/v1/responses", json={"input": "a", **fields}).json()["service_tier"] for fields in ({}, {"service_tier": "flex"})]
    assert tiers == ["default", "flex"]


def test_a_tenant_that_may_not_use_a_tier_is_served_as_default(http, engine, server):
    _, service = server
    service.tiers = ServiceTiers({**service.tiers.tiers, "priority": Tier(4, frozenset({"alice"}))})
    for tenant, served in (("alice", "priority"), ("bob", "default"), (None, "default")):
        headers = {} if tenant is None else {"x-tenant-id": tenant}
        body = http.post(CHAT, json=request_body(CHAT, service_tier="priority"), headers=headers).json()
        assert (body["service_tier"], engine.scheduled[-1].tier) == (served, served)


def test_a_tenants_key_claims_no_urgency_that_it_was_not_granted(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nkey = "sk-1"\n[bob]\nkey = "sk-2"\ntiers = ["priority"]\n')
    engine = ScriptedEngine()
    with serving(engine, "sk-3", api_key_file=str(file)) as (base, _), httpx.Client(base_url=base) as http:
        for key, served, priority in (("sk-1", "default", 0), ("sk-2", "priority", -9), ("sk-3", "default", 0)):
            headers = {"authorization": f"Bearer {key}"}
            body = request_body(CHAT, service_tier="priority", priority=-9)
            assert http.post(CHAT, json=body, headers=headers).json()["service_tier"] == served
            assert (engine.scheduled[-1].tier, engine.scheduled[-1].priority) == (served, priority)
            opened = http.post("/v1/sequences", json={"prompt": "a", "service_tier": "priority", "priority": -9}, headers=headers).json()
            assert (engine.scheduled[-1].tier, engine.scheduled[-1].priority) == (served, priority)
            changed = http.patch(f"/v1/sequences/{opened['id']}", json={"priority": -8}, headers=headers).json()
            assert changed["priority"] == (-8 if priority else 0)
        for name in ("x-request-deadline-ms", "x-request-ttft-deadline-ms"):
            assert http.post(CHAT, json=request_body(CHAT), headers={"authorization": "Bearer sk-1", name: "5000"}).status_code == 200


def test_a_background_request_is_served_by_no_tier(http, engine):
    body = http.post(CHAT, json=request_body(CHAT, service_tier="priority", priority=BACKGROUND)).json()
    assert "service_tier" not in body
    assert engine.scheduled[0].served_tier == "background"


def test_answers_name_a_tier_only_where_one_was_asked_for(http):
    assert "service_tier" not in http.post(CHAT, json=request_body(CHAT)).json()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_answers_to_one_prompt(http, engine, path):
    engine.shown = CACHED
    body = http.post(path, json=request_body(path, n=3)).json()
    assert [(choice["index"], text(choice), choice["finish_reason"]) for choice in body["choices"]] == [
        (i, answer("a b c", 3, i), "length") for i in range(3)
    ]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 9, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3  # forks share the prompt: it was looked up once
    assert engine.started == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_answers_stream_side_by_side(http, path):
    options = {"include_usage": True}
    *chunks, last, done = events(http.post(path, json=request_body(path, n=3, stream=True, stream_options=options)))
    assert done is None
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    texts, finishes = ["", "", ""], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += delta(choice)
        finishes += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == [answer("a b c", 3, i) for i in range(3)]
    assert finishes == [0, 1, 2]


def test_each_choice_of_a_chat_stream_begins_with_its_role(http):
    *chunks, _ = events(http.post(CHAT, json=request_body(CHAT, n=2, stream=True)))
    choices = [chunk["choices"][0] for chunk in chunks]
    for i in range(2):
        first, *others = [choice["delta"] for choice in choices if choice["index"] == i]
        assert first == {"role": "assistant", "content": ""}
        assert not any("role" in other for other in others)


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_to_each_of_several_prompts(client, engine, stream):
    prompts = ["a b", "c d e"]
    answered = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=3, stream=stream)
    texts = [""] * 4
    for choice in [choice for chunk in answered for choice in chunk.choices] if stream else answered.choices:
        texts[choice.index] += choice.text
    assert texts == [answer(prompt, 3, i) for prompt in prompts for i in range(2)]
    if not stream:
        assert (answered.usage.prompt_tokens, answered.usage.completion_tokens) == (8, 12)
    assert len(set(engine.named)) == 2


def test_the_best_of_several(http, engine):
    body = http.post(COMPLETIONS, json=request_body(COMPLETIONS, n=2, best_of=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 15
    assert http.post(COMPLETIONS, json=request_body(COMPLETIONS, n=2, best_of=2, stream=True)).status_code == 200
    assert [(one.n, one.best_of) for one in engine.seen] == [(2, 5), (2, 2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_full_queue_says_when_to_come_back(http, path, stream):
    response = http.post(path, json=request_body(path, "full", stream=stream))
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"] == {
        "message": "4 requests are waiting, as many as may",
        "type": "server_error",
        "param": None,
        "code": "queue_full",
    }


def test_nobody_is_told_to_come_back_at_once():
    assert api_error(QueueFull("full", retry_after=0.0)).headers == {"retry-after": "1"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_missed_deadline_says_what_was_used(http, path):
    response = http.post(path, json=request_body(path, "late", n=2, deadline_ms=100))
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    body = response.json()
    assert (
        body["error"].pop("message").startswith("the request was dropped after 3 tokens of output, since it missed its deadline or would")
    )
    assert body["error"] == {"type": "timeout_error", "param": None, "code": "deadline_exceeded"}
    # The second answer begins a step later.
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (4, 3, 7)


def test_the_tokens_of_answers_never_shown_count_too(http):
    body = http.post(COMPLETIONS, json=request_body(COMPLETIONS, "late", best_of=5)).json()
    assert body["usage"]["completion_tokens"] == 2 + 4 * 1


def test_the_other_prompts_of_a_request_end_with_the_one_that_is_late(http, engine):
    response = http.post(COMPLETIONS, json={"prompt": ["paused", "late"], "max_tokens": 9})
    assert response.status_code == 504
    assert response.json()["usage"]["prompt_tokens"] == 10
    assert engine.left_early == 2


def test_the_openai_client_does_not_retry_what_is_late(base, engine):
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", timeout=30) as client, pytest.raises(openai.APIStatusError) as missed:
        client.completions.create(model=MODEL, prompt="late", extra_body={"deadline_ms": 5})
    assert missed.value.code == "deadline_exceeded"
    assert engine.started == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_is_late_ends_with_the_error(http, path):
    *chunks, last = events(http.post(path, json=request_body(path, "late", stream=True)))
    assert "".join(delta(chunk["choices"][0]) for chunk in chunks) == "late late "
    assert last["error"]["code"] == "deadline_exceeded"
    assert last["usage"]["completion_tokens"] == 2
    # Before the first token the status can say it.
    assert http.post(path, json=request_body(path, "late", stream=True, ttft_deadline_ms=5)).status_code == 504


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_headers_do_not_wait_for_ever(http, engine, monkeypatch, path):
    monkeypatch.setattr(streaming, "FIRST_EVENT_TIMEOUT", 0.0)
    with http.stream("POST", path, json=request_body(path, "held late", stream=True, ttft_deadline_ms=5)) as response:
        assert response.status_code == 200
        engine.released = True
        [last] = [line for line in response.iter_lines() if line]
    assert '"code":"deadline_exceeded"' in last


def test_a_client_may_leave_while_it_waits_for_the_first_event(base, server, engine):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(base + COMPLETIONS, json=request_body(COMPLETIONS, "held", stream=True), timeout=0.2)
    wait_until(lambda: engine.left_early == 1 and server[1].open == 0)
