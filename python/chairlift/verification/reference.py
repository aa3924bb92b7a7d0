"""What a reference answers about a model, and how one is found on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from chairlift.errors import ChairliftError
from chairlift.models.encoder import DenseModule

VARIABLE = "LLAMA_CPP"
"""The environment variable that names llama.cpp's folder or its llama-server."""

Choices = list[tuple[int, float]]
"""The most likely tokens of a position with their log-probabilities, most likely first; NaN if the reference does not tell it."""


class CannotCompare(ChairliftError):
    """There is no reference for a model, or it cannot compute the model."""


class Reference(Protocol):
    """Another implementation of a model. All methods raise CannotCompare."""

    name: str
    """The program and its versions."""
    embedding_tolerance: float
    """The largest difference of a number of an embedding that is explained by the reference's own approximations."""

    reads_marks: bool
    """Whether it treats combining marks as the models' own tokenizers do."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that the model expects around it."""

    def encode_pair(self, first: str, second: str) -> list[int] | None:
        """Returns the tokens of a pair of texts; None if the reference does not tell."""

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Returns the tokens of a conversation; None if the model has no chat template."""

    def follow(self, prompt: list[int], answer: list[int], top: int) -> list[Choices]:
        """Returns the `top` most likely tokens at each position of an answer, given the answer's tokens before it.

        The list is shorter than the answer if the reference cannot go on after a token.
        """

    def embed(self, ids: list[int], pooling: str, dense: Sequence[DenseModule]) -> list[float]:
        """Returns the embedding of a text, a vector of length 1. `dense` are the layers after the pooling."""

    def score(self, first: str, second: str) -> float:
        """Returns a classifier's number for a pair of texts."""

    def close(self) -> None:
        """Ends the reference."""


def find_llama_server(named: Path | None) -> Path | None:
    """Returns llama.cpp's llama-server, or None if there is none.

    It is that of `named`, a program or a folder, or of LLAMA_CPP, or the one on the path. Raises CannotCompare if a name leads to none.
    """
    if named is None and (variable := os.environ.get(VARIABLE)):
        named = Path(variable)
    if named is None:
        found = shutil.which("llama-server")
        return Path(found) if found else None
    places = [named, *(named / folder / "llama-server" for folder in ("", "bin", "build/bin"))]
    program = next((place for place in places if place.is_file() and os.access(place, os.X_OK)), None)
    if program is None:
        raise CannotCompare(f"{named} is neither llama-server nor a folder that has it (in itself, bin or build/bin)")
    return program.absolute()


def find_python(named: Path | None) -> Path | None:
    """Returns a Python with transformers: `named`, or this one if it has transformers and torch; None if there is none."""
    if named is not None:
        if not os.access(named, os.X_OK) or not named.is_file():
            raise CannotCompare(f"{named} is no Python interpreter: name one such as ENVIRONMENT/bin/python")
        return named.absolute()
    return Path(sys.executable) if find_spec("transformers") and find_spec("torch") else None
