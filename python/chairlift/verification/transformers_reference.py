"""transformers as a reference: a process of a Python that has it runs `models/transformers_program.py`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.models.encoder import DenseModule
from chairlift.verification.reference import CannotCompare, Choices


class TransformersReference:
    """A model in transformers, in float32."""

    embedding_tolerance = 1e-4
    reads_marks = True

    def __init__(self, python: Path, model: Path) -> None:
        """Starts the process. `model` is a directory in Hugging Face's layout or a GGUF file, which transformers dequantises."""
        if not model.is_dir():
            self.reads_marks = False  # it does not compose characters for Qwen 2 and its successors when it reads a GGUF file
        program = find_spec("chairlift.models.transformers_program")
        assert program is not None
        assert program.origin is not None
        source = [str(model)] if model.is_dir() else [str(model.parent), model.name]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # a pipe could fill up
        self._process = subprocess.Popen(
            [str(python), program.origin, *source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},  # read when transformers is imported
        )
        try:
            self.name = f"{self._answer()} ({python})"
        except BaseException:
            self.close()
            raise

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self._ask("encode", text=text))

    def encode_pair(self, first: str, second: str) -> list[int] | None:
        """Returns the tokens of a pair of texts."""
        return list(self._ask("encode_pair", first=first, second=second))

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Returns the tokens of a conversation; None if the model has no chat template."""
        ids: list[int] | None = self._ask("chat", messages=messages)
        return ids

    def follow(self, prompt: list[int], answer: list[int], top: int) -> list[Choices]:
        """Returns the most likely tokens at each position of an answer."""
        return [[(token, logprob) for token, logprob in choices] for choices in self._ask("follow", prompt=prompt, answer=answer, top=top)]

    def embed(self, ids: list[int], pooling: str, dense: Sequence[DenseModule]) -> list[float]:
        """Returns the embedding of a text, a vector of length 1."""
        layers = [{"path": layer.path, "activation": layer.activation} for layer in dense]
        return list(self._ask("embed", ids=ids, pooling=pooling, dense=layers))

    def score(self, first: str, second: str) -> float:
        """Returns a classifier's number for a pair of texts."""
        return float(self._ask("score", first=first, second=second))

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _ask(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ask": method, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:] or ["it ended"]
            raise CannotCompare(f"transformers cannot compute the model: {last[0]:.500}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise CannotCompare(f"transformers answers {line!r:.200}, which is not JSON") from None
        if "error" in answer:
            raise CannotCompare(f"transformers cannot compute the model: {answer['error']:.500}")
        return answer["answer"]
