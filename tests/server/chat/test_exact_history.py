"""Returned answers get the tokens that were generated, where they mean the same."""

import json
from array import array

import httpx
import pytest
from caching_engine import END, CachingEngine, PairTokenizer
from server_here import MODEL, serving

from chairlift.chat.tools.hermes import Hermes
from chairlift.chat_template import ChatTemplate
from chairlift.server.chat.exact_history import anchor_of, before_stop, exact_tokens
from chairlift.server.turns import Answer, Found, Scope, Turn

TEXT = "Rather another thing: the other, then. " * 3
ARGUMENTS = r'{"path":"Z\u00fcrich", "n": 1e2, "whether": [true, 0.10]}'
CALL = f'I look.\n\n<tool_call>{{"name":"read","arguments":{ARGUMENTS}}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def served():
    engine = CachingEngine()
    with serving(engine, "alice=sk-1,bob=sk-2") as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        yield engine, http, service


@pytest.fixture
def engine(served):
    engine, _, service = served
    engine.cached += 1
    engine.prompts, service.exact_history = [], True
    engine.tokenizer.thinks = False
    return engine


def ask(http, messages, key="sk-1", **fields):
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": MODEL, "max_tokens": 300, "messages": messages, "tools": TOOLS, **fields}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def message(answer):
    return {name: value for name, value in answer.json()["choices"][0]["message"].items() if value is not None and name != "refusal"}


def go_on(http, messages, answered, **fields):
    """Returns an answer and asks on."""
    return ask(http, [*messages, answered, {"role": "user", "content": "And then?"}], **fields)


def generated(engine, text):
    """The first prompt with its answer, as the cache has it."""
    return [*engine.prompts[0], *text.encode()]


START = [{"role": "system", "content": "Be terse, rather."}, {"role": "user", "content": "Hello there"}]


@pytest.mark.parametrize("said", [TEXT, CALL])
def test_a_returned_answer_has_its_own_tokens(served, engine, said):
    _, http, _ = served
    engine.answers = [said, TEXT, "done"]
    second = go_on(http, START, first := message(ask(http, START)))
    own = generated(engine, said)
    assert engine.prompts[1][: len(own)] == own
    assert second.headers["x-chairlift-exact-history"] == str(len(own))
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(own) // 16 * 16
    # The third prompt has the tokens of both answers.
    third = go_on(http, [*START, first, {"role": "user", "content": "And then?"}], message(second))
    assert engine.prompts[2][: len(own)] == own
    both = [*engine.prompts[1], *TEXT.encode()]
    assert engine.prompts[2][: len(both)] == both
    assert third.headers["x-chairlift-exact-history"] == str(len(both))


def test_calls_have_their_own_tokens_where_the_template_has_no_tools(served, engine, monkeypatch):
    _, http, _ = served
    monkeypatch.setattr(engine.tokenizer, "template", ChatTemplate({"default": "{{ messages }}"}, {}))
    engine.answers = [CALL, "done"]
    first = message(ask(http, START))
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "A file."}
    second = ask(http, [*START, first, result])
    own = generated(engine, CALL)
    assert engine.prompts[1][: len(own)] == own
    assert second.headers["x-chairlift-exact-history"] == str(len(own))


def test_rewritten_arguments_of_equal_value_have_the_generated_tokens(served, engine):
    _, http, _ = served
    engine.answers = [CALL, "done"]
    answered = message(ask(http, START))
    value = {"whether": [True, 0.1], "n": 100, "path": "Zürich"}
    answered["tool_calls"][0]["function"]["arguments"] = json.dumps(value, indent=1, ensure_ascii=False)
    go_on(http, START, answered)
    own = generated(engine, CALL)
    assert engine.prompts[1][: len(own)] == own


CHANGES = {"path": "Zurich"}, {"n": 101}, {"n": True}, {"whether": [1, 0.1]}, {"whether": [0.1, True]}, {"more": None}


@pytest.mark.parametrize("change", CHANGES)
def test_other_arguments_are_what_the_client_sent(served, engine, change):
    _, http, _ = served
    engine.answers = [CALL, "done"]
    answered = message(ask(http, START))
    answered["tool_calls"][0]["function"]["arguments"] = {"path": "Zürich", "n": 100, "whether": [True, 0.1]} | change
    second = go_on(http, START, answered)
    assert "x-chairlift-exact-history" not in second.headers
    assert engine.tokenizer.decode(engine.prompts[1]).count(json.dumps(change)[1:-1].replace("\\u00fc", "ü")) == 1


