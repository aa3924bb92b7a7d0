"""`chairlift list`, `show`, `rm`, `ps` and `stop`."""

import io
import json
import os
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fake_hub import fake_hub
from gguf_files import gguf_of, tiny_model
from local_server import Handler, local_server
from ollama_files import write_ollama_model
from scripted_engine import ScriptedEngine
from server_here import serving_models

from chairlift.cli import main
from chairlift.config import DEFAULT_MODEL
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.model import ServedModel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the default model's file and one model of the hub."""
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    blobs = tmp_path / "cache" / "hub" / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "1").write_bytes(bytes(3_000_000))
    snapshot = blobs.parent / "snapshots" / "2"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / "1")
    (tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(bytes(1000))
    for path in (blobs / "1", tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"):
        os.utime(path, (1e9, 1e9))
    return tmp_path / "cache"


def test_list_shows_what_a_model_takes(cache, capsys):
    assert main.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["org/name", "3", "MB", "2001-09-09", str(cache / "hub" / "models--org--name")],
        [DEFAULT_MODEL, "0", "MB", "2001-09-09", str(cache / "SmolLM2-135M-Instruct.Q4_1.gguf")],
    ]
    assert main.main(["list", "--json"]) == 0
    assert [one["num_bytes"] for one in json.loads(capsys.readouterr().out)] == [3_000_000, 1000]
    assert main.main(["list", "--cache-dir", str(cache / "empty")]) == 0
    assert "chairlift pull" in capsys.readouterr().out


def test_rm_deletes_only_downloaded_models(cache, capsys, monkeypatch):
    for name in ("org/other", "../hub", str(cache), "hub"):
        assert main.main(["rm", name, "--yes"]) == 1
    assert main.main(["rm", "org/name"]) == 2  # nobody can be asked
    assert "--yes" in capsys.readouterr().err
    terminal = io.StringIO("n\ny\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main.main(["rm", "org/name"]) == 1
    assert (cache / "hub" / "models--org--name").exists()
    assert main.main(["rm", "org/name"]) == 0
    assert not (cache / "hub" / "models--org--name").exists()
    assert main.main(["rm", DEFAULT_MODEL, "--yes"]) == 0
    assert not list(cache.glob("*.gguf"))


def test_rm_says_that_other_programs_share_the_files(cache, capsys, monkeypatch):
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "hub"))
    assert main.main(["rm", "org/name", "--yes"]) == 0
    assert "models--org--name of the cache that all programs of the Hugging Face hub share" in capsys.readouterr().out
    assert not (cache / "hub" / "models--org--name").exists()


