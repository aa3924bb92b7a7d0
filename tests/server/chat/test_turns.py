"""Why a turn of a conversation misses the prefix cache: each way to break a prefix is named."""

from array import array
from copy import deepcopy
from dataclasses import dataclass, replace

import httpx
import pytest
from caching_engine import CachingEngine, PairTokenizer
from events import events, objects
from server_here import MODEL, serving, serving_models

from chairlift.chat_template import ChatTemplate
from chairlift.scheduling import BACKGROUND
from chairlift.server.chat.turn_difference import PromptOfTurn, cache_miss
from chairlift.server.model import ServedModel
from chairlift.server.turns import Anchor, Answer, Found, Scope, Turn

LONG = "The answers of the other engineers were in another letter. "
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} it, rather", "parameters": {"type": "object"}}}
    for name in ("read", "write")
]
CALL = '{"name": "read", "arguments": {"path": "a.txt", "line": 7}}'


def conversation():
    return {
        "model": MODEL,
        "max_tokens": 200,
        "tools": deepcopy(TOOLS),
        "messages": [
            {"role": "system", "content": f"You are terse. {LONG * 2}"},
            {"role": "user", "content": f"Read the file. {LONG}"},
        ],
    }


def say(http, body, **headers):
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def returned(answer):
    """The answer's message as clients return it."""
    return {name: value for name, value in answer["choices"][0]["message"].items() if value is not None and name != "refusal"}


def explained(http, answer, **headers):
    return http.get(f"/v1/requests/{answer['id']}/explain", headers=headers).json()


@dataclass
class Session:
    """Two answered turns of a conversation, and the request of the third."""

    engine: CachingEngine
    http: httpx.Client
    body: dict
    last: dict
    """The second answer."""

    def third(self, **headers):
        """Sends the third request and returns its answer's explanation."""
        self.answer = say(self.http, self.body, **headers)
        return explained(self.http, self.answer)

    @property
    def messages(self):
        return self.body["messages"]


FIRST, SECOND = f"I look, rather.\n<tool_call>{CALL}</tool_call>", "It says: the rest, another time."
THOUGHT = "<think>Rather another thing.</think>"


def begun(engine, http, **fields):
    """A session over `engine`, with `fields` in its requests."""
    body = conversation() | fields
    first = say(http, body, **{"x-session-id": "s"})
    call = returned(first)
    body["messages"] += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": f"a line. {LONG}"}]
    last = say(http, body, **{"x-session-id": "s"})
    body["messages"] += [returned(last), {"role": "user", "content": "Go on, then."}]
    return Session(engine, http, body, last)


@pytest.fixture(scope="module")
def served():
    engine, other = CachingEngine(), CachingEngine()
    engine.adapters = {"french": "a", "german": "b"}
    with serving_two(engine, other) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        yield engine, http, service


def serving_two(engine, other):
    return serving_models([ServedModel(MODEL, engine), ServedModel("other", other)])


@pytest.fixture
def session(served):
    engine, http, service = served
    engine.answers = [FIRST, SECOND]
    engine.cached += 1
    engine.tokenizer.cut, engine.tokenizer.thinks = None, False
    service.exact_history = True
    return begun(engine, http)


def test_a_turn_that_appends_misses_nothing(session):
    explanation = session.third()
    assert "cache_miss" not in explanation
    assert "Cache miss" not in explanation["summary"]
    assert session.engine.hits[-1] == (len(session.engine.prompts[-2]) + len(SECOND)) // 16 * 16


def edit(field, text):
    def change(session):
        session.messages[field]["content"] = text

    return change


def test_a_turn_whose_template_has_no_tools_misses_nothing_until_they_change(session, monkeypatch):
    monkeypatch.setattr(session.engine.tokenizer, "template", ChatTemplate({"default": "{{ messages }}"}, {}))
    session.engine.answers = [FIRST, SECOND]
    session = begun(session.engine, session.http)
    assert "cache_miss" not in session.third()
    description(session)
    assert session.third()["cache_miss"]["reason"] == "tools_changed"


def system_goes(session):
    del session.messages[0]


