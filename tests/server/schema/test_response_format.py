"""The fields that bound an answer's form: what reaches the engine, and what is refused at the door."""

import json

import openai
import pydantic
import pytest

from chairlift.errors import InvalidRequest
from chairlift.grammar.json_schema import MAX_COUNT, MAX_DEPTH, MAX_REGEX
from chairlift.grammar.source import schemas_by_tool
from chairlift.sampling import MAX_GRAMMAR, StructuredOutput
from chairlift.server.schema.fields import CompletionRequest
from chairlift.server.schema.response_format import MAX_CHOICES

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TEXT = json.dumps(SCHEMA)
CLOSED = json.dumps(SCHEMA | {"additionalProperties": False})
BODIES = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


def deep(levels):
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def as_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}


TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}


def tagged(structures, triggers):
    return {"response_format": {"type": "structural_tag", "structures": structures, "triggers": triggers}}


def wanted(fields):
    """The form that a request with these fields asks for."""
    return CompletionRequest.read(BODIES["/v1/completions"] | fields)[0].params({}).structured_output


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (as_schema(SCHEMA), "json", TEXT),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json", CLOSED),
        ({"structured_outputs": {"json": TEXT, "regex": None, "json_object": False}}, "json", CLOSED),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[0-9]+"}, "response_format": None}, "regex", "[0-9]+"),
        ({"structured_outputs": {"choice": ["yes", "né"]}}, "choice", '["yes", "né"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA}, "json", CLOSED),
        ({"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", TEXT),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json", CLOSED),
        ({"response_format": {"type": "json", "value": TEXT}}, "json", CLOSED),
        ({"response_format": {"type": "regex", "value": "[0-9]{2}"}}, "regex", "[0-9]{2}"),
        ({"response_format": {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}}, "json", CLOSED),
        ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, "json", CLOSED),
        ({"guided_json": SCHEMA}, "json", CLOSED),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json", TEXT),
        ({"response_format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}, "json", TEXT),
        ({"response_format": {"type": "json_object", "json_schema": None}}, "json_object", ""),
        ({"json_schema": SCHEMA}, "json", CLOSED),
        ({"json_schema": TEXT}, "json", CLOSED),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"format": SCHEMA}, "json", CLOSED),
        ({"format": "json", "grammar": ""}, "json_object", ""),
        ({"grammar": {"type": "json", "value": SCHEMA}}, "json", CLOSED),
        ({"grammar": {"type": "regex", "value": "a+"}, "format": ""}, "regex", "a+"),
        ({"guided_regex": "a|b"}, "regex", "a|b"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_a_form_is_read_with_the_field_it_came_from(fields, kind, text):
    [name, *_] = [name for name, value in fields.items() if value not in (None, "")]
    assert wanted(fields) == StructuredOutput(kind, text, name)


@pytest.mark.parametrize("kind", ["json", "json_object"])
@pytest.mark.parametrize(("given", "read"), [(True, True), (False, False), (None, None)])
def test_a_request_says_which_whitespace_may_come(kind, given, read):
    form = {"json": SCHEMA, "json_object": True}[kind]
    assert wanted({"structured_outputs": {kind: form, "disable_any_whitespace": given}}).disable_any_whitespace is read


@pytest.mark.parametrize("form", [{"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}, tagged([TAG], ["<f"])["response_format"]])
def test_forms_without_json_have_no_whitespace_to_turn_off(form):
    if "type" in form:
        form = {"structural_tag": form}
    assert not wanted({"structured_outputs": form | {"disable_any_whitespace": False}}).disable_any_whitespace
    with pytest.raises(InvalidRequest, match="disable_any_whitespace needs json or json_object"):
        wanted({"structured_outputs": form | {"disable_any_whitespace": True}})


def test_text_is_no_form():
    assert wanted({"response_format": {"type": "text"}}) is None


@pytest.mark.parametrize("route", BODIES)
def test_forms_reach_the_engine_and_wrong_ones_do_not(http, engine, route):
    assert http.post(route, json=BODIES[route] | as_schema(SCHEMA)).status_code == 200
    assert [params.structured_output for params in engine.seen] == [StructuredOutput("json", TEXT, "response_format")]
    response = http.post(route, json=BODIES[route] | as_schema(123))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "sound"}}, "response_format", "must be"),
        ({"response_format": "json"}, "response_format", "must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
        ({"response_format": {"type": "json_object", "schema": 7}}, "response_format", "is an object"),
        ({"response_format": {"type": "json_object", "scheme": SCHEMA}}, "response_format", "must be"),
        ({"response_format": {"type": "regex", "value": SCHEMA}}, "response_format", "response_format.value must be a string"),
        ({"response_format": {"type": "json", "value": 7}}, "response_format", "response_format.value must be a JSON schema"),
        ({"response_format": {"type": "json", "value": SCHEMA, "schema": SCHEMA}}, "response_format", "must be"),
        ({"response_format": {"type": "json_schema", "value": {"name": "a", "schema": 7}}}, "response_format", "value.schema must be"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex", "send only one"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA}, "guided_json", "send only one"),
        ({"json_schema": deep(MAX_DEPTH + 1)}, "json_schema", f"deeper than {MAX_DEPTH}"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "json_schema", f"deeper than {MAX_DEPTH}"),
        (
            as_schema({"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}),
            "response_format",
            "schema.properties.a.anyOf[1] has the keyword not",
        ),
        (as_schema({"$defs": {"a": {"pattern": "a(?!b)"}}}), "response_format", "schema.$defs.a has a pattern with look-around"),
        (as_schema({"pattern": "a(?!b)", "format": "path"}), "response_format", "has a pattern with look-around"),
        ({"grammar": "root ::= x"}, "grammar", "GBNF is not supported"),
        ({"ebnf": "root ::= x"}, "ebnf", "not supported"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"format": "xml"}, "format", "is an object"),
        ({"regex": 7}, "regex", "must be a string"),
        ({"regex": "a", "format": "json"}, "format", "send only one"),
        (tagged([{"begin": "<f>", "schema": {}}], ["<f>"]), "response_format", "structures[0] must be"),
        (tagged([{"begin": "<f>", "schema": 7, "end": ""}], ["<f>"]), "response_format", "structures[0].schema must be"),
        (tagged([{"begin": "<f>", "schema": {}, "end": ""}], ["<g>"]), "response_format", "has the trigger '<g>'"),
        (tagged([TAG, {"begin": "(", "schema": {}, "end": ""}], ["<f"]), "response_format", "begins with '('"),
        (tagged([TAG], []), "response_format", "must have lists"),
        (tagged([TAG], [""]), "response_format", "must have lists"),
        (tagged([TAG] * 257, ["<f"]), "response_format", "at most 256"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "must have lists"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        (as_schema(123), "response_format", "is an object"),
        (as_schema(deep(MAX_DEPTH + 1)), "response_format", f"deeper than {MAX_DEPTH}"),
        (as_schema({"enum": [f"e{i}" for i in range(50_000)]}), "response_format", f"more than {MAX_GRAMMAR}"),
        (as_schema({"properties": {f"p{i}": {} for i in range(10_000)}}), "response_format", f"more than {MAX_GRAMMAR}"),
        (as_schema({"description": "x" * MAX_GRAMMAR}), "response_format", f"more than {MAX_GRAMMAR}"),
        (as_schema({"items": {"minItems": MAX_COUNT + 1}}), "response_format", "minItems"),
        (as_schema({"items": {"minLength": 1e300}}), "response_format", "minLength"),
        (as_schema({"pattern": "a" * (MAX_REGEX + 1)}), "response_format", "a pattern"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is an object"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "must be true"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "one of json"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}},
            "structured_outputs",
            "disable_any_whitespace must be true or false",
        ),
        (as_schema({"x-guidance": 7}), "response_format", "schema.x-guidance must be an object"),
        (as_schema({"x-guidance": None}), "response_format", "schema.x-guidance must be an object"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs", "must be a string"),
        ({"structured_outputs": {"regex": "a" * (MAX_REGEX + 1)}}, "structured_outputs", f"at most {MAX_REGEX}"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "non-empty"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs", f"at most {MAX_CHOICES}"),
        ({"structured_outputs": {"choice": ["a" * MAX_GRAMMAR]}}, "structured_outputs", f"at most {MAX_GRAMMAR}"),
        ({"guided_grammar": "a" * (MAX_GRAMMAR + 1)}, "guided_grammar", f"at most {MAX_GRAMMAR}"),
        ({"guided_choice": "a"}, "guided_choice", "list of strings"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "send only one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "where the answer ends"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "where the answer ends"),
        ({"guided_regex": "\ud800"}, "guided_regex", "U+D800"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_form_or_too_large_is_refused(fields, param, says):
    with pytest.raises(InvalidRequest) as refused:
        wanted(fields)
    assert refused.value.param == param
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("fields", [as_schema(deep(MAX_DEPTH)), {"guided_regex": "a" * MAX_REGEX}, {"guided_choice": ["a"] * MAX_CHOICES}])
def test_what_is_just_within_the_limits_is_taken(fields):
    assert wanted(fields)


def test_the_schema_of_a_pydantic_model_is_what_openai_sends(client, engine):
    class Person(pydantic.BaseModel):
        name: str

    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="org/fake-model", **BODIES["/v1/chat/completions"], response_format=Person)
    sent = engine.seen[-1].structured_output
    assert (sent.kind, json.loads(sent.text)["required"]) == ("json", ["name"])


PROGRAM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "path"},
        "port": {"type": "integer", "format": "int32"},
        "day": {"type": "string", "format": "date"},
        "format": {"enum": ["uniqueItems", {"not": 1}], "default": {"not": 1}},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "ids": {"type": "array", "uniqueItems": False},
        "map": {"type": "object", "propertyNames": {"pattern": "^a"}},
        "mail": {"type": "string", "format": "email", "pattern": "^(?!\\.)a*@b$"},
        "not": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]},
    },
}


def test_keywords_that_no_grammar_enforces_are_taken_out_with_a_note(http, engine):
    for path, body in BODIES.items():
        response = http.post(path, json=body | as_schema(PROGRAM))
        assert response.status_code == 200
        sent = json.loads(engine.seen[-1].structured_output.text)["properties"]
        assert (sent["file"], sent["port"], sent["day"]) == ({"type": "string"}, {"type": "integer"}, PROGRAM["properties"]["day"])
        assert sent["format"] == PROGRAM["properties"]["format"]
        assert sent["tags"] == {"type": "array", "items": {"type": "string"}}
        assert sent["map"] == {"type": "object"}
        assert sent["mail"] == {"type": "string", "format": "email"}
        assert response.headers["x-chairlift-ignored"].split(", ") == [
            "response_format.properties.tags.uniqueItems",
            "response_format.properties.map.propertyNames",
            "response_format.properties.mail.pattern",
            "response_format.properties.not.anyOf%5B1%5D.uniqueItems",
        ]


NULLS = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": None, "items": None, "not": None, "uniqueItems": None},
        "b": {"const": None, "default": None},
        "c": {"anyOf": [{"enum": ["x", None], "description": None}, {"type": "integer", "minimum": None}]},
    },
    "required": None,
    "additionalProperties": None,
    "$defs": None,
}
NO_NULLS = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"const": None, "default": None},
        "c": {"anyOf": [{"enum": ["x", None]}, {"type": "integer"}]},
    },
}


