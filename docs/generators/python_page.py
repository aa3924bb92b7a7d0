"""The page of the package's public names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from tables import code, paragraph, table

import chairlift

_HEAD = """\
# Public names of `chairlift`

[The Python API](../python.md) is the guide. [Errors](errors.md#exceptions) lists the exceptions.
"""
_WIDTH = 100
_SEQUENCE = ("token_ids", "num_generated", "priority", "scheduling", "dropped", "score", "rewind")
_INHERITED = {
    "AsyncEngine": ("generate", "open", "default_params", "info", "tokenizer"),
    "AsyncLiveSequence": _SEQUENCE,
    "LiveSequence": ("text", *_SEQUENCE, "drop"),
}
"""Public members of base classes. Others of theirs are for the server."""


class _Text(str):
    """An annotation, which `inspect` then shows without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def page() -> str:
    """Returns the page."""
    values = {name: getattr(chairlift, name) for name in chairlift.__all__}
    shown = {name: value for name, value in values.items() if not inspect.ismodule(value) and not _is_exception(value)}
    return _HEAD + "".join(f"\n## {name}\n\n{_described(value)}" for name, value in shown.items())


def _is_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _described(value: Any) -> str:
    if inspect.isclass(value):
        return _class(value)
    return _function(value, value.__qualname__) if inspect.isfunction(value) else f"`{value!r}`\n"


def _class(cls: type) -> str:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    names = [field.name for field in fields] or list(getattr(cls, "_fields", ()))
    if any(field.metadata for field in fields):
        return f"{_doc(cls)}\n\nThe fields are [the settings of engines](cli.md#settings).\n"
    if names:
        meanings, types = _field_docs(cls), inspect.get_annotations(cls)
        rows = ((code(name), code(str(types.get(name, ""))), meanings.get(name, "")) for name in names)
        text = f"{_doc(cls)}\n\n{table(('field', 'type', 'meaning'), rows)}"
    else:
        text = f"{_signature(vars(cls)['__init__'], cls.__name__)}\n\n{_doc(cls)}\n" if "__init__" in vars(cls) else f"{_doc(cls)}\n"
        if attributes := list(_native_fields(cls) if cls.__module__ == "chairlift._core" else _field_rows(cls)):
            text += f"\n{table(('attribute', 'type', 'meaning'), attributes)}"
    return text + "".join(_members(cls))


def _members(cls: type) -> Iterator[str]:
    """Yields the public methods and properties, those of base classes last."""
    own = [name for name, member in vars(cls).items() if not (name.startswith("_") or inspect.isclass(member))]
    for name in dict.fromkeys((*own, *_INHERITED.get(cls.__name__, ()))):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property | cached_property):
            yield f"\n### {cls.__name__}.{name}\n\n{_doc(member)}\n"
        elif inspect.isroutine(getattr(cls, name)):
            yield f"\n### {cls.__name__}.{name}\n\n{_function(getattr(cls, name), f'{cls.__name__}.{name}')}"


def _field_rows(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yields name, type and meaning of the annotated attributes that have a docstring."""
    types = inspect.get_annotations(cls)
    for name, meaning in _field_docs(cls).items():
        yield code(name), code(str(types[name]).removeprefix("ClassVar[").removesuffix("]")), meaning


def _native_fields(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yields the same of the properties of a class of the core, from its stub."""
    stub = ast.parse(Path(chairlift.__file__).with_name("_core.pyi").read_text())
    definition = next(one for one in stub.body if isinstance(one, ast.ClassDef) and one.name == cls.__name__)
    for one in definition.body:
        if isinstance(one, ast.FunctionDef) and one.returns is not None:
            yield code(one.name), code(ast.unparse(one.returns)), paragraph(ast.get_docstring(one) or "")


def _field_docs(cls: type) -> dict[str, str]:
    """Returns the strings below the fields of a class in its source."""
    [definition] = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[ast.unparse(field.target)] = paragraph(str(below.value.value))
    return docs


def _function(function: Any, name: str) -> str:
    return f"{_signature(function, name)}\n\n{_doc(function)}\n"


def _signature(function: Any, name: str) -> str:
    """Returns the signature as a block of code, with a parameter on each line if it is long."""
    signature = inspect.signature(function)
    named = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    parameters = [one.replace(annotation=_Text(one.annotation)) if isinstance(one.annotation, str) else one for one in named]
    returned = "" if signature.return_annotation in (signature.empty, "None") else f" -> {signature.return_annotation}"
    listed = str(signature.replace(parameters=parameters, return_annotation=signature.empty))[1:-1]
    if len(f"{name}({listed}){returned}") > _WIDTH:
        listed = "".join(f"\n    {part}," for part in _split(listed)) + "\n"
    return f"```python\n{name}({listed}){returned}\n```"


def _split(parameters: str) -> list[str]:
    """Splits parameters at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _doc(value: Any) -> str:
    """Returns the docstring without the list of settings, which has a page of its own."""
    text, settings, _ = (inspect.getdoc(value) or "").partition("\n\nSettings:\n")
    return f"{text}\n\nThe settings are [those of engines](cli.md#settings)." if settings else text
