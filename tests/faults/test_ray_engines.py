"""`--ray-address`: Ray Serve runs the engines, on a cluster of this machine. One of them dies, and then Ray's head."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import dying_engine
import pytest
from resumable import KINDS, order, requested
from served import Served, served, until

from chairlift.errors import InvalidSetting
from chairlift.server.config import ServerConfig
from chairlift.server.ray_engines import RayEngines

SLOWED = """
import sys

if "chairlift.engine.process" in sys.orig_argv:
    import dying_engine

    dying_engine.doom()
"""
"""Lets the engines that Ray starts take orders, as those of `dying_engine` do."""

FLAGS = ("--max-num-seqs", "12", "--num-kv-blocks", "200", "--threads", "1", "--served-model-name", "tiny", "--log-level", "info")


def processes(server: Served, name: str) -> list[int]:
    """The processes of the server's cluster whose command line has `name`, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdecimal() and str(server.directory).encode() in (entry / "environ").read_bytes()
            if ours and name.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return sorted(found)


def states(server: Served) -> list[str]:
    return [one["state"] for one in server.replicas()]


@pytest.fixture(scope="module")
def server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    (byte_model / "chat_template.jinja").write_text("{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}")
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    flags = *FLAGS, "--engine-listen", "127.0.0.1:0", "--engine-secret-file", str(secret), "--ray-address", "local", "--replicas", "2"
    (secret.parent / "sitecustomize.py").write_text(SLOWED)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(secret.parent), str(Path(dying_engine.__file__).parent)]))
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # Ray ends what has lost its head after a minute by default
        one = stack.enter_context(served(str(byte_model), *flags, script=dying_engine.__file__, load_format="dummy"))
        yield one
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(60)
        until(lambda: not processes(one, "ray"))  # nothing is left


@pytest.mark.slow
def test_ray_replaces_an_engine_that_dies_and_its_streams_go_on(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    assert len(processes(server, "chairlift.engine.process")) == 2
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        for engine in processes(server, "chairlift.engine.process"):
            order(server, step=10**9, where="launch")  # only makes steps slow
            answers = threads.submit(requested, server, threads)
            until(lambda: sum(one["sequences"] for one in server.replicas()) > 2)
            os.kill(engine, signal.SIGKILL)
            assert answers.result() == expected
            (server.directory / "gate").unlink()
            until(lambda: states(server) == ["ready", "ready"])
            assert engine not in processes(server, "chairlift.engine.process")
    assert "lost its engine" in server.log()
    assert "0123456789abcdef" not in server.log()


@pytest.mark.slow
def test_without_rays_head_the_engines_serve_until_they_are_deployed_again(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    expected = server.answer()
    [head] = processes(server, "gcs_server")
    os.kill(head, signal.SIGKILL)
    assert server.answer() == expected
    until(lambda: "ERROR Ray (local): " in server.log())
    until(lambda: states(server) == ["ready", "ready"] and head not in processes(server, "gcs_server"))
    assert server.answer() == expected


def test_without_ray_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = ServerConfig(ray_address="auto", engine_listen=("10.0.0.1", 7000), engine_secret_file="secret")
    with pytest.raises(InvalidSetting, match=r"pip install 'chairlift\[fleet\]'"):
        RayEngines(config, 7000)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"ray_address": "auto"}, "--ray-address needs --engine-listen"),
        ({"ray_address": "auto", "engine_listen": ("0.0.0.0", 7000), "engine_secret_file": "secret"}, "that the cluster's machines reach"),
        ({"ray_actor_options": {"num_cpus": 2}}, "--ray-actor-options needs --ray-address"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ServerConfig(**settings)  # type: ignore[arg-type]
