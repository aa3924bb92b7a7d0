"""Which models a server has, from the command line or the file of `--models`."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.checkpoint.locate import public_name
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, did_you_mean
from chairlift.server.config import ServerConfig
from chairlift.server.toml_file import line_of, read_toml
from chairlift.settings import names_in_files, parse_entry

_ENGINE_FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig) if "help" in field.metadata}
_SERVER_FIELDS = {name: ServerConfig.__dataclass_fields__[name] for name in ("keep_alive", "tool_call_parser", "reasoning_parser")}
_FLAGS = names_in_files((*_ENGINE_FIELDS.values(), *_SERVER_FIELDS.values()))
_LARGEST = 1000
"""The largest priority, with or without a sign, and the largest weight."""
_OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "path": (
        lambda value: isinstance(value, str) and value != "",
        "a directory, a .gguf file or its https address, a hub name or Ollama's name",
    ),
    "aliases": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) and name.strip() for name in value),
        'a list of names, like ["gpt-4o"]',
    ),
    "priority": (lambda value: type(value) is int and abs(value) <= _LARGEST, f"a whole number from -{_LARGEST} to {_LARGEST}"),
    "weight": (lambda value: type(value) is int and 1 <= value <= _LARGEST, f"a whole number from 1 to {_LARGEST}"),
    "preload": (lambda value: isinstance(value, bool), "true or false"),
}
"""The settings of a model that are neither the engine's nor the server's: whether a value fits, and what is expected."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a server with several."""

    name: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    keep_alive: float | None = None
    """Seconds that it stays loaded after its last use; None: for ever."""
    priority: int = 0
    """The model with the lowest number is loaded first and unloaded last."""
    weight: int = 1
    """Its share of the engine process's time while several models have requests."""
    preload: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


def single_model(text: str, config: EngineConfig, server: ServerConfig) -> ModelSpec:
    """Returns the only model of a server, `MODEL` or `NAME=MODEL`. It is loaded at the start and stays."""
    for flag, value in (
        ("--preload", server.preload),
        ("--max-loaded-models", server.max_loaded_models),
        ("--models-memory", server.models_memory),
    ):
        if value:
            raise InvalidSetting(f"{flag} is for several models: name them on the command line, or in the file of --models")
    name, path = _split(text)
    return _spec(server.served_model_name or name, path, config, server, preload=True)


def named_models(texts: Sequence[str], config: EngineConfig, server: ServerConfig) -> list[ModelSpec]:
    """Returns the models of the command line, `MODEL` or `NAME=MODEL`; a model that is there twice has several names.

    Raises InvalidSetting if two models have the same name.
    """
    names: dict[str, list[str]] = {}
    for text in texts:
        name, path = _split(text)
        names.setdefault(path, []).append(name)
    config = replace(config, shared_max_model_len=True)
    specs = [_spec(names[0], path, config, server, aliases=tuple(names[1:])) for path, names in names.items()]
    return _checked(specs, server)


def _split(text: str) -> tuple[str, str]:
    """Splits `NAME=MODEL`; a `MODEL` alone has its public name."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return public_name(text), text
    if not name.strip() or not path:
        raise InvalidSetting(f"expected NAME=MODEL, got {text!r:.100}")
    return name, path


def read_models(file: str, config: EngineConfig, server: ServerConfig) -> list[ModelSpec]:
    """Reads the file of `--models`. Settings that a model does not have are those of `config` and `server`.

    Raises InvalidSetting with the line of what is wrong.
    """
    flag = f"--models {file}"
    tables, text = read_toml(flag, file)
    if not tables:
        raise InvalidSetting(f'{flag}: it has no models; write [NAME] and below it path = "..."')
    specs = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise InvalidSetting(f"{flag}{line_of(text, name)}: {name:.100} is outside a table: expected one table a model, [NAME]")
        if not name.strip():
            raise InvalidSetting(f"{flag}{line_of(text, name)}: the name of a model must not be empty")
        settings: dict[str, Any] = {}
        for key, value in table.items():
            try:
                setting = key.replace("-", "_")
                setting = _FLAGS.get(setting, setting)
                if setting in settings:
                    raise ValueError("it is set twice")
                settings[setting] = _setting(setting, value)
            except ValueError as error:
                raise InvalidSetting(f"{flag}{line_of(text, name, key)}: [{name:.100}] {key:.100}: {error}") from None
        try:
            if "path" not in settings:
                raise ValueError('it needs path = "..."')
            specs.append(_table_spec(name, settings, config, server))
        except ValueError as error:
            raise InvalidSetting(f"{_place(flag, text, name, _named_in(str(error), table))}: {error}") from None
    return _checked(specs, server, flag, text)


def place_of(name: str, message: str, file: str) -> str:
    """The place in the file of `--models` that a `message` on a model is about: the key that it names, else the model's path."""
    flag = f"--models {file}"
    tables, text = read_toml(flag, file)
    return _place(flag, text, name, _named_in(message, tables[name]) or "path")


