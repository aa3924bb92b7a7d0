"""Reads the models that Ollama has pulled. Nothing is ever written there.

A store has one manifest for each name, `manifests/HOST/NAMESPACE/MODEL/TAG`, as JSON. Its layers are files `blobs/sha256-DIGEST`, of the
media types `application/vnd.ollama.image.*`: model, template, params, system, adapter and others.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.checkpoint.hub_settings import home_dir
from chairlift.errors import UnsupportedModel

_WORD = r"[A-Za-z0-9_][\w.-]*"
_NAME = re.compile(
    r"(?:ollama://|https://(?=ollama\.com/))?"
    rf"(?:(?:(?P<host>{_WORD})/)?(?P<namespace>{_WORD})/)?(?P<model>{_WORD})(?::(?P<tag>{_WORD}))?",
    re.ASCII,
)
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MEDIA_TYPE = "application/vnd.ollama.image."
_LARGEST_TEXT = 1 << 20
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "repetition_penalty"}
"""Settings of the layer `params`, and the names in generation_config.json."""
_ENGINE = frozenset(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "draft_num_predict"))
"""Settings of the layer `params` that change no answer, or that the engine has flags for."""
_UNUSED = {"template": "its template", "system": "its system prompt", "messages": "its messages"}
"""Layers that change answers and are not used, and their names in a report."""


@dataclass(frozen=True, slots=True)
class OllamaFile:
    """The GGUF file of a model, and what its manifest says about answers."""

    path: Path
    sampling: dict[str, Any]
    """Recommended sampling settings, by their names in generation_config.json."""
    stop: tuple[str, ...]
    """Texts that end an answer."""
    unused: tuple[str, ...]
    """What changes answers in Ollama and is not used here."""


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model of a store, under the name that Ollama shows."""

    name: str
    manifest: Path

    @property
    def num_bytes(self) -> int:
        """The size of all layers, of which other models may have some too; 0 if the manifest cannot be read."""
        try:
            return sum(layer["size"] for layer in self._layers())
        except UnsupportedModel:
            return 0

    def read(self) -> OllamaFile:
        """Reads the manifest. Raises UnsupportedModel if the model has no complete GGUF file."""
        layers = {layer["mediaType"].removeprefix(_MEDIA_TYPE): layer for layer in self._layers()}
        if "adapter" in layers:
            raise self._refused("is a base model with a LoRA adapter: serve the base, with --lora-modules")
        if "model" not in layers:
            raise self._refused("has no GGUF file")
        params = self._params(layers["params"]) if "params" in layers else {}
        stop = params.pop("stop", None) or []
        texts = [stop] if isinstance(stop, str) else [text for text in stop if isinstance(text, str)]
        sampling = {name: value for key, name in _SAMPLING.items() if (value := params.pop(key, None)) is not None}
        unused = [what for layer, what in _UNUSED.items() if layer in layers] + sorted(params.keys() - _ENGINE)
        return OllamaFile(self._blob(layers["model"]), sampling, tuple(texts), tuple(unused))

    def _layers(self) -> list[dict[str, Any]]:
        try:
            with self.manifest.open("rb") as file:
                layers: list[dict[str, Any]] = json.loads(file.read(_LARGEST_TEXT))["layers"]
            sound = all(
                _DIGEST.fullmatch(layer["digest"]) and type(layer["size"]) is int and isinstance(layer["mediaType"], str)
                for layer in layers
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise self._refused(f"has a manifest that cannot be read, {self.manifest}")
        return layers

    def _blob(self, layer: dict[str, Any]) -> Path:
        path: Path = self.manifest.parents[4] / "blobs" / layer["digest"].replace(":", "-")
        try:
            is_complete = path.stat().st_size == layer["size"]
        except OSError:
            is_complete = False
        if not is_complete:
            raise self._refused(f"is not complete, {path} is missing or has another size: 'ollama pull {self.name}' completes it")
        return path

    def _params(self, layer: dict[str, Any]) -> dict[str, Any]:
        try:
            params = json.loads(self._blob(layer).read_bytes()[:_LARGEST_TEXT])
        except (OSError, ValueError, RecursionError):
            params = None
        if not isinstance(params, dict):
            raise self._refused("has parameters that cannot be read")
        return params

    def _refused(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"Ollama's model {self.name} {reason}")


def ollama_models() -> list[OllamaModel]:
    """Returns the models of Ollama's stores on this machine: of $OLLAMA_MODELS, else of the user and of Ollama's service."""
    named = os.environ.get("OLLAMA_MODELS")
    stores = [Path(named).expanduser()] if named else [home_dir() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    found: dict[str, OllamaModel] = {}
    for store in stores:
        try:
            manifests = [path for path in (store / "manifests").glob("*/*/*/*") if path.is_file()]
        except OSError:  # another user's store
            continue
        for path in manifests:
            name = _shortest(*path.parts[-4:])
            found.setdefault(name, OllamaModel(name, path))
    return sorted(found.values(), key=lambda model: model.name)


def find_ollama_model(name: str) -> OllamaModel | None:
    """Returns Ollama's model of a name, in any case; None if there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    host = match["host"] or _HOST
    known = _shortest(
        {"huggingface.co": "hf.co", "ollama.com": _HOST}.get(host, host),
        match["namespace"] or _NAMESPACE,
        match["model"],
        match["tag"] or _TAG,
    )
    return next((model for model in ollama_models() if model.name.lower() == known.lower()), None)


def _shortest(host: str, namespace: str, model: str, tag: str) -> str:
    """Returns a name without the parts that Ollama does not show; the tag is always shown."""
    if host != _HOST:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _NAMESPACE else f"{namespace}/{model}:{tag}"
