"""Reads the environment variables and files with which users of the Hugging Face hub set its address, their token and its cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from chairlift.errors import ModelNotFound

_TRUE = ("1", "ON", "YES", "TRUE")


def home_dir() -> Path:
    """Returns the user's home directory; `/`, as in a container, for a user without $HOME and without an entry in the password file."""
    home = os.path.expanduser("~")
    return Path("/" if home == "~" else home)


def endpoint() -> str:
    """Returns the hub's address, which $HF_ENDPOINT sets."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Whether $HF_HUB_OFFLINE allows no requests to the hub."""
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def hub_token() -> str | None:
    """Returns the user's token: $HF_TOKEN, or the file that `hf auth login` writes. Raises ModelNotFound if it cannot be one."""
    source, token = "HF_TOKEN", os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token.strip() and not _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        source = os.environ.get("HF_TOKEN_PATH") or str(_home() / "token")
        try:
            token = Path(source).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
    token = token.strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise ModelNotFound(f"the token in {source} has characters that no token has: copy it again from {endpoint()}/settings/tokens")
    return token or None


def own_cache() -> Path:
    """Returns the directory of models that the hub's programs share."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(named) if named else _home() / "hub"


def _home() -> Path:
    home, base = os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME")
    return _expanded(home) if home else (_expanded(base) if base else home_dir() / ".cache") / "huggingface"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in _TRUE
