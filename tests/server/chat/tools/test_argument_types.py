import pytest
from cpu_cost import cost

from chairlift.chat.tools.argument_types import argument_types

LOOP = {"$ref": "#/$defs/x"}
CHAIN = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(20)} | {"r20": {"type": "integer"}}


def types_of(schema, **defs):
    return argument_types({"type": "object", "properties": {"a": schema}, "$defs": defs})["a"]


@pytest.mark.parametrize(
    ("schema", "defs", "types"),
    [
        ({"$ref": "#/$defs/r0"}, CHAIN, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "null"}]}, {"x": {"const": "a"}}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, {}, set()),
        ({"allOf": [{"minLength": 1}, {"type": "string"}]}, {}, {"string"}),
        ({"type": ["string", "file", 1]}, {}, {"string"}),
        (LOOP, {"x": LOOP}, set()),
        (LOOP, {"x": {"anyOf": [{"type": "string"}, LOOP]}}, set()),
        (LOOP, {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(9000)} | {"x": {"$ref": "#/$defs/r0"}}, set()),
    ],
)
def test_schemas_tell_types(schema, defs, types):
    assert types_of(schema, **defs) == types


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": LOOP}, "$defs": {"x": {"anyOf": [LOOP] * 50}}},
        {
            "properties": {"a": LOOP},
            "$defs": {"x": {"anyOf": [{"$ref": f"#/$defs/x{i}"} for i in range(50)]}}
            | {f"x{i}": {"allOf": [{"$ref": f"#/$defs/x{j}"} for j in range(50)]} for i in range(50)},
        },
        {"properties": {str(i): LOOP for i in range(2000)}, "$defs": {"x": {"enum": ["word"] * 200_000}}},
        {"properties": {str(i): LOOP for i in range(2000)}, "$defs": {"x": {"type": [str(i) for i in range(50_000)]}}},
    ],
    ids=["loop", "mesh", "enum", "types"],
)
def test_no_schema_takes_long(parameters):
    assert cost(lambda: argument_types(parameters)) < 100
