"""A model's chat template. It is rendered in a process with limits, and control tokens that users wrote stay plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.template_process import PROCESSES


class ChatTemplate:
    """One or several named Jinja templates, as in Hugging Face's tokenizer files."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`templates` by name, usually `default`; `variables`, like `bos_token`, are set in each rendering."""
        self._templates = dict(templates)
        self._variables = dict(variables)

    @classmethod
    def from_files(cls, directory: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate:
        """Reads chat_template.jinja and additional_chat_templates, else chat_template.json, else tokenizer_config.json.

        Those of additional_chat_templates may also be beside one in JSON. Raises InvalidRequest if there is none.
        """
        files = {"default": directory / "chat_template.jinja"}
        files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("[!.]*.jinja"))}
        try:
            named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error  # clients get no path of this machine
            raise InvalidRequest(f"this model's chat template cannot be read ({reason}); use --chat-template", param="messages") from None
        if "default" not in named:
            named = _named(_from_json(directory / "chat_template.json") or config.get("chat_template")) | named
        if not named:
            raise InvalidRequest("this model has no chat template; use /v1/completions with a prompt", param="messages")
        return cls(named, variables)

    @classmethod
    def from_file(cls, file: Path, variables: Mapping[str, str]) -> ChatTemplate:
        """Reads one template; raises InvalidSetting if the file cannot be read or is not a Jinja template."""
        try:
            source = file.read_text(encoding="utf-8")
            _variables_read(source)
        except (OSError, UnicodeDecodeError, InvalidRequest) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidSetting(f"--chat-template: {file} cannot be used: {reason}") from None
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
        """Whether a template reads `variable`. An invalid template reads none; its error appears when it is rendered."""
        for source in self._templates.values():
            try:
                if variable in _variables_read(source):
                    return True
            except InvalidRequest:
                continue
        return False

    @cached_property
    def has_system(self) -> bool:
        """Whether it has a place for a system message. Blocks, without the GIL.

        Raises InvalidRequest if it renders no conversation at all.
        """
        system, user = ({"role": role, "content": text} for role, text in (("system", "Be terse."), ("user", "Hello")))
        try:
            pieces = self.render([system, user], ())
        except InvalidRequest:
            self.render([user], ())
            return False
        return any(system["content"] in text for text, _ in pieces)

    def prepare(self) -> None:
        """Starts the process that renders it, unless it runs."""
        PROCESSES.prepare()

    def render(
        self, messages: Sequence[Mapping[str, Any]], controls: Sequence[str], *, continue_final_message: bool = False, **kwargs: Any
    ) -> list[tuple[str, bool]]:
        """Returns the conversation as pieces of text, each with whether `controls` are plain text in it.

        Usually there is one piece. With `continue_final_message` the text ends with the content of the last message. Raises InvalidRequest
        with the template's message if the template fails, or takes too much time or memory. Blocks, without the GIL.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        source = self._templates.get(name)
        if source is None:
            names = ", ".join(self._templates)
            raise InvalidRequest(f"this model has no default chat template, only {names}", param="messages")
        job = {
            "source": source,
            "messages": list(messages),
            "variables": kwargs,
            "defaults": {"tools": None, "documents": None, **self._variables},
            "controls": controls,
            "continue_final_message": continue_final_message,
        }
        try:
            return [(text, plain) for text, plain in PROCESSES.run(job)]
        except InvalidRequest as error:
            if error.param is not None:
                raise
            raise InvalidRequest(f"the chat template cannot render these messages: {error}", param="messages") from None


def _named(found: Any) -> dict[str, str]:
    """Returns templates by name: those of an object, those of a list of objects with `name` and `template`, or a single one.

    Raises InvalidRequest for another value.
    """
    match found:
        case None | "":
            return {}
        case str():
            return {"default": found}
        case list() if all(isinstance(item, dict) for item in found):
            found = {item.get("name"): item.get("template") for item in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for item in found.items() for text in item):
        raise InvalidRequest("this model's chat_template must be a text, or texts by name; use --chat-template", param="messages")
    return found


def _from_json(file: Path) -> Any:
    """Returns the `chat_template` of a JSON file, as processors of several kinds of input have it; None if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value.get("chat_template") if isinstance(value, dict) else None


@lru_cache(maxsize=8)
def _variables_read(source: str) -> frozenset[str]:
    """Returns the variables that a template reads and does not set; raises InvalidRequest for an invalid template."""
    return frozenset(PROCESSES.run({"source": source, "messages": None}))
