"""Other projects' clients, unmodified, against `chairlift serve`: each in a virtual environment of its own, at a pinned version.

python tests/conformance/run.py [--venvs DIR] [--gate] [CLIENT ...]; `make conformance` calls it. Without names it runs all that take a
minute at most. With `--gate` they reach the servers through `chairlift gate`. Exits with 1 if a check failed, or if nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL

HERE = Path(__file__).parent
KEY = "conformance-key"
START_SECONDS = 600
"""A first start fetches the model."""
CLIENT_SECONDS = 1800

QUICK = ["--load-format", "none", "--max-model-len", "512"]
"""The server with the real scheduler and no weights: arbitrary tokens at once."""
REAL = ["--max-model-len", "2048", "--max-num-seqs", "16"]
"""The server with the default model."""
SERVE = [sys.executable, "-m", "chairlift.cli.main", "serve", "--port", "0"]
GATE = [sys.executable, "-m", "chairlift.cli.main", "gate", "--port", "0", "--upstream-api-key", KEY, "--upstream"]
"""A gate in front of one of the servers, whose address is its last argument."""
SCRIPTED = [sys.executable, str(HERE / "scripted_server.py")]
"""The server around a scripted engine that says what it is told to. Its argument is the file for its turns."""


@dataclass(frozen=True)
class Client:
    """One of the clients: `requirements/NAME.txt` says what is installed, `check_NAME.py` what is asked of it."""

    name: str
    package: str | None = None
    """Whose version is told; None for one that no Python package brings."""
    needs_model: bool = False
    scripted: bool = False
    """Its checks need answers that they choose."""
    slow: bool = False
    """Runs when named only."""
    borrows: bool = False
    """It sees this environment's packages too, so that torch is not fetched twice."""


CLIENTS = (
    Client("openai", "openai", needs_model=True),
    Client("anthropic", "anthropic", needs_model=True),
    Client("litellm", "litellm", needs_model=True),
    Client("langchain", "langchain-openai", needs_model=True),
    Client("llm", "llm", needs_model=True),
    Client("ollama", "ollama", needs_model=True),
    Client("cohere", "cohere", needs_model=True),
    Client("openai_agents", "openai-agents", needs_model=True),
    Client("instructor", "instructor", needs_model=True),
    Client("pydantic_ai", "pydantic-ai-slim", needs_model=True),
    Client("smolagents", "smolagents", needs_model=True),
    Client("llama_index", "llama-index-llms-openai-like", needs_model=True),
    Client("dspy", "dspy", needs_model=True),
    Client("claude_code", "claude-agent-sdk", scripted=True),
    Client("codex", "openai-codex-cli-bin", scripted=True),
    Client("aider", "aider-chat", scripted=True),
    Client("vllm"),
    Client("schemathesis", "schemathesis"),
    Client("prometheus"),
    Client("lm_eval", "lm_eval", needs_model=True, slow=True),
    Client("guidellm", "guidellm", slow=True, borrows=True),
)


@dataclass
class Outcome:
    """How a client fared."""

    client: str
    version: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""


class NotInstalled(Exception):
    """A client's packages could not be had."""


def install(client: Client, venvs: Path) -> Path:
    """The client's Python, in an environment that is made anew only if its requirements changed; raises NotInstalled."""
    wanted = (HERE / "requirements" / f"{client.name}.txt").read_text()
    venv = venvs / client.name
    python, stamp = venv / "bin" / "python", venv / "requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {client.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    if client.borrows:
        [packages] = venv.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    requirements = HERE / "requirements" / f"{client.name}.txt"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements], capture_output=True, text=True
    )
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    stamp.write_text(wanted)
    return python


@contextlib.contextmanager
def serving(command: list[str], log: Path, *, keyed: bool = True) -> Iterator[str]:
    """Address of the server that this command starts on a free port, until it is left."""
    environ = os.environ | ({"CHAIRLIFT_API_KEY": KEY} if keyed else {})
    with log.open("w") as out, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        address: list[str] = []
        known = threading.Event()

        def read(lines: Iterator[str]) -> None:
            for line in lines:
                out.write(line)
                out.flush()
                if found := re.search(r"listening on (http://\S+?)/v1", line):
                    address.append(found[1])
                    known.set()
            known.set()

        reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            if not known.wait(START_SECONDS) or not address:
                sys.exit(f"chairlift serve did not start:\n{log.read_text()}")
            yield address[0]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()


