"""Where fetched and converted models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$CHAIRLIFT_CACHE, else $XDG_CACHE_HOME/chairlift, else ~/.cache/chairlift; it need not exist yet."""
    if named := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"
