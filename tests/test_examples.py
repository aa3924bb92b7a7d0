"""Runs the examples: against one server with the default model, or in their own process."""

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
OUTPUT = {
    "streaming": r".+\n\d+ tokens\n",
    "tools": r'get_weather\(\{"city": ?"(Paris|Rome)"\}\) = It is sunny in \1\.\n.+',
    "schema": r"(cat|dog|spider): [0-8] legs\n",
    "fairness": r"bob's request came last and was answered as number (\d|1\d) of 25\n",
    "deadlines": r"504 deadline_exceeded: .+\n",
    "replay": r"\d+ calls, every decision is equal\n(max_num_seqs .+ mean TTFT\n){4}",
    "simulate": r"fcfs .+\nshortest .+\n",
    "beam_search": r"(-\d+\.\d\d '.*'\n){3}",
    "best_of_n": r"-\d+\.\d\d ['\"].+\n",
    "tree_of_thoughts": r"Question: Anna .+Step 1:.+Step 2:.+",
    "retrieval": r".*\n",
    "http_sequences": r"Question: Anna .+The answer is.*\n",
    "notebook": r"'.* Paris.*'\n'.+'\n.+",
}
"""What each example prints."""
ELSEWHERE = {"fastapi_front", "langchain_chat"}
"""Tested below, and by tests/conformance/check_langchain.py."""


@pytest.fixture(scope="module")
def environ(model_dir):
    """The variables of an OpenAI client for a server with the default model, whose four slots are shared fairly."""
    flags = ["--port", "0", "--max-num-seqs", "4", "--max-model-len", "2048", "--scheduling-policy", "fair", "--log-level", "info"]
    command = [sys.executable, "-m", "chairlift", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"listening on (http://\S+/v1)", line):
                break
        else:
            pytest.fail("".join(log))
        # The rest of the log is read too: a full pipe would block the server.
        threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
        try:
            yield os.environ | {"OPENAI_BASE_URL": found[1], "OPENAI_API_KEY": "none"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "".join(log)
        finally:
            process.kill()


def test_every_example_is_tested_documented_and_short():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == OUTPUT.keys() | ELSEWHERE
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for name in names:
        assert f"(../examples/{name}.py)" in page, name
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60, name


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_prints_what_it_should(name, environ):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(OUTPUT[name], done.stdout, re.DOTALL), done.stdout


def test_the_fastapi_application_streams_a_summary(environ, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, environ[name])
    spec = importlib.util.spec_from_file_location("fastapi_front", EXAMPLES / "fastapi_front.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with TestClient(module.app) as client:
        answer = client.post("/summary", json={"text": "The lift carries people up the mountain. It has forty chairs."})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert len(answer.text) > 10
        assert client.post("/summary", json={"text": "a" * 5000}).status_code == 422


def test_the_notebook_runs_and_shows_pictures():
    cells = json.loads((EXAMPLES / "policies.ipynb").read_text())["cells"]
    namespace, shown = {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before a commit"
            tree = ast.parse("".join(cell["source"]))
            last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, "policies.ipynb", "exec"), namespace)
            shown.append(eval(compile(last, "policies.ipynb", "eval"), namespace))
    timeline, states, figures, picture, waits = shown
    for drawn, text in ((timeline, "waits for a batch slot"), (picture, "■ shortest")):
        svg = drawn._repr_svg_()
        ElementTree.fromstring(svg)
        assert text in svg
    assert states["wait_slots"] > 0
    assert figures["requests"] == 300
    assert waits["shortest"] < waits["fcfs"]