def description(session):
    session.body["tools"][1]["function"]["description"] = "write it at 12:31"


def reorder(session):
    session.body["tools"].reverse()


def another_tool(session):
    session.body["tools"].append({"type": "function", "function": {"name": "list"}})


def fewer_tools(session):
    del session.body["tools"][1]


def no_tools(session):
    session.body["tool_choice"] = "none"


def arguments(session):
    session.messages[2]["tool_calls"][0]["function"]["arguments"] = '{"path": "b.txt", "line": 7}'


def call_id(session):
    session.messages[2]["tool_calls"][0]["id"] = session.messages[3]["tool_call_id"] = "call_new"


def insert(session):
    session.messages.insert(1, {"role": "user", "content": "It is 12:31."})


def compact(session):
    session.messages[1:5] = [{"role": "user", "content": "Summary: a file was read."}]


def not_returned(session):
    del session.messages[4]


def salt(session):
    session.body["cache_salt"] = "another"


def adapter(session):
    session.body["model"] = "german"


def other_model(session):
    session.body["model"] = "other"


def setting(session):
    session.body["chat_template_kwargs"] = {"date": "today"}


def thinking(session):
    session.body["enable_thinking"] = False


def cut(session):
    session.engine.tokenizer.cut = "in another letter"


def evict(session):
    session.engine.cached += 1


def restart(session):
    session.engine.cached += 1
    session.engine.replicas[0].restarts += 1


BREAKERS = [
    (edit(0, f"You are terse. It is 12:31. {LONG * 2}"), "system_changed", "messages[0].content", "system_changed"),
    (system_goes, "system_changed", "messages[0].role", "system_changed"),
    (description, "tools_changed", "tools[1].description", "tools_changed"),
    (reorder, "tools_changed", "tools[0].name", "tools_changed"),
    (another_tool, "tools_changed", "tools[2].name", "tools_changed"),
    (fewer_tools, "tools_changed", "tools[1].name", "tools_changed"),
    (no_tools, "tools_changed", "tools[0].name", "tools_changed"),
    (edit(1, "Read the other file."), "history_edited", "messages[1].content", "messages_changed"),
    (edit(3, "[cleared]"), "history_edited", "messages[3].content", "messages_changed"),
    (edit(2, "I look."), "history_edited", "messages[2].content", "messages_changed"),
    (edit(4, "It says: the rest"), "history_edited", "messages[4].content", "messages_changed"),
    (arguments, "history_edited", "messages[2].tool_calls[0].arguments", "messages_changed"),
    (call_id, "history_edited", "messages[2].tool_calls[0].id", "messages_changed"),
    (insert, "history_edited", "messages[1].content", "messages_changed"),
    (compact, "history_shortened", "messages[1].content", "messages_changed"),
    (not_returned, "history_edited", "messages[4].role", "messages_changed"),
    (salt, "cache_salt_changed", None, "unavailable"),
    (adapter, "adapter_changed", None, "model_changed"),
    (other_model, "model_changed", None, "model_changed"),
    (setting, "settings_changed", "settings.date", "unavailable"),
    (thinking, "settings_changed", "settings.enable_thinking", "unavailable"),
    (cut, "template_rewrote_history", "messages[0].content", "messages_changed"),
    (evict, "evicted", None, None),
    (restart, "engine_restarted", None, None),
]


@pytest.mark.parametrize(("breaks", "reason", "field", "_"), BREAKERS)
def test_what_broke_the_prefix_is_named(session, breaks, reason, field, _):
    breaks(session)
    miss = session.third(**{"x-session-id": "s"})["cache_miss"]
    assert (miss["reason"], miss["field"]) == (reason, field)
    assert miss["missed_tokens"] == miss["reusable_tokens"] - session.engine.hits[-1] or reason == "model_changed"
    assert miss["missed_tokens"] > 0
    assert miss["seconds"] > 0
    assert miss["advice"]


