import re

import pytest

from chairlift.chat.answer import Delta
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.server.app import routes

pytestmark = pytest.mark.shared_server


@pytest.fixture
def document(http):
    return http.get("/openapi.json").json()


def test_every_route_of_the_api_is_described_and_no_other(document):
    pages = {"/openapi.json", "/dashboard", "/dashboard/data"}
    served: dict[str, set[str]] = {}
    for route in routes():
        served.setdefault(re.sub(r"\{\w+(:path)?\}", "{}", route.path), set()).update(route.methods - {"HEAD"})
    reported = {re.sub(r"\{\w+\}", "{}", path): {method.upper() for method in operations} for path, operations in document["paths"].items()}
    assert {path: methods for path, methods in served.items() if path not in pages} == reported


def test_every_reference_leads_somewhere_and_every_schema_is_used(document):
    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            value = list(value.values())
        if isinstance(value, list):
            for inner in value:
                yield from references(inner)

    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == names


def test_every_kind_of_output_is_described(http, document, says):
    says(
        Delta(0, "well", reasoning="hm"),
        Delta(0, calls=[ToolCallDelta(index, "{}", id=f"call_{index}", name="f", custom=bool(index)) for index in range(2)]),
        Delta(0, finish_reason="tool_calls"),
    )
    schemas = document["components"]["schemas"]
    for path, name, field, body in (
        ("/v1/responses", "Response", "output", {"input": "a"}),
        ("/v1/messages", "AnthropicMessage_", "content", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
    ):
        described = schemas[name]["properties"][field]["items"]["properties"]["type"]["enum"]
        assert {one["type"] for one in http.post(path, json=body).json()[field]} == set(described)


def test_a_request_that_embeds_nothing_has_no_count_of_tokens(http, document):
    assert "prompt_eval_count" not in http.post("/api/embed", json={"input": ""}).json()
    assert "prompt_eval_count" not in document["components"]["schemas"]["OllamaEmbeddings"]["required"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt", "echo", "logprobs", "priority", "temperature", "stop"}),
        ("/v1/chat/completions", {"messages", "tools", "top_logprobs", "deadline_ms"}),
        ("/v1/responses", {"input", "instructions", "text"}),
        ("/v1/messages", {"messages", "system", "stop_sequences", "max_tokens"}),
        ("/tokenize", {"prompt", "return_token_strs"}),
    ],
)
def test_requests_have_the_fields_that_are_read(document, path, fields):
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert fields <= document["components"]["schemas"][schema]["properties"].keys()


def test_a_body_that_may_be_empty_is_not_required(document):
    bodies = {
        path: methods["post"]["requestBody"] for path, methods in document["paths"].items() if "requestBody" in methods.get("post", ())
    }
    assert {path for path, body in bodies.items() if not body["required"]} == {"/v1/sequences/{id}/fork", "/v1/sequences/{id}/generate"}
