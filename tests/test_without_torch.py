"""A CPU serves with torch, triton, transformers and safetensors not installed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

BLOCKED = ("torch", "triton", "transformers", "safetensors")
HIDING = f"""
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *where: None if name in {BLOCKED} else found(name, *where))
"""
LIGHT = """
import sys
{}
heavy = {{"torch", "triton", "transformers", "safetensors"}} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose processes, and theirs, do not find what is blocked."""
    directory = tmp_path_factory.mktemp("blocked")
    (directory / "sitecustomize.py").write_text(HIDING)
    path = os.pathsep.join([str(directory), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def server(environment: dict[str, str], model_dir: Path) -> Iterator[httpx.Client]:
    """A client of `chairlift serve` with the default model."""
    flags = ["--port", "0", "--max-num-seqs", "8", "--max-model-len", "512", "--num-kv-blocks", "100"]
    command = [sys.executable, "-m", "chairlift", "serve", str(model_dir), *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "listening on " in line:
                break
        else:
            pytest.fail("".join(log))
        # The server would block on a full pipe.
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        try:
            with httpx.Client(base_url=line.split("listening on ")[1].strip(), timeout=100) as client:
                yield client
        finally:
            process.terminate()
            reader.join()


def chat(server: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 12, "seed": 1} | fields
    reply = server.post("/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_sampling_has_all_its_features(server: httpx.Client) -> None:
    answer = chat(
        server,
        n=2,
        logprobs=True,
        top_logprobs=3,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"20": 5, "21": -100},
    )
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["message"]["content"]
        assert all(len(token["top_logprobs"]) == 3 for token in choice["logprobs"]["content"])


def test_answers_follow_a_schema(server: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    [choice] = chat(server, response_format=form, max_tokens=30)["choices"]
    assert json.loads(choice["message"]["content"])["colour"] in ("red", "green")


def test_answers_stream(server: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "stream": True, "temperature": 0}
    with server.stream("POST", "/chat/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 4


def test_prompts_have_logprobs(server: httpx.Client) -> None:
    reply = server.post("/completions", json={"prompt": "The sky is", "max_tokens": 1, "prompt_logprobs": 2})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["prompt_logprobs"]) == 3


@pytest.mark.parametrize("command", ["serve", "bench", "simulate", "plan", "compare", "replay"])
def test_commands_explain_themselves(command: str, environment: dict[str, str]) -> None:
    done = run(environment, command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_a_trace_is_simulated(environment: dict[str, str]) -> None:
    done = run(environment, "compare", "--num-requests", "8")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import chairlift",
        "from chairlift import LLM, simulate",
        "import chairlift.cli.main",
        "import chairlift.engine.engine, chairlift.runner.build",
        "import chairlift.server.supervisor",
        "from chairlift.cli.main import main; main(['compare', '--num-requests', '8'])",
    ],
)
def test_heavy_packages_are_not_imported_where_they_are_installed(statement: str) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", LIGHT.format(statement)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_servers_own_process_imports_neither_numpy_nor_the_architectures() -> None:
    statement = (
        "import sys, chairlift.cli.serve, chairlift.engine.client, chairlift.server.supervisor\n"
        "assert not {'numpy', 'chairlift.architectures'} & sys.modules.keys()"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", statement], env=os.environ | {"PYTHONPATH": path}, check=True)


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--tensor-parallel-size", "2", "--device", "cpu"], "--tensor-parallel-size needs torch: pip install chairlift", 2),
        (["--runner", "torch", "--device", "cpu"], "--runner torch needs torch: pip install chairlift", 2),
        (["--load-format", "dummy", "--device", "cpu"], "transformers' code needs torch: pip install chairlift", 1),
    ],
)
def test_what_needs_torch_says_so(
    flags: list[str], message: str, code: int, environment: dict[str, str], model_dir: Path, tmp_path: Path
) -> None:
    model = model_dir
    if "dummy" in flags:
        model = tmp_path
        raw = json.loads((model_dir / "config.json").read_text()) | {"architectures": ["MptForCausalLM"], "model_type": "mpt"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    done = run(environment, "generate", "--model", str(model), "hi", *flags)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