def _place(flag: str, text: str, name: str, key: str | None) -> str:
    return f"{flag}{line_of(text, name, key)}: [{name:.100}]{f' {key}' if key else ''}"


def _named_in(message: str, table: Mapping[str, Any]) -> str | None:
    """Returns the key of a model's table whose flag `message` names first."""
    found = {match.start(): key for key in table if (match := re.search(rf"--{key.replace('_', '-')}\b(?!-)", message))}
    return found[min(found)] if found else None


def _table_spec(name: str, settings: dict[str, Any], config: EngineConfig, server: ServerConfig) -> ModelSpec:
    engine = {key: value for key, value in settings.items() if key in _ENGINE_FIELDS}
    own = {key: value for key, value in settings.items() if key not in engine and key != "path"}
    config = replace(config, **engine, shared_max_model_len="max_model_len" not in engine)
    return _spec(name, settings["path"], config, server, **own)


def _spec(name: str, path: str, config: EngineConfig, server: ServerConfig, **own: Any) -> ModelSpec:
    preload = own.pop("preload", name in server.preload or "all" in server.preload)
    keep_alive = own.pop("keep_alive", math.inf if preload else server.keep_alive)
    if hidden := {name, *own.get("aliases", ())} & (config.lora_modules or {}).keys():
        raise InvalidSetting(
            f"--lora-modules: the adapter {min(hidden)!r:.100} has the name of its model, which requests would get: rename it"
        )
    parsers = {"tool_call_parser": server.tool_call_parser, "reasoning_parser": server.reasoning_parser}
    for_ever = None if math.isinf(keep_alive) else keep_alive
    return ModelSpec(name, replace(config, model=path), keep_alive=for_ever, preload=preload, **{**parsers, **own})


def _setting(key: str, value: Any) -> Any:
    """Returns the value of one model's setting; raises ValueError."""
    if key in _OWN:
        fits, expected = _OWN[key]
        if not fits(value):
            raise ValueError(f"expected {expected}, got {value!r:.100}")
        return tuple(value) if key == "aliases" else value
    field = _ENGINE_FIELDS.get(key) or _SERVER_FIELDS.get(key)
    if field is None:
        known = (*_OWN, *_SERVER_FIELDS, *_ENGINE_FIELDS)
        raise ValueError(f"no such setting{did_you_mean(key, known)}")
    return parse_entry(field, value)


def _checked(specs: list[ModelSpec], server: ServerConfig, flag: str = "", text: str = "") -> list[ModelSpec]:
    """Raises InvalidSetting if names, or the models to preload, do not fit together. `text` is that of the file of `--models`."""
    where = f"{flag}: " if flag else ""
    known: set[str] = set()
    for spec in specs:
        for key, name in ((None, spec.name), *(("aliases", alias) for alias in spec.aliases)):
            if name in known:
                advice = "give one of them another" if flag else "write NAME=MODEL"
                line = f"{flag}{line_of(text, spec.name, key)}: " if flag else ""
                raise InvalidSetting(f"{line}two models have the name {name!r:.100}: {advice}")
            known.add(name)
    if unknown := [name for name in server.preload if name != "all" and name not in {spec.name for spec in specs}]:
        names = [spec.name for spec in specs]
        raise InvalidSetting(f"--preload: there is no model {unknown[0]!r:.100}{did_you_mean(unknown[0], names)}")
    preloaded = sum(spec.preload for spec in specs)
    if server.max_loaded_models is not None and preloaded > server.max_loaded_models:
        raise InvalidSetting(f"{where}{preloaded} models are preloaded, more than --max-loaded-models {server.max_loaded_models}")
    if len(specs) > 1 and (shared := _shared_journal(specs)):
        line = f"{flag}{line_of(text, shared.name, 'journal')}: [{shared.name:.100}] journal: " if flag else ""
        raise InvalidSetting(f"{line}two models have the journal {shared.config.journal}: give each its own in the file of --models")
    return specs


def _shared_journal(specs: Iterable[ModelSpec]) -> ModelSpec | None:
    """Returns the first model whose journal is another's too."""
    journals: set[str] = set()
    for spec in specs:
        path = None if spec.config.journal is None else os.path.realpath(spec.config.journal)
        if path in journals:
            return spec
        if path is not None:
            journals.add(path)
    return None
