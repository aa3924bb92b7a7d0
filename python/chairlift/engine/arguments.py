"""The arguments of `LLM` and `AsyncEngine`: settings of the engine, prompts, and options of chats."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, TypeVar

from chairlift.config import EngineConfig
from chairlift.errors import InvalidRequest, InvalidSetting, did_you_mean


def engine_config(name: str, settings: Mapping[str, Any], config: EngineConfig | None = None) -> EngineConfig:
    """Returns `config`, or the defaults, with `settings` applied, as given in Python to the caller `name`.

    Raises TypeError for an unknown setting and InvalidSetting, with the setting's Python name, for an invalid value.
    """
    known = [item.name for item in fields(EngineConfig)]
    for unknown in settings.keys() - set(known):
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}{did_you_mean(unknown, known, 0.6)}")
    try:
        given = {**settings, "model": os.fspath(settings["model"])} if "model" in settings else settings
    except TypeError:
        raise InvalidSetting(f"model must be a name or a path, got {settings['model']!r:.50}") from None
    try:
        return replace(config or EngineConfig(), **given)
    except ValueError as error:
        raise InvalidSetting(_python_names(str(error))) from None


T = TypeVar("T")


def document_settings(cls: type[T]) -> type[T]:
    """Shows the settings of `EngineConfig` in `help` of a class whose constructor takes them as `**settings`."""
    own = [parameter for name, parameter in inspect.signature(cls).parameters.items() if name != "settings"]
    hidden = {"shared_max_model_len", *(parameter.name for parameter in own)}
    settings = [item for item in fields(EngineConfig) if item.name not in hidden]
    keyword = inspect.Parameter.KEYWORD_ONLY
    keywords = [inspect.Parameter(item.name, keyword, default=item.default, annotation=item.type) for item in settings]
    setattr(cls, "__signature__", inspect.Signature([*own, *keywords]))  # noqa: B010  (mypy knows no such attribute)
    lines = [f"    {item.name}: {_python_names(item.metadata.get('help', 'name or path of the model'))}" for item in settings]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Settings:", *lines])
    return cls


def _python_names(text: str) -> str:
    """The text with settings named as in Python instead of as flags."""
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list or an array), or as in vLLM {"prompt": text} or {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]
"""A message of a conversation as in OpenAI's API: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `LLM.chat`, where they are described."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def sampling(params: Any, sampling_params: Any) -> Any:
    """Returns the sampling parameters, one or several, given under our name or vLLM's. Raises InvalidRequest for both."""
    if params is not None and sampling_params is not None:
        raise InvalidRequest("params and sampling_params are the same: give one", param="params")
    return sampling_params if params is None else params


_BYTES = (bytes, bytearray, memoryview)
_TYPES = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def listed(prompts: Prompt | Iterable[Any]) -> list[Any]:
    """The prompts as a list; a single prompt becomes a list of one. Raises InvalidRequest."""
    if isinstance(prompts, (str, Mapping, *_BYTES)):
        return [prompts]
    values = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array
    if not isinstance(values, Iterable):
        raise InvalidRequest(f"prompts must be {_TYPES}, or a list of these, got {prompts!r:.50}", param="prompt")
    several = list(values)
    return [several] if several and isinstance(several[0], Integral) else several


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """A prompt as text or as a list of token ids. Raises InvalidRequest for other types."""
    value: Any = prompt
    if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
        value = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if hasattr(value, "tolist") and not isinstance(value, _BYTES):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, _BYTES):
        raise InvalidRequest(f"a prompt is {_TYPES}, got {prompt!r:.50}", param="prompt")
    return [token if type(token) is int or isinstance(token, bool) or not isinstance(token, Integral) else int(token) for token in value]
