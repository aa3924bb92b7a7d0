"""The YAML file of settings that `--config` names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from chairlift.config import EngineConfig
from chairlift.errors import did_you_mean
from chairlift.server.config import ServerConfig
from chairlift.settings import names_in_files, parse_entry, parse_json_object


def read_config(arguments: Mapping[str, Any], places: dict[str, str] | None = None) -> dict[str, Any]:
    """The settings in the YAML file `--config`: names of flags, with - or _, and their values. Raises ValueError.

    `places` gets the place of each setting.
    """
    path = arguments.get("config")
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            yaml = import_module("yaml")
            # Nodes, because a value like 010 or 1.10 would be another as a number.
            document = yaml.compose(file, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # yaml.YAMLError, which is not imported
        raise ValueError(f"--config {path}: is no YAML ({' '.join(str(error).split())})") from None
    if document is None:
        return {}
    if document.id != "mapping":
        raise ValueError(f"--config {path}: expected lines like max-num-seqs: 16")
    known = {field.name: field for cls in (ServerConfig, EngineConfig) for field in fields(cls) if field.name in arguments["variables"]}
    names, settings = names_in_files(known.values()), dict[str, Any]()
    for node, value in document.value:
        key, where = str(node.value), f"--config {path}, line {node.start_mark.line + 1}"
        if (name := names.get(key.replace("-", "_"))) is None:
            raise ValueError(f"{where}: unknown setting {key}{did_you_mean(key, (one.replace('_', '-') for one in names))}")
        try:
            if name in settings:
                raise ValueError("it is set twice")
            settings[name] = parse_entry(known[name], _value(value, known[name].metadata.get("parse") is parse_json_object))
            if places is not None:
                places[name] = where
        except RecursionError:
            raise ValueError(f"{where}: {key}: it contains itself") from None
        except ValueError as error:
            raise ValueError(f"{where}: {key}: {error}") from None
    return settings


def _value(node: Any, as_json: bool) -> Any:
    """The value of a YAML node. Its scalars are texts, or `as_json` numbers, true, false and null where they are written so."""
    match node.id:
        case "mapping":
            return {str(key.value): _value(value, as_json) for key, value in node.value}
        case "sequence":
            return [_value(value, as_json) for value in node.value]
    if as_json and node.style is None:
        try:
            return json.loads(node.value)
        except ValueError:
            return node.value
    if node.tag.endswith(":null"):
        raise ValueError("it has no value: give it one, or remove the line")
    return node.value
