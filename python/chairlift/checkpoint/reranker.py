"""The prompt of Qwen3's rerankers, which answer yes or no to whether a document answers a query."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of the models' cards."""


def pair_template(directory: Path, architectures: Iterable[str], tokenizer_config: Mapping[str, Any]) -> str | None:
    """Returns the prompt of a reranker, with {query} and {document} in it; None for other models.

    A GGUF file has its own, which the converted tokenizer_config.json lists among the chat templates.
    """
    from chairlift.architectures.reranker import is_reranker  # imports all architectures, which a server does not need

    if not is_reranker(directory, architectures):
        return None
    listed = tokenizer_config.get("chat_template")
    named = {item["name"]: item["template"] for item in listed} if isinstance(listed, list) else {}
    return str(named.get("rerank", _TEMPLATE))


def fill_template(template: str, query: str, document: str, controls: Sequence[str]) -> list[tuple[str, bool]]:
    """Returns the prompt as pieces of text, each with whether `controls` are plain text in it.

    A piece is the text between control tokens, so that it is tokenized as if the template were one text.
    """
    texts = {"query": query, "document": document}
    pieces = re.split("(" + "|".join(map(re.escape, controls)) + ")", template) if controls else [template]
    filled = [re.sub(r"\{(query|document)\}", lambda found: texts[found[1]], piece) for piece in pieces]
    return [(text, text != piece) for text, piece in zip(filled, pieces, strict=True) if text]
