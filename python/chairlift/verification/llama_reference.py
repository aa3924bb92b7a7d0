"""llama.cpp as a reference: its llama-server computes a GGUF file, of which all tensors are made float32 first."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift.checkpoint.gguf_float import float_size, write_float
from chairlift.errors import UnsupportedModel
from chairlift.models.encoder import DenseModule, EncoderConfig
from chairlift.verification.reference import CannotCompare, Choices

START_SECONDS = 600
"""Time for llama-server to load a model."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment cannot reach the server of this machine."""
_POOLINGS = {"mean": "mean", "first": "cls", "last": "last"}


class LlamaReference:
    """A model in llama.cpp, in float32."""

    # llama.cpp approximates GELU by tanh in encoders.
    embedding_tolerance = 2e-3
    # It does not compose characters for Qwen 2 and its successors, and drops marks in WordPiece.
    reads_marks = False

    def __init__(self, program: Path, file: Path, context: int, encoder: EncoderConfig | None) -> None:
        """Starts llama-server for `context` tokens. Raises CannotCompare if it does not serve the model."""
        self._folder = Path(tempfile.mkdtemp(prefix="chairlift-verify-"))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(program, _in_float32(file, self._folder), context, encoder)
        except BaseException:
            self.close()
            raise
        self.name = f"llama.cpp {self._get('/props').get('build_info', '')} ({program})"

    def _start(self, program: Path, file: Path, context: int, encoder: EncoderConfig | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        flags = ["--port", str(port), "--host", "127.0.0.1", "-c", str(context), "-np", "1", "-ngl", "0", "-fa", "off", "--jinja"]
        flags += ["-ctk", "f32", "-ctv", "f32"]
        if encoder is not None:
            # A text must fit into one batch.
            flags += ["-b", str(context), "-ub", str(context)]
            flags += ["--reranking"] if encoder.score else ["--embedding", "--pooling", _POOLINGS[encoder.pooling]]
        log = self._folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen([str(program), "-m", str(file), *flags], stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()] or ["it ended"]
                raise CannotCompare(f"llama.cpp cannot compute the model: {lines[0]:.500}")
            time.sleep(0.1)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self._post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"])

    def encode_pair(self, first: str, second: str) -> list[int] | None:
        """Returns None: the server does not tell the tokens of a pair."""
        return None

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Returns the tokens of a conversation; None if the model has no chat template."""
        if not self._get("/props").get("chat_template"):
            return None
        return self.encode(self._post("/apply-template", messages=messages)["prompt"])

    def follow(self, prompt: list[int], answer: list[int], top: int) -> list[Choices]:
        """Returns the most likely tokens at each position of an answer.

        The server only follows its own choices, so it is asked again after each token that differs.
        """
        found: list[Choices] = []
        while len(found) < len(answer):
            settings = {"temperature": 0, "top_k": 1, "n_probs": top, "return_tokens": True, "cache_prompt": False}
            asked = self._post("/completion", prompt=prompt + answer[: len(found)], n_predict=len(answer) - len(found), **settings)
            if not asked["tokens"]:
                break
            for choices in choices_by_token(asked["tokens"], asked.get("completion_probabilities", [])):
                found.append(choices)
                if choices[0][0] != answer[len(found) - 1]:
                    break
        return found

    def embed(self, ids: list[int], pooling: str, dense: Sequence[DenseModule]) -> list[float]:
        """Returns the embedding of a text, a vector of length 1. The server knows the pooling, and the file has the layers after it."""
        numbers = self._post("/v1/embeddings", input=ids)["data"][0]["embedding"]
        length = math.sqrt(sum(x * x for x in numbers))
        return [x / length for x in numbers]

    def score(self, first: str, second: str) -> float:
        """Returns a classifier's number for a pair of texts."""
        return float(self._post("/rerank", query=first, documents=[second])["results"][0]["relevance_score"])

    def close(self) -> None:
        """Ends the server and removes its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        try:
            return bool(self._get("/health").get("status") == "ok")
        except (CannotCompare, OSError):
            return False

    def _get(self, path: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(self._url + path))

    def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        return self._send(urllib.request.Request(self._url + path, json.dumps(fields).encode(), {"content-type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with _OPENER.open(request, timeout=START_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise CannotCompare(f"llama.cpp cannot answer {request.selector}: {error.read().decode(errors='replace'):.500}") from None
        except (OSError, ValueError) as error:
            raise CannotCompare(f"llama.cpp does not answer {request.selector}: {error}") from None


def choices_by_token(tokens: list[int], listed: list[dict[str, Any]]) -> list[Choices]:
    """Returns the choices of each token of an answer.

    The server lists none for a token that ends within a character. The choices of the others are found from both ends, and kept where both
    agree. A token without choices has the log-probability NaN.
    """

    def align(tokens: list[int], numbers: list[int]) -> list[int | None]:
        left = iter(numbers)
        number = next(left, None)
        indices: list[int | None] = []
        for token in tokens:
            fits = number is not None and listed[number]["id"] == token
            indices.append(number if fits else None)
            number = next(left, None) if fits else number
        return indices

    numbers = list(range(len(listed)))
    forward, backward = align(tokens, numbers), align(tokens[::-1], numbers[::-1])[::-1]
    found: list[Choices] = []
    for token, index, other in zip(tokens, forward, backward, strict=True):
        if index is None or index != other:
            found.append([(token, math.nan)])
        else:
            found.append([(one["id"], one["logprob"]) for one in listed[index]["top_logprobs"]])
    return found


def _in_float32(file: Path, folder: Path) -> Path:
    """Returns the file, or a copy in `folder` with all tensors in float32: llama.cpp rounds activations for other types."""
    size = float_size(file)
    if size == 0:
        return file
    if size > shutil.disk_usage(folder).free:
        raise CannotCompare(f"a copy of {file.name} in float32 takes {size / 1e9:.1f} GB, more than is free in {folder.parent}: set TMPDIR")
    try:
        return write_float(file, folder / "float32.gguf")
    except UnsupportedModel as error:
        raise CannotCompare(str(error)) from None
