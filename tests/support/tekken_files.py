"""A tiny tekken.json, as Mistral's own checkpoints have it."""

import base64
import json
from pathlib import Path
from typing import Any


def write_tekken(path: Path, *, control: list[str] | None = None) -> None:
    """Writes all bytes, some merges, and one token beyond the vocabulary's size; `control` names the control tokens."""
    texts = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"o ", b"\xc3\xa9", b"hello", b"xyz", b"beyond"]
    config = {"pattern": r" ?\p{L}+|\s+|.", "num_vocab_tokens": len(texts), "default_vocab_size": len(texts) - 1 + 30}
    file: dict[str, Any] = {
        "config": config | {"default_num_special_tokens": 30, "version": "v3"},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(text).decode(), "token_str": None} for rank, text in enumerate(texts)],
    }
    if control is not None:
        file["special_tokens"] = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(control)]
    path.write_text(json.dumps(file))
