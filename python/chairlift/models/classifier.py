"""The classifier of a reranker: what it has instead of the matrix of all tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.architectures.reranker import CLASSIFIER, is_reranker
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import parse_names, parse_size, parse_table


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

        Raises UnsupportedModel for another number of labels or another order, or a vocabulary without yes and no.
        """
        names = parse_names(raw, "architectures") or []
        if not is_reranker(directory, names):
            return None
        if CLASSIFIER not in names:
            return cls(2, _answers(directory, parse_size(raw, "vocab_size")))
        named = parse_table(raw, "id2label")
        labels = len(named) or raw.get("num_labels", 2)
        if labels not in (1, 2):
            raise UnsupportedModel(f"{CLASSIFIER} has {labels} labels: there is code for 1, and for 2 (yes and no)")
        if str(named.get("1")).lower() == "yes":
            raise UnsupportedModel(f"{CLASSIFIER} has the labels no and yes: there is code for yes and no, in this order")
        return cls(labels)


def _answers(directory: Path, size: int) -> tuple[int, int]:
    """The ids of yes and no in tokenizer.json, below `size`."""
    try:
        vocabulary = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        answers = int(vocabulary["yes"]), int(vocabulary["no"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UnsupportedModel(f"{directory} is a reranker, and no tokenizer.json has the tokens yes and no") from None
    if not all(0 <= answer < size for answer in answers):
        raise UnsupportedModel(f"{directory}: the tokens yes and no have ids that the model's vocabulary of {size} lacks")
    return answers