def test_whom_blocks_were_evicted_for_is_reported(served, session):
    _, http, _ = served
    session.engine.shown = {"timeline": {"evicted_for": {"same_tenant": 16, "other_tenant": 48}}}
    evict(session)
    explanation = session.third(**{"x-session-id": "s"})
    session.engine.shown = {}
    assert explanation["cache_miss"]["evicted_for"] == {"same_tenant": 16, "other_tenant": 48}
    assert "engine's cache (for sessions of other tenants and another session of this tenant)." in explanation["summary"]
    metrics = http.get("/metrics").text
    assert 'chairlift_prompt_cache_evicted_tokens_total{engine="0",model_name="org/fake-model",taker="other_tenant"} 48' in metrics


def test_a_state_that_is_not_there_is_named(session):
    session.engine.shown = {"timeline": {"lost_hit_tokens": 64}}
    miss = session.third()["cache_miss"]
    session.engine.shown = {}
    assert (miss["reason"], miss["missed_tokens"]) == ("no_recurrent_state", 64)


def test_a_prompt_that_is_sent_again_misses_no_block_of_its_last_token():
    # The template ends with a control token, so that no token of the answer's message follows it.
    tokens, anchor, scope = array("I", range(32)), Anchor(32, b"", 0), Scope(MODEL, None, None, "", None)
    turn = Turn("", "", "id", None, scope, [], tokens, anchor, 0, answers={0: Answer(array("I", [1, 2, 3]), [])})
    now = PromptOfTurn([], [], tokens, anchor, scope, 0)
    assert cache_miss(Found(turn), now, 16, 16, PairTokenizer()) is None
    assert cache_miss(Found(turn), now, 0, 16, PairTokenizer()).missed_tokens == 16


def test_without_a_prefix_cache_nothing_is_missed(session):
    plain, engine = session.engine.config, session.engine
    engine.config = replace(plain, enable_prefix_caching=False)
    engine.cached += 1
    explanation = session.third()
    engine.config = plain
    assert "cache_miss" not in explanation


@pytest.mark.parametrize("fields", [{"priority": BACKGROUND}, {"truncate_prompt_tokens": -1}, {"prompt_logprobs": 1}])
def test_what_is_no_turn(session, fields):
    session.body |= fields
    session.engine.cached += 1
    assert "cache_miss" not in session.third(**{"x-session-id": "s"})


def test_without_a_session_name_the_returned_answers_tell_the_turn(session):
    edit(3, "[cleared]")(session)
    assert session.third()["cache_miss"]["field"] == "messages[3].content"


def test_both_sides_begin_where_they_differ(session):
    edit(3, "a new line.")(session)
    explanation = session.third()
    miss = explanation["cache_miss"]
    assert "a line. The answers" in miss["before"]
    assert "a new line." in miss["now"]
    assert "Cache miss: an earlier message has changed (messages[3].content)." in explanation["summary"]


@pytest.mark.parametrize("explicit", [False, True])
def test_reasoning_that_the_client_drops_is_named(served, session, explicit):
    engine, http, _ = served
    engine.tokenizer.thinks = True
    engine.answers = [f"{THOUGHT}Yes. {LONG}"]
    fresh = conversation()
    answer = say(http, fresh)
    fresh["messages"] += [returned(answer), {"role": "user", "content": "Why?"}]
    if explicit:
        del fresh["messages"][2]["reasoning_content"], fresh["messages"][2]["reasoning"]
    else:
        engine.tokenizer.thinks = False
    miss = explained(http, say(http, fresh))["cache_miss"]
    assert miss["reason"] == ("reasoning_dropped" if explicit else "template_rewrote_history")
    assert miss["field"] == "messages[2].reasoning"


def test_an_answer_that_tokenizes_differently_is_named_without_exact_history(served):
    engine, http, service = served
    service.exact_history = False
    engine.answers = [f"Rather another thing. {LONG}", f"\n<tool_call>{CALL}</tool_call>"]
    engine.cached += 1
    body = conversation()
    body["messages"].append(returned(say(http, body)))
    body["messages"].append({"role": "user", "content": "And then?"})
    answer = say(http, body)
    miss = explained(http, answer)["cache_miss"]
    assert (miss["reason"], miss["field"]) == ("answer_retokenized", "messages[2].content")
    body["messages"] += [returned(answer), {"role": "tool", "tool_call_id": "x", "content": "a line"}]
    miss = explained(http, say(http, body))["cache_miss"]
    assert (miss["reason"], miss["field"]) == ("answer_retokenized", "messages[4].tool_calls")


