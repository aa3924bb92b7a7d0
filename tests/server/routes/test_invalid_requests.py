import json
import re
import threading

import httpx
import pytest
from raw_connection import connected, rest
from scripted_engine import ScriptedEngine, answer
from server_here import MODEL, serving, wait_until

pytestmark = pytest.mark.shared_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BODIES = {
    "empty": b"",
    "truncated": b'{"model":',
    "a string": b'"hello"',
    "a list": b"[1]",
    "null": b"null",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "too large a float": b'{"prompt": "a", "temperature": 1e999}',
    "too large an int": b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
    "too deep": b'{"prompt": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "half a surrogate pair": b'{"prompt": "\\ud800 a"}',
    "a control character": b'{"prompt": "a\x01b"}',
    "something after it": b'{"prompt": "a"} x',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bodies_that_are_no_json(http, engine, body):
    refused(http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}))
    assert engine.started == 0


ONE = {"prompt": "hi", "max_tokens": 4}
FIELDS = [
    *[("model", value) for value in (7, ["a"], {})],
    *[
        ("prompt", value)
        for value in ("", None, [], [[]], {}, 7, [True], [1.0], [-1], [65536], [2**40], [[[1]]], [[1], "a"], ["a", 1], ["a", ""])
    ],
    *[("prompt", value) for value in (["a"] * 257, "a " * 3000)],
    *[("max_tokens", value) for value in (0, -1, "10", True, 1.5, 2**31, 10**30)],
    *[("temperature", value) for value in (-1, "hot", True, [1], 1e6)],
    *[("top_p", value) for value in (-0.1, 1.5, "1")],
    *[("top_k", value) for value in (-2, 2.5, "3", True)],
    *[("min_p", value) for value in (-0.1, 2)],
    *[("seed", value) for value in (1.5, 2**64, "1", True)],
    *[("presence_penalty", value) for value in (5, -2.1)],
    *[("frequency_penalty", value) for value in (5, "1")],
    *[("repetition_penalty", value) for value in (0, -1, 1e9)],
    *[("stop", value) for value in (1, [1], {}, ["a"] * 17, "s" * 500_000)],
    *[("stop_token_ids", value) for value in (1, ["1"], [True], [-1], [1] * 65)],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("stream", value) for value in (1, "yes")],
    *[("stream_options", value) for value in ([1], "x", {"include_usage": "true"})],
    *[("n", value) for value in (0, -1, 129, 10_000, True, "1", 1.0)],
    *[("best_of", value) for value in (0, 129, 10**6, True, "2")],
    *[("priority", value) for value in (2**31, 2**40, -(2**31) - 1, "1", 1.5, True)],
    *[("service_tier", value) for value in ("gold", "", 1, True)],
    *[(name, value) for name in ("deadline_ms", "ttft_deadline_ms") for value in (0, -1, 1e300, "5", True)],
    *[("cache_salt", value) for value in ("", "s" * 257, 7)],
    *[("predicted_tokens", value) for value in (0, -1, 1.5, "9", True)],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (21, -5, True, "1")],
    *[("logit_bias", value) for value in ([1], [], "1", {"-1": 5}, {"1.0": 5}, {"\u0663": 5}, {"99999999": 1})],
    *[("logit_bias", {"1": bias}) for bias in (101, 1e40, "5", None)],
    ("logit_bias", {str(token): 1 for token in range(50_000)}),
    *[(name, value) for name in ("echo", "add_special_tokens", "metrics", "skip_special_tokens") for value in (1, "x")],
    *[("min_tokens", value) for value in (-1, 5, 2**31, "3", True)],
    *[("truncate_prompt_tokens", value) for value in (0, -5, 2**31, "5")],
    *[("allowed_token_ids", value) for value in ([], [65536], [-1], ["1"], [True], 1, list(range(200)) * 6)],
    *[("bad_words", value) for value in ("a", [""], [1], ["a"] * 129, ["a" * 1025], ["a" * 1000] * 5)],
    *[("request_id", value) for value in ("", "a b", "x" * 129, 7)],
    *[("prompt_embeds", "gASV"), ("suffix", "x"), ("use_beam_search", True), ("length_penalty", 0.5)],
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[f"{name}={value!r:.24}" for name, value in FIELDS])
@pytest.mark.slow
def test_fields_that_are_wrong_or_not_supported(http, engine, field, value):
    error = refused(http.post(COMPLETIONS, json={**ONE, field: value}))
    # A prompt too long and one field of an object are named as what they belong to.
    assert re.split(r"[.\[]", error["param"] or "")[0] == field
    assert engine.started == 0


