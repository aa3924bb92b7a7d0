"""The functions that a model may call, and which of them it may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from chairlift.chat.messages import check_depth
from chairlift.chat.tools.custom import PARAMETERS
from chairlift.errors import InvalidRequest, brief

_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
_NO_PARAMETERS = {"type": "object", "properties": {}}


class Function(BaseModel, strict=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, None if it takes none."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the function for a chat template; templates expect `parameters`, and some fail without."""
        return {**self.model_dump(exclude_unset=True, exclude={"strict"}), "parameters": self.arguments_schema()}

    def arguments_schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments."""
        return _NO_PARAMETERS if self.parameters is None else self.parameters


class TextFormat(BaseModel, strict=True):
    """The form of a custom tool's input. The model sees a grammar, but the input may not match it."""

    type: str = "text"
    grammar: dict[str, Any] | None = None
    syntax: str | None = None
    definition: str | None = None


class CustomTool(BaseModel, strict=True):
    """A tool whose input is free text."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    format: TextFormat | None = None

    def as_function(self) -> Function:
        """Returns the function that stands for the tool."""
        description = self.description or ""
        if self.format is not None and self.format.type == "grammar":
            grammar = self.format.grammar or {"syntax": self.format.syntax, "definition": self.format.definition}
            description += f"\nThe input must match this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        return Function(name=self.name, description=description.strip(), parameters=PARAMETERS)


class Tool(BaseModel, strict=True):
    """A tool. Functions and custom tools are supported; tools of other types are left out."""

    type: str
    function: Function | None = None
    custom: CustomTool | None = None

    @property
    def left_out(self) -> bool:
        """Whether the server does not know this type of tool."""
        return self.type not in ("function", "custom")

    def as_function(self, where: str) -> Function:
        """Returns the function, or the one that stands for the custom tool; raises InvalidRequest that names the tool as `where`."""
        if self.type == "function" and self.function is not None:
            return self.function
        if self.type == "custom" and self.custom is not None:
            return self.custom.as_function()
        if self.left_out:
            raise InvalidRequest(f"{where}.type must be function or custom, got {brief(self.type)}", param=f"{where}.type")
        raise InvalidRequest(f"{where}.{self.type} is missing", param=f"{where}.{self.type}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The tools of a request and how the model may use them."""

    tools: tuple[Function, ...] = ()
    custom: frozenset[str] = frozenset()
    """Names of those that stand for custom tools."""
    required: bool = False
    """The model must call a tool."""
    named: bool = False
    """The client chose the tool to call."""
    parallel: bool = True
    """The model may make more than one call."""

    def __bool__(self) -> bool:
        return bool(self.tools)


def choose(
    tools: Sequence[Function],
    choice: Any = None,
    *,
    param: str = "tools",
    field: str = "tool_choice",
    custom: frozenset[str] = frozenset(),
    parallel: bool = True,
) -> ToolSpec:
    """Returns the tools that may be called; raises InvalidRequest.

    `choice` is OpenAI's value of the request's `field` (`tool_choice`, or the older `function_call`), and `param` the field of the tools.
    `custom` are the names of those that stand for custom tools.
    """
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise InvalidRequest(f"{param} has two functions of one name: give each its own", param=param)
    check_depth(param, [tool.parameters for tool in tools])
    mode, names = _mode(choice, field)
    for name in names or ():
        if name not in by_name:
            raise InvalidRequest(f"{field} names {brief(name)}, which is not among the {param}", param=field)
    if mode == "required" and not by_name:
        raise InvalidRequest(f"{field} asks for a call, but there are no {param}", param=field)
    chosen = () if mode == "none" else tuple(by_name.values() if names is None else (by_name[name] for name in dict.fromkeys(names)))
    named = mode == "named"
    return ToolSpec(chosen, custom, mode in ("required", "named"), named, parallel and not named)


def _mode(choice: Any, field: str) -> tuple[str, list[str] | None]:
    """Returns how the model chooses (`none`, `auto`, `required`, `named`), and the functions to choose from; None for all."""
    match choice:
        case None:
            return "auto", None
        case "any" if field == "tool_choice":  # Mistral's name
            return "required", None
        case "none" | "auto" | "required" if field == "tool_choice" or choice != "required":
            return str(choice), None
        case {"type": "function" | "custom"} if field == "tool_choice" and (name := _function_name(choice)) is not None:
            return "named", [name]
        case {"name": str(name)} if field == "function_call":
            return "named", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}}:
            names = [_function_name(tool) for tool in allowed]
            if None not in names:
                return str(mode), [str(name) for name in names]
    message = f"{field} must be none, auto, required or the name of a function in OpenAI's format, got {brief(choice)}"
    raise InvalidRequest(message, param=field)


def _function_name(tool: object) -> str | None:
    """Returns the function that `tool_choice`, or an entry of its `allowed_tools`, names."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None
