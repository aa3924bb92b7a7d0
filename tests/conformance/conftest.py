"""Where the servers are, as the runner says in the environment."""

import os

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