HELLO = {"role": "user", "content": "hi"}
CONVERSATIONS = [
    None, "hi", [], [123], [{}], [HELLO, {}], [{"role": "king", "content": "hi"}], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": 1}], [{"role": "user", "content": []}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://192.0.2.1/x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], [{"role": "user", "content": "a " * 3000}],
    [{"role": "user", "content": "bad template"}], [{"role": "user", "content": ""}],
]  # fmt: skip


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda value: f"{value!r:.40}")
def test_conversations_that_are_none(http, engine, messages):
    error = refused(http.post(CHAT, json={"messages": messages, "max_tokens": 4}))
    assert error["param"].startswith("messages")
    assert engine.started == 0


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BAD_TOOL = {**TOOL, "function": {"name": "f", "parameters": "x"}}
CHAT_FIELDS = [
    *[("tools", value) for value in ({}, "x", [1], [{"type": "function"}], [BAD_TOOL], [TOOL] * 129)],
    *[("tool_choice", value) for value in ("required", 7, {"type": "function", "function": {"name": "f"}})],
    *[("response_format", value) for value in ("json", {"type": "sound"})],
    *[("logprobs", value) for value in (1, "true")],
    *[("top_logprobs", 3), ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"tokenize": True}), ("max_completion_tokens", "4")],
    *[("n", 129), ("best_of", 2), ("service_tier", "gold"), ("deadline_ms", 0), ("predicted_tokens", 0)],
    *[("modalities", ["audio"]), ("continue_final_message", 1), ("functions", [{}])],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CHAT_FIELDS, ids=[f"{name}={value!r:.24}" for name, value in CHAT_FIELDS])
def test_chat_fields_that_are_wrong_or_not_supported(http, field, value):
    error = refused(http.post(CHAT, json={"messages": [HELLO], "max_tokens": 4, field: value}))
    assert re.split(r"[.\[]", error["param"])[0] == field


def test_a_message_says_what_is_allowed(http):
    reported = {
        "temperature": refused(http.post(COMPLETIONS, json={**ONE, "temperature": -1})),
        "suffix": refused(http.post(COMPLETIONS, json={**ONE, "suffix": "x"})),
        "service_tier": refused(http.post(COMPLETIONS, json={**ONE, "service_tier": "gold"})),
        "top_k": refused(http.post(COMPLETIONS, json={**ONE, "top_k": "3"})),
        "model": refused(http.post(COMPLETIONS, json={**ONE, "model": "x"}), 404),
        "messages": refused(http.post("/v1/chat/completions", json={"messages": []})),
    }
    assert "from 0 to 100" in reported["temperature"]["message"]
    assert "suffix is not supported: leave it out or send ''" in reported["suffix"]["message"]
    assert "'priority' or 'scale', got 'gold'" in reported["service_tier"]["message"]
    assert reported["top_k"]["message"] == "top_k is invalid: it should be a valid integer, got '3'"
    assert reported["messages"]["message"] == "messages is invalid: it should have at least 1 item, not 0, got []"
    assert reported["model"]["code"] == "model_not_found"
    assert MODEL in reported["model"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": "a" * 1000, "echo": True, "logprobs": 20, "n": 13}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 100, "n": 11}, "n"),
        ({"prompt": ["a"] * 100, "n": 2, "best_of": 11}, "best_of"),
    ],
)
def test_fields_that_do_not_go_together(http, engine, fields, param):
    assert refused(http.post(COMPLETIONS, json={**ONE, **fields}))["param"] == param
    assert engine.started == 0


