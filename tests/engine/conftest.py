import counting_engine
import pytest

from chairlift.engine.llm import LLM


@pytest.fixture
def llm(monkeypatch):
    counting_engine.install(monkeypatch.setattr)
    return LLM()
