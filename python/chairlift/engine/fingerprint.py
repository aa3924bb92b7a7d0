"""What an engine's answers depend on beside the request, as one hash: equal engines give equal tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift import _core
from chairlift.checkpoint.weight_files import weight_files
from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound

if TYPE_CHECKING:
    from chairlift.runner.interface import Runner

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Pieces of each file of weights that are hashed, at equal distances: hashing whole files would double the time of a start."""
NUMERICS = ("code", "device", "weights", "arithmetic", "KV dtype")
"""The decisions that change a bit of the logits. Threads, batches and memory change none in the CPU kernels."""


def fingerprint(config: EngineConfig, directory: Path, runner: Runner, digest: str) -> str:
    """Hashes Chairlift's version, the instruction set, the dtypes, the model's configuration and its weights: 32 hex digits.

    `digest` is that of the checkpoint in `directory`. It does not count if the weights come from elsewhere.
    """
    isa = _core.instruction_sets()[0] if config.cpu_isa == "auto" else config.cpu_isa
    chosen = [f"{what}={value}" for what, value, _ in runner.decisions if what in NUMERICS]
    longest = str(config.max_model_len) if runner.model_config.depends_on_length else ""
    parts = [_core.__version__, isa, *chosen, str(config.block_size), longest, config.load_format]
    found = hashlib.blake2b("\n".join(parts).encode(), digest_size=16)
    if config.load_format == "auto":
        found.update(digest.encode())
        return found.hexdigest()
    found.update((directory / "config.json").read_bytes())
    if config.load_format == "dummy":
        found.update(str(config.seed).encode())
    return found.hexdigest()


def checkpoint_digest(directory: Path) -> str:
    """Identifies a checkpoint by its configuration, the sizes of its weights' files and samples of their content: 64 hex digits."""
    found = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=32)
    for piece in _weights(directory):
        found.update(piece)
    return found.hexdigest()


def _weights(directory: Path) -> Iterator[bytes]:
    """The size of each file of weights, and samples of it; nothing if there are none."""
    try:
        paths = weight_files(directory)
    except ModelNotFound:
        return
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield f"{path.name} {size}\n".encode()
            for sample in range(SAMPLES):
                yield os.pread(file.fileno(), SAMPLE_BYTES, max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