@pytest.mark.parametrize("name", ["x-request-deadline-ms", "x-request-ttft-deadline-ms"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e300"])
def test_deadlines_in_headers_that_are_none(http, engine, name, value):
    assert refused(http.post(COMPLETIONS, json=ONE, headers={name: value}))["param"] == name
    assert engine.started == 0


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, 'a"b', "a,b", "../a"])
def test_tenants_that_are_none(http, engine, name):
    assert refused(http.post(COMPLETIONS, json=ONE, headers={"x-tenant-id": name}))["param"] == "x-tenant-id"
    refused(http.post(COMPLETIONS, json=ONE, headers=[("x-tenant-id", "a"), ("x-tenant-id", "b")]))
    assert engine.started == 0


@pytest.mark.parametrize("name", ["../../etc/passwd", "evil/repo", "m" * 100_000])
def test_models_that_are_not_served(http, name):
    assert len(refused(http.post(COMPLETIONS, json={**ONE, "model": name}), 404)["message"]) < 300


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "application/octet-stream", ";"]
)
def test_bodies_that_a_web_page_could_send_unasked(http, kind):
    own = str(http.base_url).rstrip("/")
    refused(http.post(COMPLETIONS, content=json.dumps(ONE), headers={"content-type": kind, "origin": own}), 415)


@pytest.mark.parametrize(
    "kind",
    ["text/plain; charset=UTF-8", "application/x-www-form-urlencoded", "application/octet-stream", "Application/JSON; charset=utf-8"],
)
def test_types_that_clients_add_to_a_body(http, kind):
    """`curl -d`, `fetch` outside a browser, and aiohttp do so."""
    assert http.post(COMPLETIONS, content=json.dumps(ONE), headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/xml"])
def test_bodies_of_other_types(http, kind):
    refused(http.post(COMPLETIONS, content=json.dumps(ONE), headers={"content-type": kind}), 415)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages", "/api/chat", "/api/generate", "/tokenize"])
def test_a_body_without_a_type_is_json_unless_a_browser_sent_it(http, path):
    said = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "options": {"num_predict": 1}}
    if path == "/tokenize":
        del said["messages"]
    content = json.dumps(said)
    assert http.post(path, content=content).status_code == 200
    assert http.post(path, content=content, headers={"content-type": ""}).status_code == 200
    own = str(http.base_url).rstrip("/")
    for origin, status in ((own, 415), ("null", 403), ("https://evil.example", 403)):
        assert http.post(path, content=content, headers={"origin": origin}).status_code == status


def test_no_page_of_another_site_sends_a_body_without_a_type_to_a_server_for_the_network():
    engine = ScriptedEngine()
    with serving(engine, host="0.0.0.0") as (base, _):  # it accepts any host, and has no key that a page would lack
        for origin in ("https://evil.example", "null"):
            assert httpx.post(f"{base}{COMPLETIONS}", content=json.dumps(ONE), headers={"origin": origin}).status_code == 415
        assert engine.started == 0
        assert httpx.post(f"{base}{COMPLETIONS}", content=json.dumps(ONE)).status_code == 200


def test_compressed_bodies_are_not_inflated(http):
    refused(http.post(COMPLETIONS, content=b"x", headers={"content-type": "application/json", "content-encoding": "gzip"}), 415)


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_have_a_limit(http, chunked):
    pieces = [b'{"prompt":"', *[b"a" * 65536] * 33, b'"}']
    body = iter(pieces) if chunked else b"".join(pieces)
    refused(http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 413)


RAW = {
    "a length that cannot be": (b"content-length: 99999999999\r\n\r\n", b"413"),
    "two ideas of the length": (
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"400",
    ),
    "a negative length": (b"content-length: -1\r\n\r\n{}", b"400"),
    "a header without end": (b"x-a: " + b"a" * 200_000, b"400"),
}


@pytest.mark.parametrize(("end", "status"), RAW.values(), ids=RAW.keys())
def test_requests_that_no_client_library_would_send(base, http, end, status):
    with connected(base) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + end)
        got = rest(sock)
    assert got.startswith(b"HTTP/1.1 " + status)
    assert got.count(b"HTTP/1.1 ") == 1
    assert http.get("/health").status_code == 200


