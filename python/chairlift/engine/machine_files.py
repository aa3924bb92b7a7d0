"""The files of a machine that its engine may use for a server on another machine.

No frame names a file: a server that was broken into, or that has another file under the same path, must not choose what an engine of
another machine reads and overwrites.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

from chairlift.checkpoint.locate import public_name
from chairlift.checkpoint.model_name import is_hub_name
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.engine.frames import Frame, Load, LoadAdapter
from chairlift.engine.journal import create_next
from chairlift.errors import InvalidSetting

OWN = (
    *("tokenizer", "chat_template", "cache_dir", "lora_modules", "journal", "energy_meter"),
    *("prefix_cache_dir", "prefix_cache_disk"),
)
"""The settings that name files of the engine's machine, beside the model: they are never another machine's."""
_DEFAULTS = {item.name: item.default for item in fields(EngineConfig) if item.name in OWN}
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


class MachineFiles:
    """The model and the settings of `OWN` that this machine's user has chosen."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` has some of `OWN`, and `model` if it is not to be fetched by the name that the server says."""
        self.settings = {**_DEFAULTS, **settings}

    def own(self, frame: Frame) -> Frame:
        """A frame of the server with this machine's files. Raises InvalidSetting if it needs one that this machine has not named.

        The first `Load` creates the journal of this process's engine.
        """
        match frame:
            case Load(settings):
                own = {**self.settings, **self._model(settings), **self._adapters(settings), "journal": self._journal}
                return replace(frame, settings={**settings, **own})
            case LoadAdapter(_, name):
                return replace(frame, path=self._adapter(name))
        return frame

    @cached_property
    def _journal(self) -> str | None:
        """A new file. The number of an engine is the server's, so it cannot tell apart the engines that this machine has had."""
        journal = self.settings["journal"]
        return create_next(journal) if journal else None

    def _model(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """The model, and its revision."""
        model, revision = self.settings.get("model"), sent.get("revision")
        if revision is not None and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
            raise InvalidSetting(f"the server's --revision {revision!r:.100} is no name of a branch, tag or commit")
        if model is not None:
            return {"model": model, "revision": revision}
        named: Any = sent.get("model")
        by_name = isinstance(named, str) and (named == DEFAULT_MODEL or is_hub_name(named))
        if not by_name or os.path.exists(named):  # a name that is also a path here would be read as a path
            raise InvalidSetting(f"the model {named!r:.100} cannot be fetched by its name: start join with --model on the engine's machine")
        return {"model": named, "revision": revision}

    def _adapters(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """The adapters that the server has at its start."""
        names = sent.get("lora_modules")
        return {"lora_modules": None if names is None else {name: self._adapter(name) for name in names}}

    def _adapter(self, name: str) -> str:
        path = (self.settings["lora_modules"] or {}).get(name)
        if path is None:
            raise InvalidSetting(
                f"the engine's machine has not named the adapter {name!r:.100}: start join with --lora-modules NAME=PATH there"
            )
        return str(path)


def without_files(frame: Frame) -> Frame:
    """A frame for another machine, which has its own files: the model is named as clients see it, and no path is left."""
    match frame:
        case Load(settings):
            names = settings.get("lora_modules")
            modules = None if names is None else dict.fromkeys(names, "")
            model = public_name(settings["model"])
            return replace(frame, settings={**settings, **_DEFAULTS, "lora_modules": modules, "model": model})
        case LoadAdapter():
            return replace(frame, path="")
    return frame
