"""Where the two servers are, as the runner says in the environment."""

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
def settings(key):
    """Of OpenAI's and Anthropic's clients, which are made by one generator: answers are held against their types."""
    return {"api_key": key, "max_retries": 0, "timeout": 120, "_strict_response_validation": True}
