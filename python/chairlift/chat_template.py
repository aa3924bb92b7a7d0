"""Renders a model's chat template in a sandbox, and keeps control tokens that users wrote as plain text."""

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

from chairlift.errors import InvalidRequest, InvalidSetting

MAX_SECONDS = 2.0
"""CPU time that rendering may take in its thread."""

MAX_CHARACTERS = 16 << 20
"""Maximum length of a rendered conversation: a multiple of what a request can send."""

_thread = threading.local()

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Marks around control tokens that users wrote: Unicode noncharacters, which do not occur in text."""

_END = "\ufdd2"
"""Mark after a message that is to be continued."""


class ChatTemplate:
    """One or several named Jinja templates, as in Hugging Face's tokenizer files."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`templates` by name, usually `default`; `variables`, like `bos_token`, are set in each rendering."""
        self._templates = dict(templates)
        self._variables = dict(variables)

    @classmethod
    def from_files(cls, directory: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate:
        """Reads chat_template.jinja, else the `chat_template` of tokenizer_config.json.

        Raises InvalidRequest if there is none.
        """
        file = directory / "chat_template.jinja"
        templates = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(templates, str):
            templates = [{"name": "default", "template": templates}]
        if not templates:
            raise InvalidRequest("this model has no chat template; use /v1/completions with a prompt", param="messages")
        return cls({item["name"]: item["template"] for item in templates}, variables)

    @classmethod
    def from_file(cls, file: Path, variables: Mapping[str, str]) -> ChatTemplate:
        """Reads one template; raises InvalidSetting if the file cannot be read or is not a Jinja template."""
        import jinja2

        try:
            source = file.read_text(encoding="utf-8")
            _compiled(source)
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            raise InvalidSetting(f"--chat-template: {file} cannot be used: {error}") from None
        return cls({"default": source}, variables)

    @property
    def default(self) -> str | None:
        """Source of the template for conversations without tools."""
        return self._templates.get("default")

    @property
    def source(self) -> str:
        """Source of all templates."""
        return "\n".join(self._templates.values())

    def uses(self, variable: str) -> bool:
        """Whether a template reads `variable`."""
        return any(variable in _variables_read(source) for source in self._templates.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], controls: Sequence[str], *, continue_final_message: bool = False, **kwargs: Any
    ) -> list[tuple[str, bool]]:
        """Returns the conversation as pieces of text, each with whether `controls` (longest first) are plain text in it.

        Usually there is one piece. With `continue_final_message` the text ends with the content of the last message. Raises InvalidRequest
        with the template's message if the template fails.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}]
        pattern = _pattern(tuple(controls))
        marked = _mark_control_tokens([list(messages), kwargs], pattern)
        if marked is None:
            text = self._text(list(messages), kwargs)
            return [(_cut_at_end_mark(text) if continue_final_message else text, False)]
        text = self._text(*marked)
        if continue_final_message:
            text = _cut_at_end_mark(text)
        pieces = re.split(f"{_OPEN}({pattern.pattern}){_CLOSE}", text)
        # A template that slices strings may leave a single mark.
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
        except Exception as error:  # any error of a template is the fault of this request
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages: {reason:.500}", param="messages") from None


def _rendered(template: Any, variables: Mapping[str, Any]) -> str:
    """Renders the template; raises ValueError if it takes too long or produces too much text."""
    _thread.deadline = time.thread_time() + MAX_SECONDS
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"the text is longer than {MAX_CHARACTERS} characters")
    return "".join(pieces)


def _check_deadline() -> str:
    if time.thread_time() > _thread.deadline:
        raise ValueError(f"rendering takes longer than {MAX_SECONDS:g} seconds")
    return ""


def _cut_at_end_mark(text: str) -> str:
    """Returns the text before the end mark; raises InvalidRequest if the template dropped the mark."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise InvalidRequest(
            "the chat template drops the end of the last message, so it cannot be continued", param="continue_final_message"
        )
    return before


def _mark_control_tokens(value: Any, pattern: re.Pattern[str]) -> Any:
    """Returns a copy of `value` with marks around the control tokens in its strings; None if there are none."""
    found = False

    def copy(item: Any) -> Any:
        nonlocal found
        if isinstance(item, str):
            marked, count = pattern.subn(rf"{_OPEN}\g<0>{_CLOSE}", item.replace(_OPEN, "").replace(_CLOSE, ""))
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
def _variables_read(source: str) -> frozenset[str]:
    """Returns the variables that a template reads and does not set.

    None for an invalid template, whose error appears when it is rendered.
    """
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_compiled(source).environment.parse(source)))
    except jinja2.TemplateError:
        return frozenset()


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Compiles the template with the filters and functions that Hugging Face's templates use."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class TimeLimited(ImmutableSandboxedEnvironment):
        """Checks the deadline in each iteration of a loop and each call of a macro: nothing else can run forever."""

        check_deadline = staticmethod(_check_deadline)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
            for node in repeated:
                check = nodes.Call(nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
            return tree

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here only its content is rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = TimeLimited(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)
