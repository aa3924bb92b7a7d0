"""Types of arguments that a model writes as plain text: the function's JSON schema tells text from numbers, objects and the like."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_JSON_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_DEPTH = 64
"""Maximum nesting of references and branches; what lies deeper says nothing."""
_NONE: frozenset[str] = frozenset()
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""What models write for JSON's words too: templates write earlier arguments with Jinja's `string` filter."""


def argument_types(parameters: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """Returns the JSON types that a function's `parameters` allow for each argument; none where they do not say.

    The time is linear in the size of the schema, so a large one belongs in a thread.
    """
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    resolved: dict[str, frozenset[str]] = {}
    return {name: _types(schema, parameters, resolved, _MAX_DEPTH) for name, schema in properties.items()}


def argument_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument that a model wrote as `text`: its value if that has one of `types`, else the text.

    Where no text is allowed, the value may be spelled as a literal of Python.
    """
    word = text.strip()
    try:
        value = from_json(PYTHON_WORDS.get(word, word), allow_inf_nan=False)
    except ValueError:
        value = text if not types or "string" in types else _python_value(word)
    if isinstance(value, str) or ("string" in types and types.isdisjoint(_types_of(value))):
        value = text
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # no response could carry half a surrogate pair
        return written
    except (TypeError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _python_value(text: str) -> Any:
    """Returns the value of a literal; the text if it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return text


def _types(schema: Any, root: Any, resolved: dict[str, frozenset[str]], depth: int) -> frozenset[str]:
    """Returns the types that `schema` allows. `resolved` has the types of each reference; while one is resolved, it has none."""
    if not isinstance(schema, Mapping) or not depth:
        return _NONE
    match schema:
        case {"$ref": str(reference)} if reference.startswith("#/"):
            if reference not in resolved:
                resolved[reference] = _NONE
                target = root
                for step in reference[2:].split("/"):
                    target = target.get(step) if isinstance(target, Mapping) else None
                resolved[reference] = _types(target, root, resolved, depth - 1)
            return resolved[reference]
        case {"type": str(one)}:
            return _JSON_TYPES & {one}
        case {"type": [*several]}:
            return _JSON_TYPES & {one for one in several if isinstance(one, str)}
        case {"enum": [*values]}:
            return frozenset(name for value in values for name in _types_of(value))
        case {"const": value}:
            return _types_of(value)
        case {"anyOf": [*branches]} | {"oneOf": [*branches]}:
            allowed = [_types(branch, root, resolved, depth - 1) for branch in branches]
            return _NONE.union(*allowed) if all(allowed) else _NONE
        case {"allOf": [*branches]}:
            return next(filter(None, (_types(branch, root, resolved, depth - 1) for branch in branches)), _NONE)
    return _NONE


def _types_of(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
