"""Fields for structured output: `response_format`, `structured_outputs`, vLLM's older `guided_*`, and those of other servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, PrivateAttr, WithJsonSchema

from chairlift.errors import InvalidRequest, brief
from chairlift.grammar.json_schema import MAX_REGEX, checked_schema, checked_text
from chairlift.grammar.source import Tag, tags_grammar
from chairlift.sampling import JSON_STRUCTURES, MAX_GRAMMAR, StructuredOutput

MAX_CHOICES = 4096
MAX_TAGS = 256
"""Maximum number of structures, and of triggers, of a structural tag."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def object_schema(required: dict[str, Any], *, closed: bool = False, **optional: Any) -> dict[str, Any]:
    """Returns the JSON schema of an object with `required` fields and optional ones; if it is `closed`, with no others."""
    others = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": required | optional, "required": list(required), **others}


_LIST = {"type": "array", "minItems": 1, "maxItems": MAX_TAGS}
_NAMED_SCHEMA = object_schema({"schema": {"type": "object"}}, name={"type": "string"}, strict={"type": "boolean"})
_RESPONSE_FORMAT = {
    "oneOf": [
        object_schema({"type": {"const": "text"}}, closed=True),
        object_schema({"type": {"const": "json_object"}}, closed=True, schema={"type": "object"}),
        object_schema(
            {"type": {"enum": ["json", "json_object", "json_schema", "regex"]}, "value": {"type": ["object", "string"]}}, closed=True
        ),
        object_schema(
            {
                "type": {"const": "structural_tag"},
                "structures": {**_LIST, "items": {"type": "object"}},
                "triggers": {**_LIST, "items": {"type": "string"}},
            }
        ),
        object_schema({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}),
    ]
}
_KIND_SCHEMAS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": {"type": "string", "maxLength": MAX_REGEX},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": {"type": "string", "maxLength": MAX_GRAMMAR},
    "json_object": {"const": True},
    "structural_tag": {"type": ["object", "string"]},
}
_STRUCTURED = {
    "oneOf": [
        object_schema(
            {kind: schema}, closed=True, disable_any_whitespace={"type": "boolean"} if kind in JSON_STRUCTURES else {"const": False}
        )
        for kind, schema in _KIND_SCHEMAS.items()
    ]
}


def check_one_format(names: Sequence[str]) -> None:
    """Raises InvalidRequest if several fields, which have these names, say what form the answer has."""
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} are both set: send only one", param=names[1])


class StructuredOutputFields(BaseModel):
    """The structured-output fields of a request, of which at most one may be set. vLLM's older and newer name may say the same.

    `regex` and `json_schema` are SGLang's and llama.cpp's names, `format` is Ollama's, and `grammar` is TGI's.
    """

    response_format: Annotated[Any, WithJsonSchema(_RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(_STRUCTURED)] = None
    guided_json: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["json"])] = None
    guided_regex: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["regex"])] = None
    guided_choice: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["choice"])] = None
    guided_grammar: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["grammar"])] = None
    regex: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["regex"])] = None
    json_schema: Annotated[Any, WithJsonSchema(_KIND_SCHEMAS["json"])] = None
    format: Annotated[Any, WithJsonSchema({"oneOf": [{"const": "json"}, _KIND_SCHEMAS["json"]]})] = None
    grammar: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    _relaxed: list[str] = PrivateAttr(default_factory=list)

    @property
    def relaxed(self) -> list[str]:
        """The paths of schema keywords that are not enforced, once `structured_output` has been called."""
        return self._relaxed

    def structured_output(self) -> StructuredOutput | None:
        """Returns the structured output that the request asks for; raises InvalidRequest."""
        fields = {name: getattr(self, name) for name in StructuredOutputFields.model_fields}
        # Clients of other servers send an empty format or grammar for none.
        names = [name for name, value in fields.items() if value is not None and (value != "" or name not in ("format", "grammar"))]
        if isinstance(newer := self.structured_outputs, dict):  # guidance sends vLLM's older name of the same form too
            names = [name for name in names if not name.startswith("guided_") or fields[name] != newer.get(name.removeprefix("guided_"))]
        check_one_format(names)
        if not names:
            return None
        [name] = names
        reader = _Reader(name)
        structure = reader.read(fields[name])
        self._relaxed = [f"{name}{path}" for path in reader.relaxed]
        return structure


