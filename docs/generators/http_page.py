"""The page of HTTP routes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import Route
from tables import code, paragraph, table

from chairlift.server.admin import AdminApp
from chairlift.server.app import routes
from chairlift.server.routes.openai.openapi import document

_HEAD = """\
# HTTP routes

The fields are those of the request's body. [The HTTP API](../api.md) explains them, and `GET /openapi.json` has their types.

"""
_ADMIN = """
## The admin socket

[`--admin-socket`](../api/network.md#the-admin-socket) serves these routes.

"""


def page() -> str:
    """Returns the page."""
    head = ("route", "purpose", "fields")
    admin = AdminApp.routes(AdminApp.__new__(AdminApp))
    return _HEAD + table(head, _rows(routes(), document(()))) + _ADMIN + table(head[:2], (row[:2] for row in _rows(admin, {"paths": {}})))


def _rows(all_routes: Iterable[Route], openapi: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields a row for each route and method, with the summary in the OpenAPI document, or else that of the docstring."""
    paths = {_pattern(path): (path, operations) for path, operations in openapi["paths"].items()}
    for route in all_routes:
        path, operations = paths.get(_pattern(route.path), (route.path.replace("{name:path}", "{id}"), {}))
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = operations.get(method.lower(), {})
            summary = operation.get("summary") or paragraph((inspect.getdoc(route.endpoint) or "").partition("\n\n")[0]).rstrip(".")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            fields = openapi["components"]["schemas"].get(name, {}).get("properties", {}) if name else ()
            yield code(f"{method} {path}"), summary, ", ".join(map(code, fields))


def _pattern(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)
