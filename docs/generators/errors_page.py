"""The page of error codes and exceptions."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tables import code, paragraph, table

import chairlift
from chairlift import errors
from chairlift.server.errors import api_error

_HEAD = """\
# Error codes and exceptions

[Overload, limits and errors](../api/errors.md#errors) says when the common ones occur.

## Codes

The `code` of an error over HTTP, its status, and the messages that the source contains. `{…}` stands for text that the server fills in.

"""
_EXCEPTIONS = """
## Exceptions

All are in `chairlift.errors`. Those in bold can also be imported from `chairlift`.

"""
_STATUSES = {"unavailable": "503", "too_many": "429", "InvalidRequest": "400"}
"""Functions and classes whose errors have one status."""


def page() -> str:
    """Returns the page."""
    text = _HEAD + table(("code", "status", "messages"), _code_rows())
    return text + _EXCEPTIONS + table(("exception", "derived from", "over HTTP", "meaning"), _exception_rows())


def _exceptions() -> Iterator[tuple[type[Exception], int, str, str]]:
    """Yields each class with its status and code over HTTP, and the first paragraph of its docstring."""
    for cls in vars(errors).values():
        if inspect.isclass(cls) and issubclass(cls, Exception) and cls.__module__ == errors.__name__:
            answer = api_error(_example(cls))
            name = answer.envelope["error"]["code"] or ""
            doc = paragraph((inspect.getdoc(cls) or "").partition("\n\n")[0])
            yield cls, *((0, "") if name == "internal_error" else (answer.status, name)), doc


def _example(cls: type[Exception]) -> Exception:
    """Returns an exception of a class, with 1 for each argument that it needs."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return cls("", **{one.name: 1 for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty})


def _exception_rows() -> Iterator[tuple[str, str, str, str]]:
    for cls, status, name, doc in _exceptions():
        shown = code(cls.__name__)
        over_http = f"{status or ''} {code(name)}".strip()
        yield f"**{shown}**" if cls.__name__ in chairlift.__all__ else shown, code(cls.__bases__[0].__name__), over_http, doc


def _code_rows() -> Iterator[tuple[str, str, str]]:
    """Yields a row for each code in the package."""
    statuses, messages = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in sorted(Path(chairlift.__file__).parent.rglob("*.py")):
        for name, status, message in _File(ast.parse(path.read_text())).errors():
            statuses[name].add(status)
            messages[name].add(message)
    for _, number, name, doc in _exceptions():
        if name:
            statuses[name].add(str(number))
            messages[name].add("" if any(messages[name]) else doc.rstrip("."))
    for name in sorted(statuses):
        yield code(name), ", ".join(sorted(statuses[name] - {""})), "; ".join(sorted(messages[name] - {""}))


class _File:
    """The errors that a source file makes."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def errors(self) -> Iterator[tuple[str, str, str]]:
        """Yields code, status and message of each call, and each frame, that names a code."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Dict):
                items = {key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}
                if items.keys() == {"error", "code"} and (name := self._text(items["code"])):
                    yield name, "400", self._text(items["error"])
            elif isinstance(node, ast.Call) and (name := self._code(node)):
                called = ast.unparse(node.func)
                message = node.args[1:2] if called == "ApiError" else node.args[:1]
                status = ast.unparse(node.args[0]) if called == "ApiError" else _STATUSES.get(called, "")
                yield name, status, self._text(message[0]) if message else ""

    def _code(self, call: ast.Call) -> str:
        given = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
        if ast.unparse(call.func) in ("unavailable", "too_many"):
            given = call.args[1]
        text = self._text(given) if given is not None else ""
        return text if text.replace("_", "").isalpha() else ""

    def _text(self, node: ast.expr) -> str:
        """Returns a text in the source, or that of a variable of the same function or module; empty for anything else."""
        if isinstance(node, ast.Name):
            around = [one for one in self._functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            assigned = [value for scope in (self._tree, *around) if (value := _assigned(scope, node))]
            return self._text(assigned[-1]) if assigned else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _assigned(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, name: ast.Name) -> ast.expr | None:
    """Returns what was assigned last to a variable before it is used, within a function or at the top of a module."""
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    values = [
        one.value
        for one in nodes
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name.id and one.lineno < name.lineno and one.value is not name
    ]
    return values[-1] if values else None
