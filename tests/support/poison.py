"""Requests that should hurt nobody but themselves, kind by kind; each is a path, a body, and headers if it needs any."""

import itertools
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

VOCABULARY = 49_152
"""Tokens of the default model."""

CHAT, TEXT, TOKENIZE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages", "/v1/responses"


class Poison(NamedTuple):
    """One request; `body` is JSON's text, or something to make it of."""

    path: str
    body: Any
    statuses: tuple[int, ...] = (400,)
    headers: Mapping[str, str] = MappingProxyType({})

    def content(self) -> bytes:
        """The body as it goes over the wire."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


EITHER = (200, 400)
"""For what is strange, but can be answered."""


def text(statuses: tuple[int, ...] = (400,), **fields: Any) -> Poison:
    return Poison(TEXT, {"prompt": "a", "max_tokens": 3, **fields}, statuses)


def chat(statuses: tuple[int, ...] = (400,), **fields: Any) -> Poison:
    return Poison(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}, statuses)


def said(*messages: Any, statuses: tuple[int, ...] = (400,)) -> Poison:
    return chat(statuses, messages=list(messages))


def nested(levels: int, inside: Any = 1) -> Any:
    for _ in range(levels):
        inside = {"a": inside}
    return inside


def schema(value: Any, statuses: tuple[int, ...] = (400,)) -> Poison:
    return text(statuses, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": value}})


def function(**fields: Any) -> Poison:
    """A function that has to be called."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}
    return chat(tools=[tool], tool_choice="required")


def surrogates() -> Iterator[Poison]:
    lone = "a\ud800b"
    for name in ("prompt", "stop", "guided_regex", "guided_grammar", "cache_salt", "model", "request_id", "user", lone):
        yield text(**{name: lone})
    for name in ("bad_words", "guided_choice", "prompt"):
        yield text(**{name: ["a", lone]})
    yield said({"role": "user", "content": lone})
    yield said({"role": "user", "content": [{"type": "text", "text": lone}]})
    yield said({"role": lone, "content": "a"})
    yield said({"role": "user", "content": "a", "name": lone})
    yield chat(chat_template_kwargs={"a": lone})
    yield function(description=lone)
    yield function(parameters={"properties": {lone: {}}})
    yield Poison(MESSAGES, {"max_tokens": 3, "system": lone, "messages": [{"role": "user", "content": "a"}]})
    yield Poison(RESPONSES, {"input": lone, "instructions": lone})
    yield Poison(TOKENIZE, {"prompt": lone})


def nulls() -> Iterator[Poison]:
    nul = "a\0b"
    yield text(EITHER, prompt=nul)
    yield text(EITHER, prompt="\0" * 1000)
    yield text(EITHER, stop=[nul, "\0"])
    yield text(EITHER, bad_words=[nul])
    yield text(EITHER, cache_salt=nul)
    yield text(EITHER, guided_regex="\0")
    yield text(EITHER, guided_choice=[nul])
    yield text(EITHER, guided_grammar=nul)
    yield text(model=nul, statuses=(404,))
    yield said({"role": "user", "content": nul}, statuses=EITHER)


def long_texts() -> Iterator[Poison]:
    for one in ("a", " ", "\n", "ab", "<|im_start|>", "\\", "0"):
        yield text(prompt=one * (1_000_000 // len(one)))
    yield said({"role": "user", "content": "a" * 1_000_000})
    yield Poison(TEXT, {"prompt": "a" * (2 << 20)}, (413,))


def token_ids() -> Iterator[Poison]:
    for ids in ([-1], [VOCABULARY], [2**31], [2**63], [2**200], [1.5], [True], [[1], []], [[1], "a"], [None], [], [[VOCABULARY]], [[[1]]]):
        yield text(prompt=ids)
    yield text(prompt=[1] * 300_000)
    yield text(prompt=[[1]] * 257)


def roles() -> Iterator[Poison]:
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
    yield said(assistant, statuses=EITHER)
    yield said(assistant, assistant, user, {"role": "system", "content": "a"}, statuses=EITHER)
    yield said({"role": "tool", "content": "a", "tool_call_id": "nobody"}, statuses=EITHER)
    yield said({"role": "function", "content": "a"}, user, statuses=EITHER)
    yield said()
    yield said({"role": "root", "content": "a"})
    yield said({"role": ["user"], "content": "a"})
    yield said({"content": "a"})
    yield said(None)
    yield said(*[user] * 4097)


def contents() -> Iterator[Poison]:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    for content in (None, 7, {}, [], [[]], [None], [image], [{"type": "text"}], [{"type": "text", "text": {}}], nested(500), [nested(40)]):
        yield said({"role": "user", "content": content})
    calls = [{"type": "function", "id": "a", "function": {"name": "f", "arguments": json.dumps(nested(40))}}]
    yield said({"role": "assistant", "content": None, "tool_calls": calls})
    yield said({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(33)}}]})
    yield said({"role": "assistant", "tool_calls": [{"function": {}}] * 3})
    yield said({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}, statuses=EITHER)


