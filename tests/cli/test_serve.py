"""`chairlift serve`: what it does before it listens."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from chairlift.cli import idle_flags, serve
from chairlift.cli.main import main
from chairlift.config import EngineConfig
from chairlift.engine.spawned_process import SpawnedProcess
from chairlift.errors import InvalidSetting
from chairlift.runner import cuda
from chairlift.server.config import ServerConfig
from chairlift.server.model_specs import read_models

START = """
import os, subprocess, sys

def start(*_, **__):
    late = "asyncio ssl ctypes difflib msgpack tempfile tomllib starlette uvicorn".split()
    late += "chairlift.engine.client chairlift.tokenizer chairlift.server.supervisor".split()
    print([name for name in late if name in sys.modules], os.environ["PYDANTIC_DISABLE_PLUGINS"], flush=True)
    os._exit(0)

subprocess.Popen.__init__ = start
from chairlift.cli.main import main
main(["serve", "--port", "0", "--device", "cpu"])
"""


def test_the_engines_process_starts_before_the_server_imports_its_own_modules():
    environ = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", START], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[] __all__\n", done.stderr


def test_what_the_settings_name_is_checked_before_anything_is_started(tmp_path, capsys, monkeypatch):
    (file := tmp_path / "file").write_text("{{ no directory")
    started = []
    monkeypatch.setattr(SpawnedProcess, "start", lambda *settings: started.append(settings))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # neither torch nor OpenTelemetry is installed
    monkeypatch.setattr(cuda, "has_cuda_driver", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (["--prefix-cache-dir", file], f"--prefix-cache-dir {file}: this is a file, name a directory"),
            (["--journal", file / "day"], f"--journal {file / 'day'}: cannot write there (Not a directory)"),
            (["--energy-meter", f"powercap:{file}"], f"--energy-meter powercap: {file}: Not a directory"),
            (["--enable-lora", "--lora-modules", f"a={file}"], f"adapter {file}: adapter_config.json cannot be read"),
            (["--chat-template", file], f"--chat-template: {file} cannot be used: expected token 'end of print statement'"),
            (["--usage-log", file / "log"], f"--usage-log {file / 'log'}: Not a directory"),
            (["--data-dir", file], f"--data-dir {file}: this is a file, name a directory"),
            (["--api-key-file", file], f"--api-key-file {file}: it is not TOML"),
            (["--tiers", file], f"--tiers {file}: it is not TOML"),
            (["--ssl-certfile", file], f"--ssl-certfile {file}: "),
            (["--port", port], f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (["a=x", "--enable-lora", "--lora-modules", "a=y"], "--lora-modules: the adapter 'a' has the name of its model"),
            (["a=x", "a=y"], "two models have the name 'a': write NAME=MODEL"),
            (["--otlp-traces-endpoint", "http://127.0.0.1:9"], "--otlp-traces-endpoint needs OpenTelemetry: pip install"),
            (["no-such-model"], "there is no model 'no-such-model' here; name a directory"),
            (["--runner", "torch"], "--runner torch needs torch: pip install chairlift"),
            (["--tensor-parallel-size", "2"], "--tensor-parallel-size needs torch: pip install chairlift"),
            (["--device", "cuda"], "--device cuda: CUDA_VISIBLE_DEVICES hides all CUDA devices (use --device cpu for the CPU)"),
        ):
            status = main(["serve", "--port", "0", *map(str, arguments)])
            written = capsys.readouterr().err
            assert written.startswith(f"chairlift: {message}"), written
            assert (status in (1, 2), written.count("\n"), started) == (True, 1, []), arguments


def test_flags_without_effect_are_named_in_one_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(serve, "_serve", lambda *_: asyncio.sleep(0, 0))
    base = ["serve", "--load-format", "none", "--uds", str(tmp_path / "socket")]
    assert main([*base, "--port", "9", "--prefix-cache-disk", "1G", "--tenant-weights", "a=2", "--keep-alive", "1m"]) == 0
    [line] = [line for line in caplog.messages if "no effect" in line]
    assert line == (
        "these settings have no effect: --tenant-weights without --scheduling-policy fair or vtc; "
        "--prefix-cache-disk without --prefix-cache-dir; --port with --uds; --keep-alive with one model"
    )
    caplog.clear()
    cache = ["--prefix-cache-dir", str(tmp_path)]
    assert main([*base, *cache, "--prefix-cache-disk", "1G", "--tenant-weights", "a=2", "--policy", "fair"]) == 0
    assert not any("no effect" in line for line in caplog.messages)


def test_each_flag_without_effect_has_one_where_another_is_set():
    effects = {
        "max_lora_rank": (8, {"enable_lora": True}),
        "tenant_weights": ({"a": 2}, {"scheduling_policy": "vtc"}),
        "tier_weights": ({"flex": 2}, {"journal": "day"}),
        "session_turns": ("all", {"enable_prefix_caching": True}),
        "max_session_wait_ms": (1.0, {"enable_prefix_caching": True}),
        "prefix_cache_disk": (1, {"prefix_cache_dir": "/x"}),
        "enforce_eager": (True, {"device": "cuda"}),
        "gpu_memory_utilization": (0.5, {"device": "auto"}),
        "host": ("::1", {"uds": None}),
        "port": (9, {"uds": None}),
        "public_metrics": (True, {"operator_key": "x"}),
        "routing": ("lmetric", {"replicas": 2}),
        "engine_secret_file": ("/x", {"engine_listen": ("::1", 1)}),
        "max_data_size": (1, {"data_dir": "/x"}),
    }
    assert effects.keys() == idle_flags.OF_ENGINES.keys() | idle_flags.OF_SERVERS.keys()
    for name, (value, other) in effects.items():
        served = name in idle_flags.OF_SERVERS
        rest = {"uds": "/x"} if served else {"device": "cpu", "enable_prefix_caching": False}
        for more, count in (({}, 1), (other, 0)):
            settings = {**rest, name: value, **more}
            engine, server = EngineConfig(**{} if served else settings), ServerConfig(**settings if served else {})
            assert len(idle_flags.find(engine, server, [engine])) == count, (name, more)


def test_what_is_not_there_is_named_with_its_place_in_the_file_of_models(tmp_path, capsys):
    (file := tmp_path / "models.toml").write_text('[a]\npath = "org/a"\nchat-template = "/none"\n[b]\npath = "/none"\npreload = true\n')
    assert main(["serve", "--port", "0", "--models", str(file)]) == 2
    assert f"--models {file}, line 3: [a] chat-template: --chat-template: /none" in capsys.readouterr().err
    file.write_text(file.read_text().replace('chat-template = "/none"\n', ""))
    assert main(["serve", "--port", "0", "--models", str(file)]) == 2
    assert f"--models {file}, line 4: [b] path: there is no model '/none' here" in capsys.readouterr().err


def test_what_the_engine_of_an_only_model_refuses_has_its_place_too(tmp_path):
    """The engine's process knows for how long a context the model was made."""

    class Engine:
        async def start(self, since):
            raise InvalidSetting("--max-model-len 102400: the model was made for 2048 positions")

    (file := tmp_path / "models.toml").write_text('[a]\npath = "org/a"\nmax-model-len = "100k"\n')
    [spec] = read_models(str(file), EngineConfig(), ServerConfig())
    with pytest.raises(InvalidSetting, match=r"models\.toml, line 3: \[a\] max-model-len: --max-model-len 102400: the model was made"):
        asyncio.run(serve.start_engine(Engine(), spec, str(file), 0.0))
