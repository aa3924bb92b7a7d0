"""Where the servers are, as the runner says in the environment."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def key():
    return os.environ["CHAIRLIFT_KEY"]


@pytest.fixture(scope="session")
def model():
    return os.environ["CHAIRLIFT_MODEL"]


@pytest.fixture(scope="session")
def quick():
    """Address of the server without weights: arbitrary tokens at once, of an answer that ends by its length only."""
    return os.environ["CHAIRLIFT_QUICK"]


@pytest.fixture(scope="session")
def real():
    """Address of the server with the default model: 10 to 20 tokens a second, so ask for few."""
    return os.environ["CHAIRLIFT_REAL"]


@pytest.fixture(scope="session")
def scripted():
    """Address of the server that answers with the text between the prompt's last `SAY:` and the `|` after it."""
    return os.environ["CHAIRLIFT_SCRIPTED"]


@pytest.fixture
def cache_use(record_testsuite_property):
    """Returns two shares for the prompts of the test so far, except the first.

    The first is how much of the text that prompts repeat from earlier ones the prefix cache had. The second is how much of the last prompt
    and its answer the next prompt repeats, which is all of it if the client only appends.
    """
    file = Path(os.environ["CHAIRLIFT_TURNS"])
    before = len(file.read_text().splitlines())

    def shares():
        turns = [json.loads(line) for line in file.read_text().splitlines()[before:]]
        found, repeated = (sum(turn[name] for turn in turns[1:]) for name in ("found", "repeated"))
        repeatable = sum(min(last["prompt"] + last["answer"], turn["prompt"]) for last, turn in pairwise(turns))
        summary = f"{len(turns)} prompts repeat {repeated / repeatable:.1%} of what they could, {found / repeated:.1%} of it was found"
        record_testsuite_property("found", summary)
        return found / repeated, repeated / repeatable

    return shares


@pytest.fixture
def notes(project):
    """Files `note0.txt` to `note3.txt` of the project. Each tells the model to read the next one, and the last one to say "All read."."""

    def write(call):
        """`call` returns the text by which the model reads a file."""
        for number in range(4):
            said = f"Now the next one. {call(f'note{number + 1}.txt')}" if number < 3 else "All read."
            (project / f"note{number}.txt").write_text(f"This is note {number}, about the weather in Zürich.\nSAY:{said}|\n")
        return call("note0.txt")

    return write


@pytest.fixture
def alone(tmp_path):
    """The environment of an agent that has an empty home and reaches nothing but this machine."""
    nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    home = tmp_path / "home"
    home.mkdir()
    return os.environ | nowhere | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "HOME": str(home)}


@pytest.fixture
def project(tmp_path):
    """A directory with a file that tells the model what to say next."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "note.txt").write_text("SAY:All is well.|\n")
    return directory


@pytest.fixture(scope="session")
def settings(key):
    """Of OpenAI's and Anthropic's clients, which are made by one generator: answers are held against their types."""
    return {"api_key": key, "max_retries": 0, "timeout": 120, "_strict_response_validation": True}