def run(client: Client, venvs: Path, environ: dict[str, str]) -> Outcome:
    """Installs a client and runs its checks."""
    outcome = Outcome(client.name)
    try:
        python = install(client, venvs)
    except NotInstalled as error:
        outcome.note = f"not installed: {error}"
        return outcome
    if client.package is not None:
        ask = f"import importlib.metadata as m; print(m.version({client.package!r}))"
        outcome.version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    report = venvs / client.name / "report.xml"
    report.unlink(missing_ok=True)
    # What the repository's own tests are set up with is not here.
    flags = ["-q", "--tb=short", "--disable-warnings", "--confcutdir", str(HERE), "--import-mode", "importlib"]
    flags += ["-p", "no:cacheprovider", "--junit-xml", str(report)]
    begun = time.monotonic()
    print(f"\n== {client.name} {outcome.version}", flush=True)
    environ = environ | {"CONFORMANCE_CACHE": str(venvs / client.name), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        subprocess.run([python, "-m", "pytest", *flags, HERE / f"check_{client.name}.py"], env=environ, timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        outcome.note = f"not done after {CLIENT_SECONDS} s"
        outcome.failed = 1
        return outcome
    outcome.seconds = time.monotonic() - begun
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, AssertionError):
        outcome.failed, outcome.note = 1, "pytest could not run"
        return outcome
    outcome.failed, outcome.skipped = count["failures"] + count["errors"], count["skipped"]
    outcome.passed = count["tests"] - outcome.failed - outcome.skipped
    if (reported := suite.find("properties/property[@name='version']")) is not None:
        outcome.version = reported.get("value", "")
    if (reported := suite.find("properties/property[@name='found']")) is not None:
        outcome.note = reported.get("value", "")
    if reasons := {skip.get("message", "") for skip in suite.iter("skipped")}:
        outcome.note = "; ".join(sorted(reasons))
    return outcome


def main() -> int:
    """Runs the chosen clients and prints how each fared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(client.name for client in CLIENTS)}")
    parser.add_argument("--venvs", type=Path, default=Path(".venv-conformance"), help="where the clients' environments are kept")
    parser.add_argument("--gate", action="store_true", help="put a gate in front of the servers")
    given = parser.parse_args()
    if unknown := set(given.clients) - {client.name for client in CLIENTS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if client.name in given.clients or (not given.clients and not client.slow)]
    venvs = given.venvs.resolve()
    venvs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with contextlib.ExitStack() as servers:

        def started(command: list[str], name: str, *, keyed: bool = True) -> str:
            address = servers.enter_context(serving(command, venvs / f"{name}.log", keyed=keyed))
            if given.gate:
                address = servers.enter_context(serving([*GATE, address], venvs / f"{name}-gate.log", keyed=keyed))
            return address

        environ = os.environ | {"CHAIRLIFT_KEY": KEY, "CHAIRLIFT_MODEL": DEFAULT_MODEL, "CHAIRLIFT_MODEL_DIR": str(locate(DEFAULT_MODEL))}
        environ.pop("PYTHONPATH", None)
        data = servers.enter_context(tempfile.TemporaryDirectory())
        environ["CHAIRLIFT_QUICK"] = started([*SERVE, *QUICK, "--data-dir", data], "quick")
        if any(client.needs_model for client in chosen):
            environ["CHAIRLIFT_REAL"] = started([*SERVE, *REAL], "real")
        if any(client.scripted for client in chosen):
            environ["CHAIRLIFT_TURNS"] = turns = str(venvs / "scripted.turns")
            environ["CHAIRLIFT_SCRIPTED"] = started([*SCRIPTED, turns], "scripted", keyed=False)
        for client in chosen:
            outcomes.append(run(client, venvs, environ))
    print(f"\n{'client':14}{'version':12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}  note")
    for outcome in outcomes:
        counts = f"{outcome.passed:8}{outcome.failed:8}{outcome.skipped:9}{outcome.seconds:9.0f}"
        print(f"{outcome.client:14}{outcome.version:12}{counts}  {outcome.note}")
    return int(any(outcome.failed for outcome in outcomes) or not any(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
