"""Types of arguments that a model writes as plain text: the function's JSON schema tells text from numbers, objects and the like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_MAX_REFERENCES = 16
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write earlier arguments with Jinja's `string` filter, so models write Python's words too."""


def argument_types(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """Returns the JSON types that a function's `parameters` allow for one argument; none if they do not say."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters, _MAX_REFERENCES))


def argument_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument that a model wrote as `text`: the value that it spells if that has one of `types`, else the text."""
    word = text.strip()
    try:
        value = from_json(_PYTHON.get(word, word), allow_inf_nan=False)
    except ValueError:
        value = text
    if isinstance(value, str) or ("string" in types and types.isdisjoint(_types_of(value))):
        value = text
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Any, references: int) -> set[str]:
    if not isinstance(schema, Mapping) or not references:
        return set()
    match schema:
        case {"$ref": str(reference)} if reference.startswith("#/"):
            target = root
            for step in reference[2:].split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            return _types(target, root, references - 1)
        case {"type": str(one)}:
            return {one}
        case {"type": [*several]}:
            return {one for one in several if isinstance(one, str)}
        case {"enum": [*values]}:
            return {name for value in values for name in _types_of(value)}
        case {"const": value}:
            return _types_of(value)
        case {"anyOf": [*branches]} | {"oneOf": [*branches]}:
            allowed = [_types(branch, root, references - 1) for branch in branches]
            return set().union(*allowed) if all(allowed) else set()
        case {"allOf": [*branches]}:
            return next(filter(None, (_types(branch, root, references - 1) for branch in branches)), set())
    return set()


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
