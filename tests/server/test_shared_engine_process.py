"""`chairlift serve` with two models in one engine process: one has no weights and takes its time, the other is a tiny encoder."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_encoders
from events import objects
from served import Served, served, until

ENDLESS = {"model": "chat", "prompt": "golden", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def both(byte_model: Path, tmp_path: Path) -> Iterator[Served]:
    """A server with the models `chat` and `bert`, both loaded."""
    encoder, file = tmp_path / "bert", tmp_path / "models.toml"
    encoder.mkdir()
    tiny_encoders.write("Bert", encoder)
    tables = {"chat": {"path": str(byte_model), "weight": 2}, "bert": {"path": str(encoder), "load_format": "auto", "keep_alive": "1h"}}
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items()]
    file.write_text("".join(lines))
    with served("--models", str(file), "--preload", "chat,bert") as server:
        yield server


def embedding(server: Served) -> list[float]:
    answer = server.http.post("/v1/embeddings", json={"model": "bert", "input": "abc"})
    assert answer.status_code == 200, answer.text
    vector: list[float] = answer.json()["data"][0]["embedding"]
    return vector


def statuses(server: Served) -> dict[str, str]:
    return {one["id"]: one["status"] for one in server.http.get("/v1/models").json()["data"]}


def text(lines: Iterator[str]) -> str:
    """What a stream says until its end."""
    events = objects("\n".join(lines))
    assert not [event for event in events if "error" in event]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def test_models_share_a_process_which_comes_back_with_both(both: Served) -> None:
    process = both.engine()  # there is only one
    expected, vector = both.answer(model="chat", max_tokens=400, ignore_eos=True), embedding(both)
    with both.held() as release, both.http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        lines = answer.iter_lines()
        begun = next(lines)
        assert both.administer("/models/unload", {"model": "bert"}).status_code < 300
        until(lambda: statuses(both) == {"chat": "loaded", "bert": "not loaded"})
        assert embedding(both) == vector  # it is loaded again
        assert statuses(both) == {"chat": "loaded", "bert": "loaded"}
        assert both.engine() == process
        os.kill(process, signal.SIGKILL)
        until(lambda: "loading" in statuses(both).values())
        assert embedding(both) == vector
        release()
        assert text(iter([begun, *lines])) == expected
    assert both.engine() != process
    assert both.answer(model="chat", max_tokens=400, ignore_eos=True) == expected