def test_a_changed_text_is_what_the_client_sent(served, engine):
    _, http, _ = served
    engine.answers = [CALL, "done"]
    answered = message(ask(http, START))
    answered["content"] = "I looked."
    second = go_on(http, START, answered)
    assert "x-chairlift-exact-history" not in second.headers
    assert "I looked." in engine.tokenizer.decode(engine.prompts[1])


def test_dropped_reasoning_stays_dropped(served, engine):
    """The template renders no reasoning of earlier answers: the model must not see it."""
    _, http, _ = served
    engine.answers = [f"<think>Rather.</think>{TEXT}", "done"]
    answered = message(ask(http, START))
    assert answered["reasoning_content"] == "Rather."
    second = go_on(http, START, answered)
    assert "x-chairlift-exact-history" not in second.headers
    assert "Rather.</think>" not in engine.tokenizer.decode(engine.prompts[1])


@pytest.mark.parametrize(
    ("changes", "off"), [({"key": "sk-2"}, False), ({"cache_salt": "another"}, False), ({}, True)], ids=["tenant", "salt", "off"]
)
def test_who_does_not_profit(served, engine, changes, off):
    _, http, service = served
    engine.answers = [TEXT, "done"]
    answered = message(ask(http, START))
    service.exact_history = not off
    second = go_on(http, START, answered, **changes)
    assert "x-chairlift-exact-history" not in second.headers
    own = generated(engine, TEXT)
    assert engine.prompts[1][: len(own)] != own


def test_another_fingerprint_does_not_profit(served, engine):
    _, http, _ = served
    engine.answers = [TEXT, "done"]
    answered = message(ask(http, START))
    engine.describe(fingerprint="another")
    assert "x-chairlift-exact-history" not in go_on(http, START, answered).headers
    engine.describe(fingerprint=None)


def test_an_answer_that_was_cut_goes_on_with_its_tokens(served, engine):
    _, http, _ = served
    engine.answers = [TEXT, "done"]
    answered = message(ask(http, START, max_tokens=20))
    go_on(http, START, answered)
    own = generated(engine, TEXT[:20])
    assert engine.prompts[1][: len(own)] == own
    assert engine.prompts[1][len(own)] == END


def test_the_search_for_a_stop_string_reads_each_token_once():
    tokenizer, read = PairTokenizer(), []
    piece = tokenizer.piece
    tokenizer.piece = lambda token: read.append(token) or piece(token)
    tokens = array("I", [*b"x" * 200, *b"on\0e"])
    assert before_stop(tokens, "one", tokenizer) == array("I")  # a control token divides it
    assert len(read) == len(tokens)
    assert before_stop(tokens, "n\0e", tokenizer) == tokens[:-3]


def whole(text):
    parser = Hermes(["read"])
    return parser.push(text) + parser.end()


def test_random_answers_mean_what_they_meant():
    """Whatever is returned, a prompt with exact tokens has the text of the rendered one, or equal calls."""
    import random

    rng, tokenizer = random.Random(7), PairTokenizer()
    for _ in range(300):
        said = "".join(rng.choice(["th", "e", "in", ": ", "a", "n", "\n", "<tool_call>", "{", "x"]) for _ in range(rng.randrange(1, 30)))
        returned = said if rng.random() < 0.7 else said[: rng.randrange(len(said))] + "he"
        head = array("I", tokenizer.encode("\0user\nHi\0\0assistant\n"))
        turn = Turn("", "", "id", None, Scope("m", None, None, "", None), (), head, anchor_of(head, tokenizer), 0)
        turn.answers[0] = Answer(array("I", [*said.encode(), END]), ())
        rendered = array("I", tokenizer.encode(f"\0user\nHi\0\0assistant\n{returned}\0\0user\nGo\0"))
        found = exact_tokens(Found(turn), rendered, tokenizer, whole)
        if said == returned:
            assert found is not None
        if found is not None:
            assert tokenizer.decode(found[0].tolist(), skip_special_tokens=False) == tokenizer.decode(rendered, skip_special_tokens=False)
