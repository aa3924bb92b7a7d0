import pytest
from scripted_engine import answer, word_token
from server_here import MODEL

from chairlift.chat_template import ChatTemplate
from chairlift.errors import InvalidRequest
from chairlift.server.chat.request import ChatRequest

pytestmark = pytest.mark.shared_server

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "one two"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


def call(**function):
    return [HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", **function}}]}]


def checked(body):
    """Reads a request as the server does."""
    wanted, _ = ChatRequest.read(body)
    return wanted.params({}), wanted.tool_spec(), wanted.conversation(), wanted.variables()


WRONG = [
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": deep(33)}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"documents": ["x"]}, "documents[0]"),
    ({"documents": [deep(33)]}, "documents"),
    ({"documents": [{}] * 257}, "documents"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": deep(33)}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}, {"type": "custom"}]}, "tools[1].custom"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [TOOL], "functions": [TOOL["function"]]}, "functions"),
    ({"functions": [TOOL["function"]] * 129}, "functions"),
    ({"functions": [TOOL["function"]], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [TOOL["function"]], "function_call": "required"}, "function_call"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": call(arguments=[1])}, "messages[1].tool_calls[0].function.arguments.str"),
    ({"messages": call(arguments=deep(33))}, "messages"),
    ({"messages": call(arguments='{"a": ' * 33 + "{}" + "}" * 33)}, "messages"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[1].tool_calls[0].function"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[1].tool_calls[0].custom"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: f"{value!r:.60}")
def test_what_no_conversation_may_have(fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        checked({"messages": [HELLO], **fields})
    assert refusal.value.param == param


def test_the_template_is_given_the_client_s_variables(http, engine):
    fields = {
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"title": "a", "text": "b"}],
        "add_generation_prompt": False,
    }
    assert http.post(CHAT, json={"messages": [HELLO], "max_tokens": 1, **fields}).status_code == 200
    [(_, variables)] = engine.tokenizer.rendered
    assert variables == {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}], "add_generation_prompt": False}


def test_documents_are_refused_where_the_template_would_not_show_them(http, engine):
    engine.tokenizer.template = ChatTemplate({"default": CHATML}, {})
    response = http.post(CHAT, json={"messages": [HELLO], "documents": [{"text": "b"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "documents"


def test_a_final_message_goes_on(http, engine):
    request = {"messages": [HELLO, {"role": "assistant", "content": "I "}], "max_tokens": 1, "continue_final_message": True}
    assert http.post(CHAT, json=request).status_code == 200
    assert engine.tokenizer.rendered[0][1] == {"continue_final_message": True, "add_generation_prompt": False}


def test_the_answer_goes_on_with_a_last_message_of_the_assistant_that_is_a_prefix(http, engine):
    def variables(*messages):
        http.post(CHAT, json={"messages": messages, "max_tokens": 1}).raise_for_status()
        return engine.tokenizer.rendered[-1][1]

    prefix = {"role": "assistant", "content": "I ", "prefix": True}
    assert variables(HELLO, prefix) == {"continue_final_message": True, "add_generation_prompt": False}
    assert variables(HELLO, prefix | {"prefix": False}) == variables(HELLO, prefix, HELLO) == variables(HELLO | {"prefix": True}) == {}


@pytest.mark.parametrize(("fields", "param"), [({}, "messages[1].prefix"), ({"continue_final_message": True}, "continue_final_message")])
def test_a_message_that_goes_on_and_a_new_one_exclude_each_other(fields, param):
    messages = [HELLO, {"role": "assistant", "content": "I ", "prefix": True}]
    with pytest.raises(InvalidRequest, match="add_generation_prompt begins a new one") as refused:
        ChatRequest.read({"messages": messages, "add_generation_prompt": True, **fields})[0].variables()
    assert refused.value.param == param


def test_a_conversation_that_goes_on_ends_with_its_last_words():
    messages = [HELLO, {"role": "assistant", "content": "I <|end|> "}]
    template = ChatTemplate({"default": CHATML}, {})
    assert template.render(messages, (), continue_final_message=True) == [("<|user|>one two<|end|><|assistant|>I <|end|> ", False)]
    pieces = template.render(messages, ("<|end|>",), continue_final_message=True, add_generation_prompt=False)
    assert pieces == [("<|user|>one two<|end|><|assistant|>I ", False), ("<|end|>", True), (" ", False)]
    assert template.uses("add_generation_prompt")
    assert not template.uses("message")


def test_log_probabilities_have_openai_s_shape(client):
    request = {"model": MODEL, "messages": [HELLO], "max_tokens": 2}
    [choice] = client.chat.completions.create(**request, logprobs=True, top_logprobs=2).choices
    assert len(choice.logprobs.content) == 2
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("one ", -0.75, list(b"one "))
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [("x", -0.25, [120]), ("y", -0.5, [121])]
    chunks = list(client.chat.completions.create(**request, logprobs=True, stream=True))
    reported = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [(entry.token, entry.top_logprobs) for entry in reported] == [("one ", []), ("two ", [])]
    [choice] = client.chat.completions.create(**request, extra_body={"logprobs": True, "return_tokens_as_token_ids": True}).choices
    assert choice.logprobs.content[0].token == f"token_id:{word_token('one ')}"


def test_a_piece_that_is_no_text_shows_its_bytes(client, engine):
    engine.tokenizer.piece = lambda token: b"\xe2\x98"
    [choice] = client.chat.completions.create(model=MODEL, messages=[HELLO], max_tokens=1, logprobs=True).choices
    assert choice.logprobs.content[0].bytes == [0xE2, 0x98]
    assert choice.logprobs.content[0].token.isascii()


def test_a_prompt_s_log_probabilities_and_its_end_alone(http):
    request = {"messages": [HELLO], "max_tokens": 1, "prompt_logprobs": 1, "truncate_prompt_tokens": 3}
    body = http.post(CHAT, json=request).json()
    assert body["usage"]["prompt_tokens"] == 3
    assert [entry and sorted(entry) for entry in body["prompt_logprobs"]] == [None, ["119", "120"], ["111", "120"]]


def test_messages_of_every_kind_are_taken(client, engine):
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not"}]},
        {"role": "assistant", "content": None, "refusal": "nor this"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "text", "text": "on"}], "name": "ann"},
    ]
    answered = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=1)
    assert answered.choices[0].message.content == answer("be", 1)
    system, first, second, called, user = engine.tokenizer.rendered[0][0]
    assert (system["role"], first["content"], second["content"], user["name"]) == ("system", "I may not", "nor this", "ann")
    assert user["content"] == "go\non"
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", " {} ", None, {}, [], "[]", '""'])
def test_a_call_without_arguments_is_sent_back_in_many_ways(arguments):
    _, _, (_, called), _ = checked({"messages": call(arguments=arguments)})
    assert called["tool_calls"][0]["function"]["arguments"] == {}
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": arguments}}
    _, _, (_, called), _ = checked({"messages": [HELLO, older]})
    assert called["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}])
def test_a_turn_that_only_calls_has_no_text(content):
    for role in ("assistant", "tool", "function"):
        _, _, (_, turn), _ = checked({"messages": [HELLO, {"role": role, **content}]})
        assert turn["content"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 1023}], "max_tokens": 9}, "2055 tokens (2046 in the messages, 9 in the"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 9000}]}, "the messages have 9000 characters"),
        (
            CHAT,
            {"messages": [HELLO], "max_tokens": 2042},
            "2049 tokens (7 in the messages, 2042 in the completion). Please reduce the length",
        ),
        ("/v1/completions", {"prompt": "a " * 1500}, "However, you requested 3001 tokens (3000 in the prompt, 1 in the completion)"),
        ("/v1/responses", {"input": "a " * 1500}, "Your input exceeds the context window of this model. Please adjust your input and try"),
    ],
)
def test_each_api_says_in_its_own_words_that_a_prompt_is_too_long(http, path, fields, says):
    error = http.post(path, json=fields).json()["error"]
    assert says in error["message"]
    assert error["code"] == "context_length_exceeded"