def test_the_tokens_of_a_stop_string_are_not_missed(served):
    engine, http, service = served
    service.exact_history = True
    said = "Thought: rather this, then."
    engine.answers = [f"{said}\nObservation: the other thing"]
    engine.cached += 1
    body = conversation() | {"stop": ["\nObservation"]}
    # Blocks end at the stop string, which has a block of its own.
    body["messages"][1]["content"] += "." * (-(_length(http, body) + len(said)) % 16)
    first = say(http, body)
    assert first["choices"][0]["message"]["content"] == said
    body["messages"] += [returned(first), {"role": "user", "content": "Observation: a line. And then, rather?"}]
    second = say(http, body)
    assert "cache_miss" not in explained(http, second)
    # The answer has the tokens that were generated, which are those that the text alone would not have.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] + len(said)


def _length(http, body):
    return http.post("/v1/messages/count_tokens", json=anthropic(body)).json()["input_tokens"]


def anthropic(body, **fields):
    tools = [
        {"name": tool["function"]["name"], "description": tool["function"]["description"], "input_schema": {"type": "object"}}
        for tool in body["tools"]
    ]
    system, *messages = body["messages"]
    return {"model": MODEL, "max_tokens": 200, "system": system["content"], "messages": messages, "tools": tools, **fields}


def test_anthropics_diagnostics(served):
    engine, http, _ = served
    engine.answers = ["A first answer."]
    engine.cached += 1
    body = conversation()

    def ask(previous, **fields):
        answer = http.post("/v1/messages", json=anthropic(body, diagnostics={"previous_message_id": previous}, **fields)).json()
        return answer["id"], answer["diagnostics"]

    first, nothing = ask(None)
    assert nothing is None
    body["messages"] += [{"role": "assistant", "content": "A first answer."}, {"role": "user", "content": "Go on."}]
    second, nothing = ask(first)
    assert nothing is None
    assert ask("msg_unknown")[1] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    engine.cached += 1
    assert ask(second)[1] is None  # the requests do not differ
    for change, kind in ((description, "tools_changed"), (edit(0, "Be terse."), "system_changed"), (edit(1, "Hi"), "messages_changed")):
        kept = deepcopy(body)
        change(Session(engine, http, body, {}))
        reason = ask(second)[1]["cache_miss_reason"]
        assert reason["type"] == kind
        assert reason["cache_missed_input_tokens"] > 0
        body = kept
    assert "diagnostics" not in http.post("/v1/messages", json=anthropic(body)).json()


