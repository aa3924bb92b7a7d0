"""`--ray-address`: Ray Serve runs the engines, on a cluster of this machine. Engines and Ray's head end, and engines come with load."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import dying_engine
import pytest
from resumable import KINDS, order, requested
from served import Served, served, until

from chairlift.config import EngineConfig
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

LONG: dict[str, object] = {"max_tokens": 200, "ignore_eos": True}
"""Fields of a request that keeps an engine busy, whatever the server takes."""


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
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    return secret


@contextmanager
def on_ray(model: Path, secret: Path, *flags: str) -> Iterator[Served]:
    """A server whose engines are on a cluster that it starts."""
    (model / "chat_template.jinja").write_text("{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}")
    flags = *FLAGS, "--engine-listen", "127.0.0.1:0", "--engine-secret-file", str(secret), "--ray-address", "local", *flags
    (secret.parent / "sitecustomize.py").write_text(SLOWED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(secret.parent), str(Path(dying_engine.__file__).parent)]))
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # Ray ends what has lost its head after a minute by default
        with served(str(model), *flags, script=dying_engine.__file__, load_format="dummy") as one:
            yield one
            one.process.send_signal(signal.SIGTERM)
            one.process.wait(60)
            until(lambda: not processes(one, "ray"))  # nothing is left


@pytest.fixture(scope="module")
def server(byte_model: Path, secret: Path) -> Iterator[Served]:
    with on_ray(byte_model, secret, "--replicas", "2") as one:
        yield one


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
def test_a_new_deployment_replaces_the_engines_and_no_request_fails(server: Served, secret: Path) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    before = processes(server, "chairlift.engine.process")
    [port] = re.findall(r"listening for engines on 127\.0\.0\.1:(\d+)", server.log())
    deployment = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    address = {"address": "auto", "host": "127.0.0.1", "port": int(port), "secret_file": str(secret), "files": {"model": server.model}}
    command = [sys.executable, "-m", "chairlift.fleet.placement", json.dumps({**address, "options": deployment})]
    ended = Event()
    with ThreadPoolExecutor(8) as threads, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as update:
        expected = server.answer(**LONG)
        asking = [threads.submit(answers, server, ended) for _ in range(8)]
        assert update.stdout is not None
        assert update.stdout.readline() == "deployed\n"
        until(lambda: states(server) == ["ready", "ready"])
        update.kill()  # at the end of its input it would remove the engines
        ended.set()
        assert all(set(one.result()) == {expected} for one in asking)
    assert server.log().count(" leaves, and runs ") == 2
    assert not set(before) & set(processes(server, "chairlift.engine.process"))


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


@pytest.mark.slow
def test_engines_come_and_go_with_the_work_and_no_request_fails(byte_model: Path, secret: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 2}
    scaling |= {"metrics_interval_s": 0.5, "look_back_period_s": 1}
    with on_ray(byte_model, secret, "--ray-autoscaling-config", json.dumps(scaling)) as server, ThreadPoolExecutor(24) as threads:
        expected = server.answer(**LONG)
        order(server, step=10**9, where="launch")  # only makes steps slow
        enough, ended = Event(), Event()
        busy = [threads.submit(answers, server, enough) for _ in range(23)]  # more than an engine runs at a time
        light = threads.submit(answers, server, ended)
        until(lambda: states(server) == ["ready", "ready"])
        enough.set()
        until(lambda: states(server) == ["ready"])
        ended.set()
        for one in [*busy, light]:
            assert set(one.result()) == {expected}
        assert " leaves, and runs " in server.log()


def answers(server: Served, ended: Event) -> list[str]:
    """Long answers of one request after the other, until the event."""
    return [server.answer(**LONG) for _ in iter(ended.is_set, True)]


@pytest.mark.parametrize(("saturations", "wanted"), [([], 1), ([0.0], 1), ([0.7], 1), ([0.8], 2), ([0.1, 0.1, 0.1], 1), ([1.5, 1.4], 5)])
def test_as_many_engines_are_wanted_as_the_work_needs(saturations: list[float], wanted: int) -> None:
    from chairlift.fleet.replica import by_saturation

    context = SimpleNamespace(aggregated_metrics={"saturation": dict(enumerate(saturations))})
    assert by_saturation(context) == (wanted, {})


def test_without_ray_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = ServerConfig(ray_address="auto", engine_listen=("10.0.0.1", 7000), engine_secret_file="secret")
    with pytest.raises(InvalidSetting, match=r"pip install 'chairlift\[fleet\]'"):
        RayEngines(config, EngineConfig(), 7000)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(name=name))
    with pytest.raises(InvalidSetting, match=r"pip install 'chairlift-cpu\[fleet\]'"):
        RayEngines(config, EngineConfig(), 7000)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"ray_address": "auto"}, "--ray-address needs --engine-listen"),
        ({"ray_address": "auto", "engine_listen": ("0.0.0.0", 7000), "engine_secret_file": "secret"}, "that the cluster's machines reach"),
        ({"ray_actor_options": {"num_cpus": 2}}, "--ray-actor-options and --ray-autoscaling-config need --ray-address"),
        ({"ray_autoscaling_config": {"max_replicas": 2}}, "--ray-actor-options and --ray-autoscaling-config need --ray-address"),
        (
            {"ray_address": "auto", "engine_listen": ("a", 1), "engine_secret_file": "s", "ray_autoscaling_config": {}, "replicas": 2},
            "leave out --replicas",
        ),
    ],
)
def test_wrong_settings_are_one_clear_line(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ServerConfig(**settings)  # type: ignore[arg-type]
