"""Which checkpoints are Qwen3's rerankers: decoders that answer yes or no to whether a document answers a query."""

from collections.abc import Iterable
from pathlib import Path

from chairlift.architectures.qwen import QWEN3

CLASSIFIER = "Qwen3ForSequenceClassification"
"""The class of a reranker whose checkpoint has the matrix of its answers instead of that of all tokens."""


def is_reranker(directory: Path, architectures: Iterable[str]) -> bool:
    """Whether a checkpoint of these `architectures` is a reranker.

    The published ones have the class of any Qwen3, so their name must be in that of the directory, or of the model in the hub's cache.
    """
    names, path = set(architectures), directory.absolute()
    name = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    return CLASSIFIER in names or (QWEN3.name in names and "qwen3-reranker" in name.lower())
