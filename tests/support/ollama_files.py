"""Stores of models as Ollama writes them."""

import hashlib
import json
from pathlib import Path


def write_ollama_model(store: Path, name: str, layers: dict[str, bytes]) -> Path:
    """Writes the manifest of `HOST/NAMESPACE/MODEL/TAG` and its layers, by the last word of their media types; returns the manifest."""
    entries = []
    for kind, content in layers.items():
        digest = hashlib.sha256(content).hexdigest()
        blob = store / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.write_bytes(content)
        entries.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)})
    manifest = store / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return manifest
