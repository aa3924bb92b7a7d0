"""The number of cached tokens in answers: a tenant is told only of those that its own requests used before."""

import httpx
import pytest
from events import objects
from scripted_engine import CACHED, ScriptedEngine
from server_here import serving

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PROMPT = {"prompt": "a b c", "max_tokens": 2}


def openai_usage(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def responses_usage(usage):
    return usage["input_tokens_details"]["cached_tokens"]


def anthropic_usage(usage):
    return usage["cache_read_input_tokens"]


ANSWERS = [
    ("/v1/completions", PROMPT, openai_usage),
    ("/v1/chat/completions", CHAT, openai_usage),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}, responses_usage),
    ("/v1/messages", CHAT, anthropic_usage),
]


@pytest.fixture(scope="module")
def keyed():
    engine = ScriptedEngine()
    engine.shown = CACHED
    with serving(engine, "alice=sk-1,sk-2", operator_key="sk-3") as (base, _), httpx.Client(base_url=base) as http:
        yield http


def readers(http, path, body):
    """The answers to alice, to the unnamed key, to the operator, and to the operator who acts for alice."""
    for key, tenant in (("sk-1", None), ("sk-2", None), ("sk-3", None), ("sk-3", "alice")):
        headers = {"authorization": f"Bearer {key}"} | ({} if tenant is None else {"x-tenant-id": tenant})
        answer = http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        yield answer


@pytest.mark.parametrize(("path", "body", "read"), ANSWERS)
def test_answers_tell_a_tenant_of_its_own(keyed, path, body, read):
    assert [read(answer.json()["usage"]) for answer in readers(keyed, path, body)] == [1, 1, 3, 1]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
def test_streams_tell_a_tenant_of_its_own(keyed, path, body):
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    assert [openai_usage(objects(answer.text)[-1]["usage"]) for answer in readers(keyed, path, streamed)] == [1, 1, 3, 1]


def test_several_answers_count_what_was_cached_before_the_first(keyed):
    assert [openai_usage(answer.json()["usage"]) for answer in readers(keyed, "/v1/completions", PROMPT | {"n": 3})] == [1, 1, 3, 1]


def written(usage):
    """The tokens that a request has put into the cache, in the words of each API."""
    if "cache_creation_input_tokens" in usage:
        created = usage["cache_creation"]
        assert created["ephemeral_5m_input_tokens"] + created["ephemeral_1h_input_tokens"] == usage["cache_creation_input_tokens"]
        return usage["cache_creation_input_tokens"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cache_write_tokens"]


LONG = "a prompt of three blocks and a little more, 50 of it"
LONG_CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
LONG_BODIES = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/chat/completions": LONG_CHAT,
    "/v1/responses": {"input": LONG, "max_output_tokens": 2},
    "/v1/messages": LONG_CHAT,
}


@pytest.mark.parametrize(("path", "_", "cached"), ANSWERS)
def test_answers_tell_what_was_written(keyed, path, _, cached):
    usages = [answer.json()["usage"] for answer in readers(keyed, path, LONG_BODIES[path])]
    assert [cached(usage) + written(usage) for usage in usages] == [48] * 4
    assert [written(usage) for usage in usages] == [47, 47, 45, 47]


def test_several_answers_and_prompts_write_each_prompt_once(keyed):
    body = {"prompt": [LONG, LONG + LONG], "n": 3, "max_tokens": 2}
    assert [written(answer.json()["usage"]) for answer in readers(keyed, "/v1/completions", body)] == [142, 142, 138, 142]


def test_without_a_prefix_cache_nothing_is_written():
    with serving(ScriptedEngine(enable_prefix_caching=False)) as (base, _):
        assert written(httpx.post(f"{base}/v1/completions", json=LONG_BODIES["/v1/completions"]).json()["usage"]) == 0


def test_without_keys_the_owner_is_told_of_all():
    engine = ScriptedEngine()
    engine.shown = CACHED
    with serving(engine) as (base, _):
        assert openai_usage(httpx.post(f"{base}/v1/completions", json=PROMPT).json()["usage"]) == 3
