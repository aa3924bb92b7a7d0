"""The classifier of a reranker: what it has instead of the matrix of all tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.architectures.reranker import CLASSIFIER, is_reranker
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import parse_names, parse_table


@dataclass(frozen=True, slots=True)
class Classifier:
    """The rows of a head that score a pair of texts: the score is the sigmoid of the first number, less the second one if there are two.

    `tokens` are the rows of the decoder's head for yes and no. Without them the checkpoint has `rows` of the tensor `score.weight`.
    """

    rows: int
    tokens: tuple[int, int] | None = None

    @classmethod
    def find(cls, raw: dict[str, Any], directory: Path) -> Classifier | None:
        """Reads the classifier of a checkpoint with this config.json; None if it is no reranker.

        Raises UnsupportedModel for another number of labels, or a vocabulary without yes and no.
        """
        names = parse_names(raw, "architectures") or []
        if not is_reranker(directory, names):
            return None
        if CLASSIFIER not in names:
            return cls(2, _answers(directory))
        labels = len(parse_table(raw, "id2label")) or raw.get("num_labels", 2)
        if labels not in (1, 2):
            raise UnsupportedModel(f"{CLASSIFIER} has {labels} labels: there is code for 1, and for 2 (yes and no)")
        return cls(labels)


def _answers(directory: Path) -> tuple[int, int]:
    """The ids of yes and no in tokenizer.json."""
    try:
        vocabulary = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        return int(vocabulary["yes"]), int(vocabulary["no"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UnsupportedModel(f"{directory} is a reranker, and no tokenizer.json has the tokens yes and no") from None
