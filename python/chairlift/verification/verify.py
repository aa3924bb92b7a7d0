"""Verifies a model: chooses the reference, compares, and reports."""

from __future__ import annotations

import contextlib
import logging
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chairlift import _core
from chairlift.checkpoint.download import sha256_of
from chairlift.checkpoint.gguf import convert
from chairlift.checkpoint.gguf_parts import parts_of
from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.weight_files import gguf_link, weight_files
from chairlift.config import EngineConfig
from chairlift.engine.llm import LLM
from chairlift.models.encoder import EncoderConfig
from chairlift.verification.comparison import (
    CHUNK,
    COMPANY,
    Findings,
    compare_answers,
    compare_embeddings,
    compare_scores,
    compare_texts,
)
from chairlift.verification.llama_reference import LlamaReference
from chairlift.verification.reference import VARIABLE, CannotCompare, Reference, find_llama_server, find_python
from chairlift.verification.transformers_reference import TransformersReference

CONTEXT = 512
"""Tokens of a sequence, if the model was made for as many."""


def verify(config: EngineConfig, *, python: Path | None = None, llama_cpp: Path | None = None) -> Findings:
    """Compares a model's tokens, and its greedy answers, embeddings or scores, with those of a reference.

    `python` has transformers, and `llama_cpp` is llama-server or its folder; without them, the reference is one that is found. Raises
    CannotCompare, and what loading the model raises.
    """
    findings = Findings()
    with _warnings() as reported, tempfile.TemporaryDirectory(prefix="chairlift-verify-") as folder:
        directory = locate(config.model, config.revision, config.cache_dir)
        if (file := gguf_link(directory)) is not None:
            # Converted again, because only the conversion reports what nothing reads.
            directory = Path(folder) / "model"
            convert(file, directory)
        encoder = EncoderConfig.find(directory)
        # A model that was made for fewer tokens has its own limit.
        context: dict[str, Any] = {"max_model_len": CONTEXT, "shared_max_model_len": True}
        # Opened before the model is loaded, which may take minutes.
        reference = _open(directory, file, encoder, python, llama_cpp)
        try:
            with LLM(directory, device="cpu", cpu_math="exact", max_num_seqs=COMPANY, max_num_batched_tokens=CHUNK, **context) as llm:
                _describe(llm, config.model, directory, file, reference, findings)
                compare_texts(llm, reference, findings)
                if encoder is None and llm.info.generates:
                    compare_answers(llm, reference, findings)
                elif encoder is None or encoder.score is None:
                    compare_embeddings(llm, reference, encoder, findings)
                else:
                    compare_scores(llm, reference, findings)
        finally:
            reference.close()
    unused = list(dict.fromkeys(reported))
    findings.note("warnings", "; ".join(unused) if unused else "none: each key and each tensor is used or known to change nothing")
    return findings


def _open(directory: Path, file: Path | None, encoder: EncoderConfig | None, python: Path | None, llama_cpp: Path | None) -> Reference:
    """Starts the reference that was named, or else one that is found: llama.cpp for a GGUF file, transformers otherwise."""
    if file is None and llama_cpp is not None:
        raise CannotCompare("llama.cpp computes GGUF files alone: convert the model, or name a Python with transformers (--python)")
    if file is not None and python is None and (program := find_llama_server(llama_cpp)) is not None:
        return LlamaReference(program, file, CONTEXT, encoder)
    if (interpreter := find_python(python)) is not None:
        return TransformersReference(interpreter, directory if file is None else file)
    hint = "" if file is None else f" or llama-server on the path (or {VARIABLE}, or --llama-cpp)"
    raise CannotCompare(f"there is no reference: install transformers and torch here, name a Python that has them (--python){hint}")


def _describe(llm: LLM, model: str, directory: Path, file: Path | None, reference: Reference, findings: Findings) -> None:
    """Notes the versions, the files and how the model is computed."""
    decisions = {what: value for what, value, _ in llm.info.decisions}
    findings.note(
        "versions", f"chairlift {_core.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    findings.note("reference", reference.name)
    findings.note("model", model)
    for path in parts_of(file) if file else weight_files(directory):
        findings.note("file", f"{path.name}, {path.stat().st_size:,} bytes, SHA-256 {sha256_of(path)}")
    for name in ("code", "weights", "pooling"):
        if name in decisions:
            findings.note(name, decisions[name])


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings that are logged about the model."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, log = Collector(logging.WARNING), logging.getLogger("chairlift")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
