"""The server of `benches/gpu/smoke.py` does not outlive the check that started it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def smoke(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches" / "gpu"))
    before = set(sys.modules)
    import smoke

    yield smoke
    for name in ("ahead", "common", "results", "serve", "smoke"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("end", ["in time", "too late", "the part's time is over"])
def test_a_server_that_does_not_end_is_killed(smoke, monkeypatch, tmp_path, end):
    calls = []
    error = {"too late": subprocess.TimeoutExpired("serve", 20), "the part's time is over": smoke.common.OutOfTime("took too long")}.get(
        end
    )

    class Process:
        pid = 0

        def terminate(self):
            calls.append("terminate")

        def kill(self):
            calls.append("kill")

        def wait(self, timeout=None):
            calls.append(("wait", timeout))
            if error is not None and timeout is not None:
                raise error

    monkeypatch.setattr(smoke.subprocess, "Popen", lambda *_, **__: Process())
    monkeypatch.setattr(smoke, "_until", lambda condition: None)

    def run():
        with smoke.server(SimpleNamespace(device="cpu"), tmp_path, {}):
            assert not calls

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert calls == ["terminate", ("wait", smoke.END_SECONDS), "kill", ("wait", None)]