def test_show_describes_a_file_without_its_weights(tmp_path, cache, capsys):
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    assert main.main(["show", str(tmp_path / "tiny.gguf"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"].startswith("Qwen2ForCausalLM: ")
    assert "F32 100 %" in facts["weights"]
    assert facts["chat template"].startswith("no")
    assert "CPU kernels" in facts["computed by"]
    assert main.main(["show", str(tmp_path / "tiny.gguf")]) == 0
    assert {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()} == set(facts)


def test_show_downloads_nothing(cache, capsys):
    for name in ("org/absent", DEFAULT_MODEL):
        if name == DEFAULT_MODEL:
            main.main(["rm", DEFAULT_MODEL, "--yes"])
        assert main.main(["show", name]) == 1
        assert "chairlift pull" in capsys.readouterr().err


@contextmanager
def server(status_after_stop="not loaded", requests=0, reason="unload", small="not loaded"):
    """A server of two models, of which `chat` is loaded. Yields its address and the bodies that came."""
    bodies = []
    expires = (datetime.now(UTC) + timedelta(seconds=90.5)).isoformat()
    loaded = {"name": "chat", "expires_at": expires, "requests": requests, "context_length": 4096, "size": 98_000_000}
    models = [{"id": name, "root": root, "status": small if name == "small" else status} for name, root, status in MODELS]
    answers = {
        "/api/ps": {"models": [loaded]},
        "/v1/models": {"data": models},
        "/v1/models/chat": {"status": status_after_stop},
        "/v1/models/small": {"status": small},
    }

    class Answer(Handler):
        def do_GET(self):
            self.answer(200, answers[self.path])

        def do_POST(self):
            body = json.loads(self.body())
            bodies.append((self.path, body))
            if body["model"] in ("chat", "gpt"):
                self.answer(200, {"model": "chat", "done_reason": reason})
            elif body["model"] == "small":
                self.answer(200, {"model": "small", "done_reason": reason})
            else:
                self.answer(404, {"error": "this server has 'chat', 'gpt', 'small'"})

        def answer(self, status, body):
            self.reply(json.dumps(body).encode(), status)

    with local_server(Answer) as url:
        yield url, bodies


MODELS = [("chat", "chat", "loaded"), ("gpt", "chat", "loaded"), ("small", "small", "not loaded"), ("adapter", "chat", "loaded")]
"""Names, models and states: a name that is an alias or an adapter is no line of its own."""


def test_ps_lists_the_models_of_a_server(capsys):
    engines = ScriptedEngine(), ScriptedEngine(), ScriptedEngine()
    engines[0].counters = {"running": 2, "waiting": 1, "swapped": 1, "slots": 4}
    models = [
        ServedModel("chat", engines[0], ("gpt-4o",), num_bytes=1_500_000_000),
        ServedModel("embed", engines[1], keep_alive=36000.0),
        ServedModel("small", engines[2], lifecycle=Lifecycle(ModelState.UNLOADED)),
    ]
    with serving_models(models) as (url, _):
        assert main.main(["ps", "--url", url]) == 0
        rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert main.main(["ps", "--url", url, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert rows == [
        "NAME STATE MEMORY RUNNING WAITING UNLOADED",
        "chat, gpt-4o loaded 1,500 MB 2 2 stays loaded",
        "embed loaded - 0 0 in 600 min",
        "small not loaded - 0 0 -",
    ]
    assert [(one["name"], one["unload_in_seconds"] is None) for one in document] == [("chat", True), ("embed", False), ("small", True)]


@pytest.mark.parametrize(
    ("status", "requests", "reason", "code", "words"),
    [
        ("not loaded", 0, "unload", 0, "chat is unloaded"),
        ("loaded", 2, "unload", 0, "unloaded when its 2 requests have ended"),
        ("loaded", 0, "load", 1, "the server preloads it"),
        ("loaded", 2, "load", 1, "the key is not the operator's"),
    ],
)
def test_stop_says_what_becomes_of_the_model(capsys, status, requests, reason, code, words):
    with server(status, requests, reason) as (url, bodies):
        assert main.main(["stop", "gpt", "--url", url]) == code
    assert bodies == [("/api/generate", {"model": "gpt", "prompt": "", "keep_alive": 0})]
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


@pytest.mark.parametrize(("status", "words"), [("not loaded", "was not loaded already"), ("loading", "is loading")])
def test_stop_says_that_there_was_nothing_to_do(capsys, status, words):
    with server(small=status) as (url, _):
        assert main.main(["stop", "small", "--url", url]) == 0
    assert capsys.readouterr().out == f"small {words}\n"


def test_stop_names_the_models_that_there_are(capsys):
    with server() as (url, _):
        assert main.main(["stop", "nothing", "--url", url]) == 1
    assert "'small'" in capsys.readouterr().err


def test_the_commands_take_the_names_of_pulled_models(tmp_path, cache, capsys, monkeypatch):
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    write_ollama_model(tmp_path / "ollama", "registry.ollama.ai/library/tiny/1b", {"model": content})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("org/tiny", {"tiny-Q8_0.gguf": content, "tiny-Q4_K_M.gguf": content + b"0", "mmproj-F16.gguf": content})
        hub.files["/x/tiny.gguf"] = content, '"1"'
        names = ["hf.co/org/tiny:q8_0", f"{hub.content_url}/x/tiny.gguf", "tiny:1b"]
        for name in names:
            assert main.main(["pull", name]) == 0
            output = capsys.readouterr()
            assert (Path(output.out.strip()) / "config.json").is_file()
            assert name == "tiny:1b" or "Fetching " in output.err
            assert main.main(["show", name, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["architecture"].startswith("Qwen2ForCausalLM")
        assert main.main(["pull", "org/tiny:Q5_K_M"]) == 1
        assert "org/tiny has no GGUF file for Q5_K_M; it has Q4_K_M, Q8_0" in capsys.readouterr().err
        assert main.main(["show", "org/tiny:Q4_K_M"]) == 1
        assert "'chairlift pull org/tiny:Q4_K_M' downloads it" in capsys.readouterr().err
    assert main.main(["list", "--json"]) == 0
    rows = {one["name"]: one["owner"] for one in json.loads(capsys.readouterr().out)}
    assert rows == {
        "org/name": "chairlift",
        "org/tiny:Q8_0": "chairlift",
        names[1]: "chairlift",
        DEFAULT_MODEL: "chairlift",
        "tiny:1b": "ollama",
    }
    assert [main.main(["rm", name, "--yes"]) for name in ("org/tiny:Q8_0", names[1], "tiny:1b")] == [0, 0, 1]
    assert "tiny:1b belongs to Ollama: 'ollama rm tiny:1b' deletes it" in capsys.readouterr().err
    assert main.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["org/name", DEFAULT_MODEL, "tiny:1b"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/absent:Q4_K_M", "the Hugging Face hub cannot be reached for org/absent"),
        ("http://example.com/m.gguf", "must begin with https://"),
        ("absent:7b", "there is no model 'absent:7b' here"),
    ],
)
def test_a_model_that_cannot_be_found_is_one_line(cache, capfd, monkeypatch, model, reason):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for command in ("pull", "show"):
        assert main.main([command, model]) == 1
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        assert reason in lines[0] or command == "show"
