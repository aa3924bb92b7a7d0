"""Fields for structured output: `response_format`, `structured_outputs` and vLLM's older `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from chairlift.errors import InvalidRequest
from chairlift.sampling import MAX_GRAMMAR, StructuredOutput
from chairlift.server.errors import brief

MAX_DEPTH = 32
"""Maximum nesting of a JSON schema, where each level of properties counts twice, and of the chat template's inputs."""
MAX_REGEX = 8192
MAX_CHOICES = 4096
MAX_COUNT = 65_536
"""Maximum for a schema's minimum number of characters, items or properties: no answer has more."""

_MINIMUM_KEYWORDS = frozenset(("minLength", "minItems", "minProperties", "minContains"))
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_RESPONSE_FORMAT = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "schema": {"type": "object"}, "strict": {"type": "boolean"}},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_KIND_SCHEMAS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": {"type": "string", "maxLength": MAX_REGEX},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": {"type": "string", "maxLength": MAX_GRAMMAR},
    "json_object": {"const": True},
}
_STRUCTURED = {"type": "object", "properties": _KIND_SCHEMAS, "minProperties": 1, "maxProperties": 1, "additionalProperties": False}


class StructuredOutputFields(BaseModel):
    """The structured-output fields of a request, of which at most one may be set."""

    response_format: Annotated[Any, WithJsonSchema(_RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(_STRUCTURED)] = None
    guided_json: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["json"])] = None
    guided_regex: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["regex"])] = None
    guided_choice: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["choice"])] = None
    guided_grammar: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["grammar"])] = None

    def structured_output(self) -> StructuredOutput | None:
        """Returns the structured output that the request asks for; raises InvalidRequest."""
        names = [name for name in StructuredOutputFields.model_fields if getattr(self, name) is not None]
        if len(names) > 1:
            raise InvalidRequest(f"{' and '.join(names)} are both set: send only one", param=names[1])
        if not names:
            return None
        [name] = names
        value = getattr(self, name)
        if name == "response_format":
            return _response_format(value)
        if name == "structured_outputs":
            return _structured_outputs(value)
        return _structured_output(name.removeprefix("guided_"), value, name, name)


def schema_text(schema: object, param: str, where: str) -> str:
    """Serializes a JSON schema; raises InvalidRequest for one that is too large or too deep, naming it as `where`.

    Checks everything that needs no compilation, in bounded time for a schema of any size.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} must be a JSON schema, which is an object, got {brief(schema)}", param=param)
    size = 0
    pending: list[tuple[object, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        # A lower bound of the text's length: entries with the punctuation between them.
        match value:
            case str():
                size += len(value)
            case list():
                size += 3 * len(value)
            case dict():
                size += 7 * len(value)
        if size > MAX_GRAMMAR:
            raise InvalidRequest(f"{where} has more than {MAX_GRAMMAR} characters: make it shorter", param=param)
        if isinstance(value, dict | list) and depth > MAX_DEPTH:
            raise InvalidRequest(f"{where} is nested deeper than {MAX_DEPTH} levels: make it flatter", param=param)
        if isinstance(value, dict):
            _check_keywords(value, param, where)
            size += sum(map(len, value))
            pending += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, depth + 1) for inner in value]
    return _text(json.dumps(schema, ensure_ascii=False), MAX_GRAMMAR, param, where)


def _check_keywords(schema: Mapping[str, Any], param: str, where: str) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        _text(pattern, MAX_REGEX, param, f"a pattern in {where}")
    for keyword in _MINIMUM_KEYWORDS & schema.keys():
        if isinstance(schema[keyword], int | float) and schema[keyword] > MAX_COUNT:
            message = f"{where} has {keyword} {brief(schema[keyword])}, more than any answer has: at most {MAX_COUNT} is allowed"
            raise InvalidRequest(message, param=param)


def _response_format(value: object) -> StructuredOutput | None:
    param = "response_format"
    match value:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return StructuredOutput("json_object", param=param)
        case {"type": "json_schema", "json_schema": {"schema": schema}, **rest} if not rest:
            return StructuredOutput("json", schema_text(schema, param, "response_format.json_schema.schema"), param)
    raise InvalidRequest(
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., '
        f'"schema": {{...}}}}}}, got {brief(value)}',
        param=param,
    )


def _structured_outputs(value: object) -> StructuredOutput:
    param = "structured_outputs"
    if isinstance(value, dict):
        options = {kind: inner for kind, inner in value.items() if inner is not None and (kind, inner) != ("json_object", False)}
        if len(options) == 1 and options.keys() <= set(_KINDS):
            [(kind, inner)] = options.items()
            return _structured_output(kind, inner, param, f"{param}.{kind}")
    raise InvalidRequest(f"structured_outputs must be an object with one of {', '.join(_KINDS)}, got {brief(value)}", param=param)


def _structured_output(kind: str, value: object, param: str, where: str) -> StructuredOutput:
    match kind:
        case "json":
            return StructuredOutput(kind, schema_text(_parsed(value), param, where), param)
        case "json_object" if value is True:
            return StructuredOutput(kind, param=param)
        case "regex" | "grammar" if isinstance(value, str):
            return StructuredOutput(kind, _text(value, MAX_REGEX if kind == "regex" else MAX_GRAMMAR, param, where), param)
        case "choice" if isinstance(value, list) and value and all(isinstance(choice, str) for choice in value):
            if len(value) > MAX_CHOICES:
                raise InvalidRequest(f"{where} has {len(value)} choices, at most {MAX_CHOICES} are allowed", param=param)
            return StructuredOutput(kind, _text(json.dumps(value, ensure_ascii=False), MAX_GRAMMAR, param, where), param)
    expected = {"choice": "a non-empty list of strings", "json_object": "true"}.get(kind, "a string")
    raise InvalidRequest(f"{where} must be {expected}, got {brief(value)}", param=param)


def _parsed(value: object) -> object:
    """Parses a schema that was sent as a string."""
    if not isinstance(value, str) or len(value) > MAX_GRAMMAR:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(text: str, maximum: int, param: str, where: str) -> str:
    if len(text) > maximum:
        raise InvalidRequest(f"{where} has {len(text)} characters, at most {maximum} are allowed: make it shorter", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where} has a lone surrogate (U+{ord(text[error.start]):04X}), which is not valid Unicode"
        raise InvalidRequest(message, param=param) from None
    return text
