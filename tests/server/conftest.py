import httpx
import openai
import pytest
from fake_async_engine import FakeEngine, serving


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def lasting():
    """An engine, and the address of a server over it, for all tests of a file that leaves no trace but in what the engine has seen."""
    engine = FakeEngine()
    with serving(engine) as (base, _):
        yield engine, base


@pytest.fixture
def server(engine):
    """Address and service of a server over the fake engine."""
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