def test_other_routes_and_methods(http):
    assert refused(http.get("/v1/nothing"), 404)["code"] == "not_found"
    refused(http.get("/v1/models/..%2f..%2fetc%2fpasswd"), 404)
    put = http.put(COMPLETIONS, json=ONE)
    assert refused(put, 405)["code"] == "method_not_allowed"
    assert "takes POST" in put.json()["error"]["message"]
    assert put.headers["allow"] == "POST"
    for path, methods in [("/v1/files", "GET, HEAD, POST"), ("/v1/files/file-1", "DELETE, GET, HEAD"), ("/live", "GET, HEAD")]:
        assert http.put(path).headers["allow"] == methods


def test_unknown_fields_are_told_not_refused(http):
    response = http.post(COMPLETIONS, json={**ONE, "zzz": 1, "evil\r\nx-evil: 1": 2, "user": "u", "metadata": {"a": "b"}})
    assert response.status_code == 200
    assert response.headers["x-chairlift-ignored"] == "zzz, evil%0D%0Ax-evil%3A%201"
    assert "x-evil" not in response.headers


ONE_TURN = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES_BY_ROUTE = {
    "/v1/completions": ONE,
    "/v1/chat/completions": ONE_TURN,
    "/v1/messages": ONE_TURN,
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES_BY_ROUTE)
def test_every_route_names_the_fields_that_it_does_not_know(http, path, stream):
    body = BODIES_BY_ROUTE[path] | {"max_token": 5, "größe": 1, "a b": None, "": 2, "x" * 100: 3, "stream": stream}
    response = http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["x-chairlift-ignored"] == f"max_token, gr%C3%B6%C3%9Fe, a%20b, %00, {'x' * 64}"


def test_fields_of_options_that_nobody_knows_are_named_with_their_place(http):
    options = {"include_usage": True, "include_usages": True}
    response = http.post(COMPLETIONS, json={**ONE, "stream": True, "stream_options": options, "text": {"a": 1}})
    assert response.headers["x-chairlift-ignored"] == "text, stream_options.include_usages"
    response = http.post("/v1/responses", json={"input": "a", "text": {"formats": {}}})
    assert response.headers["x-chairlift-ignored"] == "text.formats"


def test_many_unknown_fields_are_counted(http):
    response = http.post(COMPLETIONS, json={**ONE, **{f"f{i}": i for i in range(70)}})
    names = response.headers["x-chairlift-ignored"].split(", ")
    assert names == [*(f"f{i}" for i in range(64)), "and 6 more"]


@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_stream_options_without_a_stream(http, path, stream):
    body = BODIES_BY_ROUTE[path] | {"stream": stream}
    error = refused(http.post(path, json=body | {"stream_options": {"include_usage": True}}))
    assert error["param"] == "stream_options"
    assert error["message"].startswith("stream_options needs stream")
    assert http.post(path, json=body | {"stream_options": None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/responses", {"top_logprobs": 21}, "top_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/responses", {"max_output_tokens": -1}, "max_output_tokens"),
        ("/v1/messages", {"max_tokens": -1}, "max_tokens"),
    ],
)
def test_an_error_names_the_field_as_the_client_sent_it(http, path, fields, param):
    answer = http.post(path, json=BODIES_BY_ROUTE[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} must be ")


def test_a_stream_beside_all_this_is_unharmed(http, base, engine):
    prompt, got = "paused and steady", []

    def ride():
        request = {"prompt": prompt, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", base + COMPLETIONS, json=request, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    got.append(json.loads(line[6:])["choices"][0]["text"])

    rider = threading.Thread(target=ride)
    rider.start()
    wait_until(lambda: len(got) == 2)
    for _ in range(3):
        for body in BODIES.values():
            refused(http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}))
        refused(http.post(COMPLETIONS, json={**ONE, "temperature": "hot"}))
        http.post(COMPLETIONS, json={"prompt": "bug", "max_tokens": 9})
    engine.released = True
    rider.join(20)
    assert "".join(got) == answer(prompt, 100)


def refused(response, status=400):
    """The error of a refusal, whose form is checked."""
    assert response.status_code == status, response.text[:300]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not re.search(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages", response.text)
    assert len(response.content) < 1000
    return error
