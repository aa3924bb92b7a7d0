"""`make schema-fuzz` sees a long callback whenever it happened."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chairlift.server.observability import loop_monitor


@pytest.fixture
def schema_fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import schema_fuzz

    yield schema_fuzz
    sys.modules.pop("schema_fuzz")


@pytest.mark.parametrize("long_at", [0, 1, 2, 3])
def test_a_long_callback_is_kept_after_the_monitor_has_forgotten_it(schema_fuzz, long_at):
    assert schema_fuzz.LOOK_SECONDS < loop_monitor.WINDOW
    looks = 0

    def wait(seconds):
        nonlocal looks
        looks += 1
        if looks < 4:
            raise subprocess.TimeoutExpired("schemathesis", seconds)

    class Monitor:
        @property
        def longest(self):
            return (0.03, "/a") if looks == long_at + 1 else (0.001, "")

    assert schema_fuzz.longest_until_end(SimpleNamespace(wait=wait), Monitor()) == (0.03, "/a")
    assert looks == 4
