"""Schemas without properties that they do not name."""

import json

import pytest
from grammar_forms import structure

from chairlift.grammar.closed_schema import closed

OPEN = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = OPEN | {"additionalProperties": False}
BASE = {"$ref": "#/$defs/base"}


def parsed(schema):
    """The schema as a request has it: no part is in two places."""
    return json.loads(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"properties": {"a": OPEN}}, {"properties": {"a": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"items": [OPEN], "prefixItems": [OPEN, {}]}, {"items": [CLOSED], "prefixItems": [CLOSED, {}]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"oneOf": [OPEN, True]}, {"oneOf": [CLOSED, True]}),
        (BASE | {"$defs": {"base": OPEN}}, BASE | {"$defs": {"base": CLOSED}}),
        ({"allOf": [BASE], "title": "a", "$defs": {"base": OPEN}}, {"allOf": [BASE], "title": "a", "$defs": {"base": CLOSED}}),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
        ({"patternProperties": {"^a": OPEN}}, {"patternProperties": {"^a": CLOSED}}),
        (OPEN | {"additionalProperties": None}, CLOSED),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    ],
)
def test_objects_within_have_no_other_properties(schema, expected):
    given = parsed(schema)
    assert closed(given) == expected
    assert given == schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": {"type": "integer"}},
        OPEN | {"required": ["city"]},
        OPEN | {"propertyNames": {"pattern": "a"}},
        {"const": OPEN, "enum": [OPEN], "default": OPEN, "examples": OPEN},
        {"allOf": [OPEN, {"properties": {"a": OPEN}}]},
        OPEN | {"anyOf": [OPEN, {"required": ["a"]}]},
        OPEN | BASE | {"$defs": {"base": OPEN}},
        {"allOf": [BASE, OPEN], "$defs": {"base": {"$ref": "#/$defs/a~1b"}, "a/b": OPEN}},
        {"allOf": [BASE, OPEN], "$defs": {"base": {"anyOf": [{"$ref": "#/$defs/a%20b"}]}, "a b": OPEN}},
        {"allOf": [{"$ref": "#"}, OPEN], "items": OPEN},
        *({"allOf": [{"$ref": reference}, OPEN], "$defs": {"a": OPEN}} for reference in ("#a", "#/a/b", "other.json", 7)),
    ],
)
def test_what_is_described_elsewhere_too_stays_open(schema):
    assert closed(parsed(schema)) == schema


def test_only_what_is_described_elsewhere_too_stays_open():
    schema = {"allOf": [BASE, OPEN], "$defs": {"base": OPEN, "other": OPEN}}
    assert closed(parsed(schema)) == schema | {"$defs": {"base": OPEN, "other": CLOSED}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 7, "required": 7, "anyOf": 7, "allOf": {}, "items": "a", "$defs": [OPEN], "$ref": 7},
        {"properties": {"a": 7}, "required": [7], "items": [7], "allOf": [7, None]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b", "allOf": [{}]}, "b": {"$ref": "#/$defs/a", "allOf": [{}]}}},
    ],
)
def test_schemas_that_are_wrong_are_left_to_the_compiler(schema):
    assert closed(parsed(schema)) == schema


def test_the_grammar_of_a_closed_schema_takes_what_is_named(takes):
    city = {"type": "object", "allOf": [BASE, {"properties": {"city": {"const": "Bern"}}, "required": ["city"]}]}
    schema = {"type": "object", "properties": {"at": city, "by": OPEN}, "required": ["at", "by"], "$defs": {"base": OPEN}}
    form = structure("json", closed(parsed(schema)))
    assert takes(form, '{"at":{"name":"a","city":"Bern"},"by":{"name":"b"}}')
    assert not takes(form, '{"at":{"name":"a","city":"Bern"},"by":{"name":"b","age":1}}')
