"""A model's chat template: messages to text, in a sandbox, with what users wrote kept apart from control tokens."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest

MAX_SECONDS = 2.0
"""How long a rendering may take of its thread's own time, which other work does not shorten."""

MAX_CHARACTERS = 16 << 20
"""How long a rendered conversation may be: some times what a request can send."""

_clock = threading.local()

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Set around control tokens that users wrote: noncharacters, which no text that is meant for others contains."""

_END = "\ufdd2"
"""Set behind a message that is to go on."""


class ChatTemplate:
    """One or several named Jinja templates, as Hugging Face's tokenizer files carry them."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`templates` by name, of which `default` is usual; `variables`, like `bos_token`, are there in each rendering."""
        self._templates = dict(templates)
        self._variables = dict(variables)

    @classmethod
    def from_files(cls, directory: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate:
        """The template of chat_template.jinja, else the `chat_template` of tokenizer_config.json.

        Raises InvalidRequest when there is none.
        """
        file = directory / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(found, str):
            found = [{"name": "default", "template": found}]
        if not found:
            raise InvalidRequest("this model has no chat template; use /v1/completions with a prompt", param="messages")
        return cls({item["name"]: item["template"] for item in found}, variables)

    @property
    def default(self) -> str | None:
        """The template that is used without tools, as it is written."""
        return self._templates.get("default")

    @property
    def source(self) -> str:
        """The templates as they are written."""
        return "\n".join(self._templates.values())

    def uses(self, variable: str) -> bool:
        """Whether a template reads `variable`; what it does not read changes nothing."""
        return any(variable in _read_by(source) for source in self._templates.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], controls: Sequence[str], *, continue_final_message: bool = False, **kwargs: Any
    ) -> list[tuple[str, bool]]:
        """The conversation as pieces of text, each with whether control tokens (`controls`, longest first) are plain text in it.

        Mostly that is one piece. With `continue_final_message` it ends with the content of the last message. Raises InvalidRequest
        when the template fails or refuses, with its words.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}]
        wrote = _pattern(tuple(controls))
        kept = _kept_apart([list(messages), kwargs], wrote)
        if kept is None:
            text = self._text(list(messages), kwargs)
            return [(_until_end(text) if continue_final_message else text, False)]
        text = self._text(*kept)
        if continue_final_message:
            text = _until_end(text)
        pieces = re.split(f"{_OPEN}({wrote.pattern}){_CLOSE}", text)
        # A template that cuts strings may leave one mark alone.
        cleaned = (piece.replace(_OPEN, "").replace(_CLOSE, "") for piece in pieces)
        return [(piece, index % 2 == 1) for index, piece in enumerate(cleaned) if piece]

    def _text(self, messages: list[Any], kwargs: Mapping[str, Any]) -> str:
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        source = self._templates.get(name)
        if source is None:
            names = ", ".join(self._templates)
            raise InvalidRequest(f"this model has no default chat template, only {names}", param="messages")
        try:
            return _rendered(_compiled(source), {"tools": None, "documents": None, **self._variables, **kwargs, "messages": messages})
        except Exception as error:  # whatever a template does with these messages concerns this request alone
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages: {reason:.500}", param="messages") from None


def _rendered(template: Any, variables: Mapping[str, Any]) -> str:
    """The template's text; raises ValueError for one that takes too long or gives too much."""
    _clock.end = time.thread_time() + MAX_SECONDS
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"its text is longer than {MAX_CHARACTERS} characters")
    return "".join(pieces)


def _check_clock() -> str:
    if time.thread_time() > _clock.end:
        raise ValueError(f"it takes longer than {MAX_SECONDS:g} seconds")
    return ""


def _until_end(text: str) -> str:
    """The text up to the mark in it; raises InvalidRequest if the template has left that out."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise InvalidRequest("the chat template does not show the last message, so it cannot go on", param="continue_final_message")
    return before


def _kept_apart(value: Any, wrote: re.Pattern[str]) -> Any:
    """A copy of `value` with marks around the control tokens in its strings; None if it has no such token."""
    found = False

    def copy(item: Any) -> Any:
        nonlocal found
        if isinstance(item, str):
            marked, count = wrote.subn(rf"{_OPEN}\g<0>{_CLOSE}", item.replace(_OPEN, "").replace(_CLOSE, ""))
            found = found or count > 0
            return marked
        if isinstance(item, Mapping):
            return {copy(key): copy(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [copy(inner) for inner in item]
        return item

    copied = copy(value)
    return copied if found else None


@lru_cache(maxsize=8)
def _pattern(controls: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, controls)) or "(?!)")


@lru_cache(maxsize=8)
def _read_by(source: str) -> frozenset[str]:
    """The variables that a template reads and does not set; none if it is none, which rendering tells."""
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_compiled(source).environment.parse(source)))
    except jinja2.TemplateError:
        return frozenset()


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The template, compiled with the filters and functions that Hugging Face's templates count on."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Looks at the clock in every turn of a loop and every call of a macro: nothing else in a template can go on for ever."""

        check_clock = staticmethod(_check_clock)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
            for node in repeated:
                check = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
            return tree

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training; here it shows its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which a model should not see.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)
