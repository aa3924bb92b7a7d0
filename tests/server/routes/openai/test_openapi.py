import re

import pytest

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