class _Reader:
    """Reads the structured output of one field."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.relaxed: list[str] = []
        """Paths of schema keywords that are not enforced."""

    def read(self, value: Any) -> StructuredOutput | None:
        """Returns the structured output, None for free text; raises InvalidRequest."""
        match self._name:
            case "response_format":
                return self._response_format(value)
            case "structured_outputs":
                return self._structured_outputs(value)
            case "format":
                return self._kind("json_object", True, "format") if value == "json" else self._kind("json", value, "format")
            case "grammar":
                return self._grammar(value)
        kind = "json" if self._name == "json_schema" else self._name.removeprefix("guided_")
        return self._kind(kind, value, self._name)

    def _response_format(self, given: object) -> StructuredOutput | None:
        value = {name: inner for name, inner in given.items() if inner is not None} if isinstance(given, dict) else given
        match value:
            case {"type": "text", **rest} if not rest:
                return None
            case {"type": "json_object", "schema": schema, **rest} if not rest:
                return self._schema(schema, "response_format.schema")
            case {"type": "json_object", **rest} if not rest:
                return self._kind("json_object", True, "response_format")
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}, **rest} if not rest:
                return self._schema(schema, "response_format.json_schema.schema")
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                checked_schema(schema, self._name, "response_format.json_schema.schema")
            case {"type": "json_schema", "schema": dict(schema), **rest} if rest.keys() <= {"name", "description", "strict"}:
                return self._schema(schema, "response_format.schema")  # as llama.cpp and Together AI take it
            case {"type": "json" | "json_object" | "json_schema" | "regex", "value": _, **rest} if not rest:
                return self._grammar(value)  # as TGI takes it
            case {"type": "structural_tag", **tag}:
                return self._structural_tag(tag)
        raise InvalidRequest(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., '
            f'"schema": {{...}}}}}}, got {brief(value)}',
            param=self._name,
        )

    def _structured_outputs(self, value: object) -> StructuredOutput:
        if isinstance(value, dict):
            options = {kind: inner for kind, inner in value.items() if inner is not None and (kind, inner) != ("json_object", False)}
            compact = options.pop("disable_any_whitespace", None)
            if len(options) == 1 and options.keys() <= set(_KINDS):
                [(kind, inner)] = options.items()
                return self._kind(kind, inner, f"{self._name}.{kind}")._replace(disable_any_whitespace=compact)
        raise InvalidRequest(f"structured_outputs must be an object with one of {', '.join(_KINDS)}, got {brief(value)}", param=self._name)

    def _grammar(self, value: object) -> StructuredOutput:
        match value:
            case {"type": "json_schema", "value": {"schema": schema, **rest}} if rest.keys() <= {"name"}:
                return self._kind("json", schema, f"{self._name}.value.schema")
            case {"type": "json" | "json_object" | "json_schema", "value": schema}:
                return self._kind("json", schema, f"{self._name}.value")
            case {"type": "regex", "value": regex}:
                return self._kind("regex", regex, f"{self._name}.value")
        raise InvalidRequest(
            "grammar must be an object with type (json or regex) and value. GBNF is not supported: send structured_outputs.grammar in "
            f"Lark's syntax. Got {brief(value)}",
            param=self._name,
        )

    def _kind(self, kind: str, value: object, where: str) -> StructuredOutput:
        param = self._name
        match kind:
            case "json":
                return self._schema(value, where, close=True)
            case "json_object" if value is True:
                return StructuredOutput(kind, param=param)
            case "structural_tag":
                return self._structural_tag(_parsed(value))
            case "regex" | "grammar" if isinstance(value, str):
                return StructuredOutput(kind, checked_text(value, MAX_REGEX if kind == "regex" else MAX_GRAMMAR, param, where), param)
            case "choice" if isinstance(value, list) and value and all(isinstance(choice, str) for choice in value):
                if len(value) > MAX_CHOICES:
                    raise InvalidRequest(f"{where} has {len(value)} choices, at most {MAX_CHOICES} are allowed", param=param)
                return StructuredOutput(kind, checked_text(json.dumps(value, ensure_ascii=False), MAX_GRAMMAR, param, where), param)
        expected = {"choice": "a non-empty list of strings", "json_object": "true"}.get(kind, "a string")
        raise InvalidRequest(f"{where} must be {expected}, got {brief(value)}", param=param)

    def _schema(self, schema: object, where: str, *, close: bool = False) -> StructuredOutput:
        text, relaxed = checked_schema(_parsed(schema), self._name, where, close=close)
        self.relaxed += relaxed
        return StructuredOutput("json", text, self._name)

    def _structural_tag(self, value: object) -> StructuredOutput:
        """Reads vLLM's structural tag: free text in which a trigger begins one of the structures."""
        match value:
            case {"structures": [_, *_] as structures, "triggers": [_, *_] as triggers} if max(len(structures), len(triggers)) <= MAX_TAGS:
                tags = [self._tag(structure, f"{self._name}.structures[{index}]") for index, structure in enumerate(structures)]
                if all(isinstance(trigger, str) and trigger for trigger in triggers):
                    grammar = tags_grammar(tags, triggers, self._name)
                    return grammar._replace(text=checked_text(grammar.text, MAX_GRAMMAR, self._name, self._name))
        raise InvalidRequest(
            f"a structural_tag must have lists of structures (objects with begin, schema and end) and of triggers (texts), "
            f"at most {MAX_TAGS} of each, got {brief(value)}",
            param=self._name,
        )

    def _tag(self, structure: object, where: str) -> Tag:
        match structure:
            case {"begin": str(begin), "end": str(end), **rest} if rest.keys() <= {"schema"}:
                text, relaxed = checked_schema(rest.get("schema", {}), self._name, f"{where}.schema")
                self.relaxed += relaxed
                return Tag(begin, json.loads(text), end)
        raise InvalidRequest(f"{where} must be an object with begin, schema and end, got {brief(structure)}", param=self._name)


def _parsed(value: object) -> object:
    """Parses a schema that was sent as a string."""
    if not isinstance(value, str) or len(value) > MAX_GRAMMAR:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
