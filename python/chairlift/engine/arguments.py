"""The settings of the engine as keyword arguments of `LLM` and `AsyncEngine`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, did_you_mean


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
    settings = [item for item in fields(EngineConfig) if item.name not in {parameter.name for parameter in own}]
    keyword = inspect.Parameter.KEYWORD_ONLY
    keywords = [inspect.Parameter(item.name, keyword, default=item.default, annotation=item.type) for item in settings]
    setattr(cls, "__signature__", inspect.Signature([*own, *keywords]))  # noqa: B010  (mypy knows no such attribute)
    lines = [f"    {item.name}: {_python_names(item.metadata.get('help', 'name or path of the model'))}" for item in settings]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Settings:", *lines])
    return cls


def _python_names(text: str) -> str:
    """The text with settings named as in Python instead of as flags."""
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)
