"""The grids of ggml's types IQ1_S to IQ3_S: tables of values, which the CPU kernels get from the gguf package."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from chairlift import _core
from chairlift.checkpoint.gguf import BLOCK_TYPES
from chairlift.errors import UnsupportedModel

GRID_TYPES = (16, 17, 18, 19, 21, 22, 29)
"""ggml's numbers of the types."""


def provide_grids(kinds: Iterable[int], path: Path) -> None:
    """Gives the kernels the grids of those of the types `kinds` that have one.

    Raises UnsupportedModel, with the name of the file at `path`, if the gguf package is not installed or lacks a type.
    """
    known = set(_core.block_types())
    for kind in sorted(set(GRID_TYPES) & set(kinds) - known):
        name = BLOCK_TYPES[kind][0]
        try:
            quant = getattr(importlib.import_module("gguf.quants"), name)
        except ImportError:
            raise UnsupportedModel(f"{path} has tensors of type {name}, which need one more package: pip install gguf") from None
        except AttributeError:
            raise UnsupportedModel(f"{path} has tensors of type {name}, which need a newer gguf package: pip install -U gguf") from None
        quant.init_grid()
        _core.provide_grid(kind, quant.grid.astype(np.int8).reshape(-1))
