"""JSON schemas of requests: limits, keywords that are not supported, and keywords that no grammar enforces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from chairlift.errors import InvalidRequest, brief
from chairlift.grammar.closed_schema import SCHEMA_MAPS, SCHEMAS, closed
from chairlift.sampling import MAX_GRAMMAR

MAX_DEPTH = 32
"""Maximum nesting of a JSON schema, where each level of properties counts twice, and of the chat template's inputs."""
MAX_REGEX = 8192
MAX_COUNT = 65_536
"""Maximum for a schema's minimum number of characters, items or properties: no answer has more."""

_MINIMUM_KEYWORDS = frozenset(("minLength", "minItems", "minProperties", "minContains"))
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicAnchor", "$dynamicRef"),
    )
)
"""Keywords that llguidance does not implement, without those that are relaxed."""
_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that llguidance enforces. Others are annotations, as in JSON Schema."""
_MAY_BE_NULL = frozenset(("const", "default"))
"""Keywords for which null is a value. Other keywords that are null, as some clients write those without a value, say nothing."""
_LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")


def checked_schema(schema: object, param: str, where: str, *, close: bool = False) -> tuple[str, list[str]]:
    """Returns a JSON schema as text, and the paths in it of keywords that were taken out because no grammar enforces them.

    With `close`, its objects have no properties that it does not name, unless it says something of others.
    Raises InvalidRequest for one that is too large, too deep or not supported, naming it as `where`. Checks everything that needs no
    compilation, in bounded time for a schema of any size.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} must be a JSON schema, which is an object, got {brief(schema)}", param=param)
    _check_size(schema, param, where)
    if not isinstance(schema.get("x-guidance", {}), dict):
        raise InvalidRequest(f"{where}.x-guidance must be an object, got {brief(schema['x-guidance'])}", param=param)
    relaxed: list[str] = []
    schema = _Checker(param, where, relaxed).check(closed(schema) if close else schema, "")
    return checked_text(json.dumps(schema, ensure_ascii=False), MAX_GRAMMAR, param, where), relaxed


def checked_text(text: str, maximum: int, param: str, where: str) -> str:
    """Returns `text`; raises InvalidRequest if it is too long or not valid Unicode."""
    if len(text) > maximum:
        raise InvalidRequest(f"{where} has {len(text)} characters, at most {maximum} are allowed: make it shorter", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where} has a lone surrogate (U+{ord(text[error.start]):04X}), which is not valid Unicode"
        raise InvalidRequest(message, param=param) from None
    return text


def _check_size(schema: Mapping[str, Any], param: str, where: str) -> None:
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
            size += sum(map(len, value))
            pending += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, depth + 1) for inner in value]


class _Checker:
    """Checks the keywords of one schema and collects the paths of those that are relaxed."""

    def __init__(self, param: str, where: str, relaxed: list[str]) -> None:
        self._param = param
        self._where = where
        self._relaxed = relaxed

    def check(self, schema: object, path: str) -> Any:
        """Returns the schema at `path` without the relaxed keywords; raises InvalidRequest."""
        if isinstance(schema, list):
            return [self.check(inner, f"{path}[{index}]") for index, inner in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        return {key: self._value(key, value, path) for key, value in schema.items() if self._is_kept(key, value, path, schema)}

    def _is_kept(self, key: str, value: object, path: str, schema: Mapping[str, Any]) -> bool:
        if value is None and key not in _MAY_BE_NULL:
            return False
        if key == "pattern" and isinstance(value, str) and _LOOK_AROUND.search(value) and _has_format(schema):
            self._relaxed.append(f"{path}.{key}")  # Zod writes one beside the format of an e-mail address
            return False
        if key in _UNSUPPORTED:
            raise self._refusal(path, f"has the keyword {key}, which is not supported")
        if key == "format":
            return _has_format(schema)
        if key in ("uniqueItems", "propertyNames"):
            if value not in (False, True, {}) or (key == "uniqueItems" and value is True):
                self._relaxed.append(f"{path}.{key}")
            return False
        return True

    def _value(self, key: str, value: Any, path: str) -> Any:
        if key in SCHEMA_MAPS and isinstance(value, dict):
            return {name: self.check(inner, f"{path}.{key}.{name}") for name, inner in value.items()}
        if key in SCHEMAS:
            return self.check(value, f"{path}.{key}")
        if key == "pattern" and isinstance(value, str):
            checked_text(value, MAX_REGEX, self._param, f"a pattern in {self._where}{path}")
            if _LOOK_AROUND.search(value):
                raise self._refusal(path, "has a pattern with look-around, which is not supported")
        if key in _MINIMUM_KEYWORDS and isinstance(value, int | float) and value > MAX_COUNT:
            raise self._refusal(path, f"has {key} {brief(value)}, more than any answer has: at most {MAX_COUNT} is allowed")
        return value

    def _refusal(self, path: str, fault: str) -> InvalidRequest:
        return InvalidRequest(f"{self._where}{path:.200} {fault}", param=self._param)


def _has_format(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has a format that is enforced."""
    return isinstance(name := schema.get("format"), str) and name in _FORMATS