def template_variables() -> Iterator[Poison]:
    yield chat(chat_template_kwargs=nested(33))
    yield chat(chat_template_kwargs={f"v{i}": i for i in range(65)})
    for name in ("messages", "tools", "chat_template", "self", "tokenize", "a-b", "", "a" * 65):
        yield chat(chat_template_kwargs={name: "a"})
    yield chat(EITHER, chat_template_kwargs={"__class__": "a", "range": "a", "namespace": 1, "loop": [], "raise_exception": 1})
    yield chat(EITHER, chat_template_kwargs={"bos_token": "a" * 500_000, "eos_token": [1] * 1000})
    yield chat(chat_template="{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}a{% endfor %}")
    yield chat(documents=[{"a": "b"}])


def regexes() -> Iterator[Poison]:
    for regex in (
        "(",
        "(?=a)b",
        r"(a)\1",
        "(" * 8000,
        "a" * 8193,
        "[z-a]",
        "a{5}{",
        "*",
        r"\p{Nothing}",
        "a{4294967296}",
        "(?<=a)b",
        "[^\\s\\S]",
    ):
        yield text(guided_regex=regex)
    yield text(EITHER, guided_regex="(a|aa)+$")
    yield text(EITHER, guided_regex="(.*a.*b.*c){200}")


def schemas() -> Iterator[Poison]:
    object_of = {"type": "object", "properties": {"a": {"type": "hiccup"}}}
    for one in (1, "a", [], {"type": 123}, object_of, {"enum": []}, {"allOf": [False]}, {"type": "array", "minItems": 10**9}, {"not": {}}):
        yield schema(one)
    yield schema(nested(40))
    yield schema({"type": "integer", "multipleOf": 10_000_019})
    yield schema({"enum": ["a" * 100] * 1000})
    yield schema({"properties": {"a": {"type": "string", "pattern": "(" * 100}}})
    yield schema({"type": "string", "format": "no-such-format", "minLength": 5, "maxLength": 1}, EITHER)


def references() -> Iterator[Poison]:
    chain: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}
    yield schema({"$defs": chain | {"d1200": {}}, "$ref": "#/$defs/d0"})
    yield schema({"$ref": "#"})
    yield schema({"$ref": "http://127.0.0.1:1/schema.json"})
    yield schema({"$ref": "file:///etc/passwd"})
    yield schema({"$ref": "#/$defs/nowhere"})
    yield schema({"$ref": 7})
    yield schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, EITHER)
    yield schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}, EITHER)


def grammars() -> Iterator[Poison]:
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'
    for lark in (
        "",
        "start: foo",
        "start: " + "(" * 9000,
        chain,
        "start: start",
        "start: <|no-such-token|>",
        "start: %json {",
        "]" * 65_537,
    ):
        yield text(guided_grammar=lark)
    yield text(guided_grammar='start: %json {"$ref": "#/$defs/nowhere"}')
    yield text(EITHER, guided_grammar="start: start start | /a*/")


def formats() -> Iterator[Poison]:
    for form in ("json", 7, {"type": "sound"}, {"type": 123}, {"type": "json_schema"}, {"type": "json_object", "schema": 7}):
        yield text(response_format=form)
    for form in ({}, {"json": {}, "regex": "a"}, {"regex": None}, {"choice": []}, {"choice": [1]}, {"choice": ["a"] * 5000}, [], "regex"):
        yield text(structured_outputs=form)
    yield text(guided_regex="a", guided_choice=["a"])
    yield text(guided_regex="a", ignore_eos=True)


def biases() -> Iterator[Poison]:
    for bias in (
        [],
        "a",
        {"a": 1},
        {"-1": 1},
        {"1.0": 1},
        {str(VOCABULARY): 1},
        {"9999999999": 1},
        {"1": 101},
        {"1": "a"},
        {"1": None},
        {"": 1},
    ):
        yield text(logit_bias=bias)
    yield text(logit_bias={str(i): 1 for i in range(1025)})


def token_lists() -> Iterator[Poison]:
    for ids in ([], [VOCABULARY], [-1], [2**31], ["1"], [1] * 1025, 7, [True]):
        yield text(allowed_token_ids=ids)
    for ids in ([-1], [2**40], ["a"], [1] * 65, {}):
        yield text(stop_token_ids=ids)
    for words in ([""], [7], ["a"] * 129, ["a" * 1025], 5):
        yield text(bad_words=words)


def numbers() -> Iterator[Poison]:
    huge = 10**400
    for name in ("n", "best_of", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "top_k", "truncate_prompt_tokens"):
        yield text(**{name: huge})
        yield text(**{name: -2})
    for name, value in {
        "n": 129,
        "best_of": 10**9,
        "logprobs": 21,
        "max_tokens": 2**40,
        "temperature": 101,
        "top_p": -0.1,
        "min_p": 2,
    }.items():
        yield text(**{name: value})
    yield text(prompt=["a"] * 100, n=100)
    yield text(seed=2**64)
    yield text(priority=2**31)
    yield Poison(TEXT, b'{"prompt": "a", "temperature": NaN}')
    yield Poison(TEXT, b'{"prompt": "a", "repetition_penalty": 1e999}')


