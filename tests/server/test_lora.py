"""LoRA adapters over HTTP: names as models, loading on the operator's socket, and a restarted engine."""

import os
import shutil
import signal
from pathlib import Path

import adapters
import pytest
import tiny_models
from served import served, until

import chairlift.__main__


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, byte_model: Path) -> Path:
    directory: Path = tmp_path_factory.mktemp("base") / "tiny"
    tiny_models.write("llama", directory)
    shutil.copy(byte_model / "tokenizer.json", directory)
    return directory


@pytest.mark.parametrize("runner", ["rust", "torch"])
def test_an_adapter_is_served_under_its_name_loaded_unloaded_and_kept_over_a_restart(base: Path, tmp_path: Path, runner: str) -> None:
    a, b = (adapters.random(tmp_path / name, base, seed) for seed, name in enumerate("ab"))
    flags = ["--enable-lora", "--lora-modules", f"a={a}", "--num-kv-blocks", "60", "--device", "cpu", "--runner", runner]
    with served("--model", str(base), *flags, script=chairlift.__main__.__file__, load_format="auto") as server:

        def text(model: str) -> str:
            return server.answer([20, 30, 40, 50], model=model, ignore_eos=True)

        plain, first = text("tiny"), text("a")
        assert plain != first
        reply = server.http.post("/v1/completions", json={"model": "a", "prompt": "x", "max_tokens": 1})
        assert reply.json()["model"] == "a"
        unknown = server.http.post("/v1/completions", json={"model": "b", "prompt": "x"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'tiny', 'a'" in unknown.json()["error"]["message"]

        loaded = server.administer("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(b)})
        assert (loaded.status_code, loaded.json()["status"]) == (200, "loaded")
        second = text("b")
        assert second not in (plain, first)
        listed = server.http.get("/v1/models").json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
        assert server.http.get("/v1/models/b").json()["root"] == str(b)

        for body, status in (
            ({"lora_name": "b", "lora_path": str(b)}, 400),
            ({"lora_name": "tiny", "lora_path": str(b)}, 400),
            ({"lora_name": "c", "lora_path": str(tmp_path)}, 400),
            ({"lora_name": "c"}, 400),
        ):
            refused = server.administer("/v1/load_lora_adapter", body)
            assert refused.status_code == status, refused.text
        assert server.administer("/v1/unload_lora_adapter", {"lora_name": "tiny"}).status_code == 404
        assert server.http.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": str(a)}).status_code == 404
        assert server.http.post("/v1/sequences", json={"model": "a", "prompt": "x"}).status_code == 404

        with server.http.stream(
            "POST", "/v1/completions", json={"model": "b", "prompt": [20, 30], "max_tokens": 200, "ignore_eos": True, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            busy = server.administer("/v1/unload_lora_adapter", {"lora_name": "b"})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "adapter_busy")
        until(lambda: server.admin_state()["running"] == 0)

        # The directory of one is gone at the restart. The other is loaded again.
        shutil.copytree(b, tmp_path / "gone")
        assert server.administer("/v1/load_lora_adapter", {"lora_name": "gone", "lora_path": str(tmp_path / "gone")}).status_code == 200
        shutil.rmtree(tmp_path / "gone")
        engine = server.engine()
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.status("/ready") != 200 or server.admin_state()["restarts"] == 1)
        until(lambda: server.status("/ready") == 200)
        assert (text("tiny"), text("a"), text("b")) == (plain, first, second)
        assert server.http.post("/v1/completions", json={"model": "gone", "prompt": "x"}).status_code == 404
        assert "adapter gone cannot be loaded again" in server.log()

        assert server.administer("/v1/unload_lora_adapter", {"lora_name": "b"}).status_code == 200
        assert server.http.post("/v1/completions", json={"model": "b", "prompt": "x"}).status_code == 404


def test_an_adapter_loads_its_model_first_and_is_kept_when_that_is_unloaded(base: Path, tmp_path: Path) -> None:
    other, adapter = tmp_path / "other", adapters.random(tmp_path / "adapter", base)
    shutil.copytree(base, other)
    flags = ["--num-kv-blocks", "60", "--device", "cpu", "--enable-lora", "--keep-alive", "0"]
    with served(f"one={base}", f"two={other}", *flags, script=chairlift.__main__.__file__, load_format="auto") as server:
        body = {"lora_name": "x", "lora_path": str(adapter), "model": "two"}
        assert server.administer("/v1/load_lora_adapter", body | {"model": "three"}).status_code == 404
        assert server.administer("/v1/load_lora_adapter", body | {"model": 3}).status_code == 400
        loaded = server.administer("/v1/load_lora_adapter", body)
        assert loaded.status_code == 200, loaded.text
        assert server.http.get("/v1/models/x").json()["parent"] == "two"
        until(lambda: server.http.get("/v1/models/two").json()["status"] == "not loaded")
        assert server.answer("golden", model="x") != server.answer("golden", model="two")
        until(lambda: server.http.get("/v1/models/two").json()["status"] == "not loaded")
        assert server.administer("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200
        assert server.http.get("/v1/models/x").status_code == 404