def test_anthropics_diagnostics_begin_a_stream(served):
    _, http, _ = served
    body = anthropic(conversation(), diagnostics={"previous_message_id": "msg_unknown"}, stream=True)
    first = objects(http.post("/v1/messages", json=body).text)[0]
    assert first["message"]["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_openais_diagnostics(served):
    engine, http, _ = served
    engine.answers = ["A first answer."]
    engine.cached += 1
    request = {"model": MODEL, "instructions": f"You are terse. {LONG}", "input": f"Hello. {LONG}", "max_output_tokens": 20}
    first = http.post("/v1/responses", json=request).json()
    assert "prompt_cache_diagnostics" not in first

    def compare(id, **fields):
        answer = http.post("/v1/responses", json={**request, **fields, "prompt_cache_options": {"comparison_response_id": id}})
        return answer.json()["prompt_cache_diagnostics"]

    assert compare(first["id"]) == {"type": "cache_hit"}
    assert compare("resp_unknown") == {"type": "comparison_response_not_found"}
    counts = {"cache_missed_tokens": 64, "comparison_reusable_tokens": 64}
    assert compare(first["id"], instructions="Be terse.") == {"type": "cache_miss", "reason": "input_changed", **counts}
    assert compare(first["id"], reasoning={"effort": "low"})["reason"] == "reasoning_effort_changed"
    engine.cached += 1
    assert compare(first["id"]) == {"type": "unavailable"}


def test_chat_streams_end_with_the_diagnostics(served):
    _, http, _ = served
    body = conversation() | {"stream": True, "prompt_cache_options": {"comparison_response_id": "chatcmpl-unknown"}}
    *_, last, _ = events(http.post("/v1/chat/completions", json=body))
    assert last["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_misses_are_counted_by_reason(served, session):
    _, http, service = served
    session.engine.cached += 1
    session.engine.replicas[0].restarts += 1

    def counts():
        lines = http.get("/metrics").text.splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if 'reason="engine_restarted"' in line and f'"{MODEL}"' in line)
        return [
            sum(float(value) for name, value in samples.items() if name.startswith(f"chairlift_prompt_cache_{kind}"))
            for kind in ("misses_total", "missed_tokens_total")
        ]

    def of_session():
        [row] = [row for row in service.default.metrics.sessions.rows(None) if row["session"] == "s"]
        return row["missed_for"].get("engine_restarted", 0)

    before, missed = counts(), of_session()
    miss = session.third(**{"x-session-id": "s"})["cache_miss"]
    assert [after - one for after, one in zip(counts(), before, strict=True)] == [1, miss["missed_tokens"]]
    assert of_session() - missed == miss["missed_tokens"]


@pytest.fixture(scope="module")
def keyed():
    engine = CachingEngine()
    with serving(engine, "alice=sk-1,bob=sk-2", operator_key="sk-3") as (base, _), httpx.Client(base_url=base, timeout=30) as http:
        yield engine, http


def as_(key, **headers):
    return {"authorization": f"Bearer {key}", **headers}


def test_only_the_tenant_sees_the_texts(keyed):
    engine, http = keyed
    engine.answers = [FIRST, SECOND]
    body = conversation()
    body["messages"].append(returned(say(http, body, **as_("sk-1"))))
    body["messages"] += [{"role": "tool", "tool_call_id": "x", "content": "go"}]
    body["messages"][1]["content"] = "secret"
    answer = say(http, body, **as_("sk-1"))
    assert "secret" in explained(http, answer, **as_("sk-1"))["cache_miss"]["now"]
    operators = explained(http, answer, **as_("sk-3"))["cache_miss"]
    assert (operators["field"], operators.keys() & {"before", "now"}) == ("messages[1].content", set())
    assert http.get(f"/v1/requests/{answer['id']}/explain", headers=as_("sk-2")).status_code == 404


def test_another_tenants_turns_are_not_found(keyed):
    engine, http = keyed
    engine.answers = [FIRST, SECOND]
    body = conversation()
    first = say(http, body, **as_("sk-1", **{"x-session-id": "s"}))
    body["messages"] += [returned(first), {"role": "tool", "tool_call_id": "x", "content": "go"}]
    body["messages"][1]["content"] = "edited"
    body["prompt_cache_options"] = {"comparison_response_id": first["id"]}
    answer = say(http, body, **as_("sk-2", **{"x-session-id": "s"}))
    assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert "cache_miss" not in explained(http, answer, **as_("sk-2"))


@pytest.mark.parametrize("source", ["{{ messages }}{{ tools }}<tool_call></think>", "{{ messages }}"])
def test_the_engine_learns_where_the_users_turn_ends_before_calls_of_tools(served, monkeypatch, source):
    # A template may drop their thinking when the user goes on, and a model with recurrent layers begins only where it saved a state. One
    # without a place for tools has their results in messages of the user.
    engine, http, _ = served
    monkeypatch.setattr(engine.tokenizer, "template", ChatTemplate({"default": source}, {}))
    for recurrent in (True, False):
        engine.answers = [FIRST, SECOND]
        engine.cached += 1
        engine.describe(recurrent=recurrent)
        begun(engine, http)
        ends = [one.user_turn_end for one in engine.scheduled[-2:]]
        if not recurrent:
            assert ends == [None, None]
            continue
        assert ends[0] is None, "nothing follows it"
        prompt = engine.prompts[-1][: ends[1]]
        assert engine.tokenizer.decode(prompt, skip_special_tokens=False).endswith(f"Read the file. {LONG}\0")
