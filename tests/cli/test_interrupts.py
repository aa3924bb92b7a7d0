"""Ctrl-C shows no traceback, whatever a command is importing at that moment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

INTERRUPTER = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.killpg(0, signal.SIGINT)  # as a terminal does

sys.meta_path.insert(0, Interrupter())
"""
"""A `sitecustomize` that presses Ctrl-C when a module is about to be imported."""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["--version"], "chairlift.cli"),
        (["--help"], "chairlift.cli.main"),
        (["pull"], "argparse"),
        (["compare"], "chairlift.config"),
        (["compare"], "chairlift.cli.compare"),
        (["compare"], "numpy"),
        (["simulate", "--trace", "none.csv"], "chairlift._core"),
        (["top"], "rich"),
        (["bench", "latency", "--load-format", "none"], "chairlift.engine.llm"),
        (["generate", "a"], "tokenizers"),
        (["serve", "--port", "0"], "chairlift.cli.serve"),
        (["serve", "--port", "0"], "uvicorn"),
        (["serve", "--port", "0"], "chairlift.engine.process"),
    ],
)
def test_an_interrupt_during_an_import_shows_no_traceback(command, module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(
        [sys.executable, "-m", "chairlift", *command],
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": module},
        cwd=Path.home(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, reported = process.communicate(timeout=100)
    assert process.returncode in (130, -signal.SIGINT), reported
    assert "Traceback" not in reported
    assert "KeyboardInterrupt" not in reported
