"""A model's chat template: messages to text, in a sandbox, with what users wrote kept apart from control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Set around control tokens that users wrote: noncharacters, which no text that is meant for others contains."""


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

    def render(self, messages: Sequence[Mapping[str, Any]], controls: Sequence[str], **kwargs: Any) -> list[tuple[str, bool]]:
        """The conversation as pieces of text, each with whether control tokens (`controls`, longest first) are plain text in it.

        Mostly that is one piece. Raises InvalidRequest when the template fails or refuses, with its words.
        """
        wrote = _pattern(tuple(controls))
        kept = _kept_apart([list(messages), kwargs], wrote)
        if kept is None:
            return [(self._text(list(messages), kwargs), False)]
        text = self._text(*kept)
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
            return str(_compiled(source).render({"tools": None, "documents": None, **self._variables, **kwargs, "messages": messages}))
        except Exception as error:  # whatever a template does with these messages concerns this request alone
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages: {reason:.500}", param="messages") from None


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
def _compiled(source: str) -> Any:
    """The template, compiled with the filters and functions that Hugging Face's templates count on."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)
