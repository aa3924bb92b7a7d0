"""JSON schemas without properties that they do not name."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

SCHEMA_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose values are objects of schemas."""
SCHEMAS = frozenset(("items", "additionalProperties", "allOf", "anyOf", "oneOf", "prefixItems"))
"""Keywords whose values are schemas, or lists of them."""
_OWN = ("properties", "required", "additionalProperties", "minProperties", "patternProperties", "propertyNames")
"""Keywords that say which properties an object has."""
_OTHER_PROPERTIES = (
    *("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const"),
    *("dependentRequired", "dependentSchemas", "dependencies", "minProperties", "patternProperties", "propertyNames"),
)
"""Keywords that may require or allow properties which are not among `properties`, beside `required`."""

_APPLIED = ("allOf", "anyOf", "oneOf")
"""Keywords with schemas for the same value."""

_Schema = dict[str, Any]


def closed(schema: _Schema) -> _Schema:
    """Returns a schema of objects without properties that it does not name, unless it says something of others.

    JSON Schema allows them, but a function takes no other arguments, and vLLM, llama.cpp and TGI let a model add none. What several schemas
    describe together, as those in `allOf` do, stays as it is: each of them would exclude the properties that the others name.
    """
    together = _together(schema)
    return schema if together is None else _closed(schema, together)


def _closed(schema: Any, together: set[int]) -> Any:
    if not isinstance(schema, dict) or id(schema) in together:
        return schema
    made: _Schema = {}
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            made[key] = {name: _closed(inner, together) for name, inner in value.items()}
        elif key in SCHEMAS:
            made[key] = [_closed(inner, together) for inner in value] if isinstance(value, list) else _closed(value, together)
        else:
            made[key] = value
    return made | {"additionalProperties": False} if _names_all(schema) else made


def _names_all(schema: _Schema) -> bool:
    """Whether a schema names properties and says nothing of others."""
    named, required = schema.get("properties"), schema.get("required") or []
    if not isinstance(named, dict) or not isinstance(required, list) or any(schema.get(name) for name in _OTHER_PROPERTIES):
        return False
    return schema.get("additionalProperties") is None and all(name in named for name in required if isinstance(name, str))


def _together(root: _Schema) -> set[int] | None:
    """Returns the ids of schemas that describe a value together with others, and of those within; None if one of them is not in `root`."""
    pending: list[_Schema | None] = []
    schemas = [root]
    while schemas:
        schema = schemas.pop()
        schemas += _within(schema)
        if _is_combined(schema):
            pending += [*(inner for name in _APPLIED for inner in _dicts(schema.get(name))), *_referred(schema, root)]
    found: set[int] = set()
    while pending:
        part = pending.pop()
        if part is None:
            return None
        if id(part) not in found:
            found.add(id(part))
            pending += [*_within(part), *_referred(part, root)]
    return found


def _is_combined(schema: _Schema) -> bool:
    """Whether several schemas, or one and the keywords beside it, describe the same value."""
    all_of = schema.get("allOf")
    count = len(all_of) if isinstance(all_of, list) else 0
    return count + sum(bool(schema.get(name)) for name in ("anyOf", "oneOf", "$ref")) + any(schema.get(name) for name in _OWN) > 1


def _within(schema: _Schema) -> list[_Schema]:
    """Returns the schemas that are parts of a schema."""
    maps = [inner for name in SCHEMA_MAPS if isinstance(value := schema.get(name), dict) for inner in _dicts(list(value.values()))]
    return maps + [inner for name in SCHEMAS for inner in _dicts(schema.get(name))]


def _dicts(value: object) -> list[_Schema]:
    """Returns the schemas among the value of a keyword, which is one or a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _referred(schema: _Schema, root: _Schema) -> list[_Schema | None]:
    """Returns the schema in `root` that a schema refers to; None if it is not there, and nothing without a reference."""
    reference = schema.get("$ref")
    if not reference:
        return []
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return [None]
    here: object = root
    for name in unquote(reference).split("/")[1:]:
        here = here.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(here, dict) else None
    return [here if isinstance(here, dict) else None]