def test_keywords_that_are_null_say_nothing(http, engine):
    path = "/v1/chat/completions"
    response = http.post(path, json=BODIES[path] | as_schema(NULLS))
    assert json.loads(engine.seen[-1].structured_output.text) == NO_NULLS
    assert "x-chairlift-ignored" not in response.headers
    for schema, kept in ((NULLS, NO_NULLS | {"additionalProperties": False}), ({"type": None, "properties": None}, {"type": "object"})):
        tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
        assert http.post(path, json=BODIES[path] | {"tools": [tool], "tool_choice": "required"}).status_code == 200
        [forced] = schemas_by_tool(engine.seen[-1].structured_output).values()
        assert forced | {"x-guidance": None} == kept | {"x-guidance": None}


def test_notes_and_errors_about_tools_name_the_tool_and_the_field(http, engine):
    def post(schema):
        tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"a": schema}}}}
        return http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | {"tools": [tool], "tool_choice": "required"})

    assert post({"type": "array", "uniqueItems": True}).headers["x-chairlift-ignored"] == "tools.find.properties.a.uniqueItems"
    assert "uniqueItems" not in engine.seen[-1].structured_output.text
    error = post({"if": {}}).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("tools.find.properties.a has the keyword if")


def test_a_prompt_may_be_cut_to_the_context(client, engine):
    prompt = "a" * 5000
    usage = client.completions.create(model="org/fake-model", prompt=prompt, max_tokens=48, extra_body={"truncate_prompt_tokens": -1}).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2000, 48)
    messages = [{"role": "user", "content": "b" * 2040 + " SAY:hello"}]
    usage = client.chat.completions.create(model="org/fake-model", messages=messages, extra_body={"truncate_prompt_tokens": -1}).usage
    assert usage.prompt_tokens == 2047