def deadlines() -> Iterator[Poison]:
    missed = (504,)
    yield text(missed, deadline_ms=0.0001)
    yield text(missed, deadline_ms=0.0001, stream=True)
    yield text(missed, ttft_deadline_ms=0.0001, n=4)
    yield chat(missed, deadline_ms=0.0001)
    yield Poison(TEXT, {"prompt": "a"}, missed, {"x-request-deadline-ms": "0.0001"})
    yield Poison(TEXT, {"prompt": "a"}, (400,), {"x-request-deadline-ms": "soon"})
    for value in (0, -1, "soon", 10**11):
        yield text(deadline_ms=value)


def types() -> Iterator[Poison]:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stream",
        "n",
        "echo",
        "ignore_eos",
        "logprobs",
        "stream_options",
        "model",
    )
    for name, value in itertools.product(names, ("x", [], {"a": {}}, [[]])):
        if name != "model" or value != "x":
            yield text(EITHER if name == "stream_options" else (400,), **{name: value})  # it may have fields that nobody knows


def tools() -> Iterator[Poison]:
    for offered in ({}, 7, [7], [{}], [{"type": "function"}], [{"type": 7}]):
        yield chat(tools=offered)
    for name in ("", "a b", "é", "a" * 129, "<|im_end|>", 7):
        yield function(name=name)
    for parameters in (
        "a",
        nested(40),
        {"type": "string"},
        {"type": "object", "properties": {"a": {"type": "hiccup"}}},
        {"$ref": "#/nowhere"},
    ):
        yield function(parameters=parameters)
    one = {"type": "function", "function": {"name": "f"}}
    yield chat(tools=[one, one])
    yield chat(tools=[one] * 129)
    for choice in (7, "f", {"type": "function", "function": {"name": "g"}}, {"type": "function"}, [], "required"):
        yield chat(tools=[one] if choice != "required" else [], tool_choice=choice)


def stops() -> Iterator[Poison]:
    for stop in ("", [""]):
        yield text((200,), stop=stop)
    for stop in (["a"] * 17, "a" * 1025, [["a"]], 7, {"a": 1}, [None], ["a", 7]):
        yield text(stop=stop)


def request_ids() -> Iterator[Poison]:
    yield Poison(TEXT, {"prompt": "a", "max_tokens": 3}, (200,), {"x-request-id": "the-same"})
    yield Poison(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, (200,), {"x-request-id": "the-same"})
    yield text((200,), request_id="the-same")
    yield text((200,), request_id="the-same", prompt=["a", "b"])
    yield Poison(TEXT, {"prompt": "a", "max_tokens": 3}, (200,), {"x-request-id": "a b" * 1000})
    yield Poison(TEXT, {"prompt": "a"}, (400,), {"x-tenant-id": "a b"})
    for name in ("", "a b", "a\n", "a" * 129, 7):
        yield text(request_id=name)


def bodies() -> Iterator[Poison]:
    for body in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"7",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a\x01"}',
    ):
        yield Poison(TEXT, body)
        yield Poison(CHAT, body)
    yield Poison(TEXT, b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}")
    yield Poison(TEXT, "{'prompt': 'a'}".encode("utf-16"))


def other_routes() -> Iterator[Poison]:
    user = {"role": "user", "content": "a"}
    for field in (
        {"messages": []},
        {"max_tokens": "a"},
        {"messages": [{"role": "system", "content": "a"}]},
        {"system": 7},
        {"thinking": 7},
    ):
        statuses = EITHER if "thinking" in field else (400,)
        yield Poison(MESSAGES, {"max_tokens": 3, "messages": [user], **field}, statuses)
    for block in (
        7,
        {"type": "image"},
        {"type": "tool_use", "id": 7},
        {"type": "tool_result", "tool_use_id": "a", "content": 7},
        nested(500),
    ):
        yield Poison(MESSAGES, {"max_tokens": 3, "messages": [{"role": "user", "content": [block]}]})
    for given in (
        7,
        [],
        [7],
        [nested(500)],
        [{"type": "item_reference", "id": "a"}],
        [{"role": "user", "content": [{"type": "input_image"}]}],
    ):
        yield Poison(RESPONSES, {"input": given})
    yield Poison("/detokenize", {"tokens": [-1]})
    yield Poison("/detokenize", {"tokens": [2**64]})
    yield Poison("/v1/embeddings", {"input": "a"})


KINDS = (
    *(surrogates, nulls, long_texts, token_ids, roles, contents, template_variables, regexes, schemas, references, grammars, formats),
    *(biases, token_lists, numbers, deadlines, types, tools, stops, request_ids, bodies, other_routes),
)


def poisoned() -> list[Poison]:
    """All requests of all kinds."""
    return [poison for kind in KINDS for poison in kind()]
