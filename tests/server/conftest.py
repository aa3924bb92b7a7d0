import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, WordTokenizer
from server_here import serving

from chairlift.server.chat.completion import ChatCompletion


@pytest.fixture(scope="module")
def lasting():
    """An engine, and the address and service of a server over it, for all tests of a file."""
    engine = ScriptedEngine()
    with serving(engine) as (base, service):
        yield engine, base, service


@pytest.fixture
def engine(request):
    """A scripted engine. With the marker `shared_server` it is the file's own, with no trace of the tests before."""
    if not request.node.get_closest_marker("shared_server"):
        return ScriptedEngine()
    engine = request.getfixturevalue("lasting")[0]
    engine.tokenizer = WordTokenizer()
    engine.forget()
    return engine


@pytest.fixture
def server(request, engine):
    """Address and service of a server over the engine."""
    if request.node.get_closest_marker("shared_server"):
        yield request.getfixturevalue("lasting")[1:]
    else:
        with serving(engine) as running:
            yield running


@pytest.fixture
def base(server):
    return server[0]


@pytest.fixture
def http(base):
    with httpx.Client(base_url=base, timeout=30, verify=False) as client:  # reading certificates takes longer than most tests
        yield client


@pytest.fixture
def client(base):
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def says(monkeypatch):
    """Has the model say given deltas, whatever it is asked."""

    def say(*deltas):
        async def said(turn):
            for delta in deltas:
                yield delta

        monkeypatch.setattr(ChatCompletion, "deltas", said)

    return say
