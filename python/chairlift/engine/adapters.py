"""The LoRA adapters of an engine, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.checkpoint.adapter import AdapterFiles, AdapterHeader
from chairlift.config import EngineConfig
from chairlift.errors import InvalidRequest, InvalidSetting, UnsupportedModel

if TYPE_CHECKING:
    from chairlift.runner.interface import AdapterStore, Runner


class PackedAdapter(NamedTuple):
    """An adapter that was read and packed, and is not loaded yet."""

    packed: Any
    """What `add` of the runner's adapters takes."""
    digest: bytes


class Adapter(NamedTuple):
    """A loaded adapter."""

    number: int
    """The runner's number."""
    digest: bytes
    """The hash of its files, which is part of the names of its KV blocks."""


def check_rank(adapter: AdapterHeader, max_rank: int) -> None:
    """Raises InvalidSetting if the adapter has a higher rank."""
    if adapter.rank > max_rank:
        raise InvalidSetting(f"adapter {adapter.path} has rank {adapter.rank}, above --max-lora-rank {max_rank}")


class Adapters:
    """Loads and unloads adapters. Only `read` may be called on any thread."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        """Loads the adapters of `--lora-modules`. Raises InvalidSetting and UnsupportedModel."""
        if config.enable_lora and runner.adapters is None:
            raise InvalidSetting("--enable-lora: there is no decoder whose layers adapters could change")
        self._given, self._max_rank = runner.adapters if config.enable_lora else None, config.max_lora_rank
        self._loaded: dict[str, Adapter] = {}
        for name, path in (config.lora_modules or {}).items():
            self.add(name, self.read(path))

    def read(self, path: str) -> PackedAdapter:
        """Reads and packs the adapter `path`, a directory or a GGUF file.

        Raises UnsupportedModel, and InvalidSetting for a rank that is too high.
        """
        store, files = self._store, AdapterFiles(Path(path))
        check_rank(files, self._max_rank)
        try:
            return PackedAdapter(store.pack(files), files.digest)
        except ValueError as error:
            raise UnsupportedModel(f"adapter {path}: {error}") from None

    def add(self, name: str, adapter: PackedAdapter) -> None:
        """Loads an adapter under a name. Raises InvalidRequest if the name is in use."""
        if name in self._loaded:
            raise InvalidRequest(f"an adapter named {name!r:.100} is loaded already: unload it first", param="lora_name")
        self._loaded[name] = Adapter(self._store.add(adapter.packed), adapter.digest)

    @property
    def digests(self) -> dict[str, str]:
        """The hashes of the loaded adapters' files as hex digits, by name."""
        return {name: adapter.digest.hex() for name, adapter in self._loaded.items()}

    def get(self, name: str) -> Adapter:
        """The adapter of that name. Raises InvalidRequest if it is not loaded."""
        if (adapter := self._loaded.get(name)) is not None:
            return adapter
        loaded = f"the loaded ones are {', '.join(sorted(self._loaded))}" if self._loaded else "none is loaded"
        off = "" if self._given is not None else ": start with --enable-lora"
        raise InvalidRequest(f"no adapter is named {name!r:.100}; {loaded}{off}", param="lora", code="adapter_not_found")

    def remove(self, name: str) -> None:
        """Unloads an adapter that no sequence uses. Raises InvalidRequest if it is not loaded."""
        self._store.remove(self.get(name).number)
        del self._loaded[name]

    @property
    def _store(self) -> AdapterStore:
        if self._given is None:
            raise InvalidRequest("adapters are off: start with --enable-lora", param="lora")
        return self._given
