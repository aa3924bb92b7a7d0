"""`chairlift verify`: models that agree with transformers, and models of which something was changed."""

import hashlib
import json
import math
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny_encoders
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.checkpoint.gguf import open_gguf, read_float32
from chairlift.checkpoint.gguf_float import float_size, write_float
from chairlift.cli import main
from chairlift.models.encoder import EncoderConfig
from chairlift.models.transformers_program import Model
from chairlift.outputs import TokenLogprobs
from chairlift.verification import comparison, llama_reference
from chairlift.verification.comparison import Findings, compare_answers, compare_embeddings, compare_scores, compare_texts
from chairlift.verification.reference import CannotCompare, find_llama_server, find_python
from chairlift.verification.transformers_reference import TransformersReference


class InProcess(TransformersReference):
    """transformers in this process, which has it loaded already."""

    def __init__(self, directory: Path) -> None:
        self._model, self.name = Model(str(directory), None), "transformers"

    def _ask(self, method: str, **arguments: Any) -> Any:
        return getattr(self._model, method)(**arguments)

    def close(self) -> None:
        pass


class Other(InProcess):
    """A reference with other tokens."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text)[: -1 if text == "Hello world" else None]

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        return [1, *(super().chat(messages) or [])]


class NoNumbers(InProcess):
    """A reference whose first result is no number."""

    asked = 0

    def _ask(self, method: str, **arguments: Any) -> Any:
        answer = super()._ask(method, **arguments)
        if method not in ("embed", "score") or self.asked:
            return answer
        self.asked += 1
        return [math.nan] * len(answer) if method == "embed" else math.nan


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder as transformers writes it, with a tokenizer of bytes and a chat template."""
    path: Path = tmp_path_factory.mktemp("decoder")
    gguf_files.tiny_model("llama", bos_token_id=257, max_position_embeddings=256).save_pretrained(path)
    gguf_files.tokenizer_of_bytes(path)
    return path


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "ANSWER", 24)


def changed(source: Path, path: Path, tensor: str) -> Path:
    """A copy of a model with one number of a tensor changed."""
    shutil.copytree(source, path)
    weights = load_file(path / "model.safetensors")
    weights[tensor].view(-1)[5] += 0.5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_the_report_of_a_decoder_that_agrees(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("chairlift.verification.verify.TransformersReference", lambda python, model: InProcess(model))
    assert main.main(["verify", str(directory)]) == 0
    report = capsys.readouterr().out
    assert report.splitlines()[0].split() == ["chairlift", "verify", "equal"]
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    for text in (digest, "LlamaForCausalLM, in Rust", "11 of 11 have equal tokens", "among 16 are equal in every bit", "none: each key"):
        assert text in report
    assert "DIFFERS" not in report
    monkeypatch.setattr("chairlift.verification.verify.TransformersReference", lambda python, model: Other(model))
    assert main.main(["verify", str(directory)]) == 1
    report = capsys.readouterr().out
    assert report.splitlines()[0].split() == ["chairlift", "verify", "DIFFERENT"]
    assert "DIFFERS: tokens of a conversation: from token 1 on" in report


def test_a_changed_weight_is_found(directory: Path, tmp_path: Path) -> None:
    other = changed(directory, tmp_path / "other", "model.layers.1.mlp.down_proj.weight")
    same, apart = Findings(), Findings()
    with LLM(directory, max_num_seqs=16, max_num_batched_tokens=64) as llm:
        for reference, findings in ((InProcess(directory), same), (InProcess(other), apart)):
            compare_texts(llm, reference, findings)
            compare_answers(llm, reference, findings)
    assert not same.differences
    assert "4 greedy answers compared, 0 ties" in dict(same.facts)["answers"]
    assert any("in the reference; the two log-probabilities are" in text for text in apart.differences)
    assert any("the log-probability of" in text for text in apart.differences)


def test_changed_tokens_and_templates_are_found(directory: Path) -> None:
    findings = Findings()
    with LLM(directory) as llm:
        compare_texts(llm, Other(directory), findings)
    assert dict(findings.facts)["texts"] == "10 of 11 have equal tokens"
    assert [text.split(":")[0] for text in findings.differences] == ["tokens of 'Hello world'", "tokens of a conversation"]


def test_texts_with_combining_marks_are_not_compared_with_a_reference_that_misreads_them(directory: Path) -> None:
    class Misreads(InProcess):
        reads_marks = False

        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("e\u0301", ""))

    findings = Findings()
    with LLM(directory) as llm:
        compare_texts(llm, Misreads(directory), findings)
    assert not findings.differences
    assert dict(findings.facts)["texts"] == "9 of 9 have equal tokens; 2 with combining marks left out"


@pytest.mark.parametrize(
    ("here", "there", "ties", "differences"),
    [
        (5e-5, 5e-5, 1, 0),
        (5e-5, 2e-4, 0, 1),  # the reference was sure enough
        (2e-4, 5e-5, 0, 1),
        (5e-5, math.nan, 1, 0),
        (2e-4, math.nan, 0, 1),
    ],
)
def test_two_tokens_may_come_in_either_order_only_in_a_tie(here: float, there: float, ties: int, differences: int) -> None:
    ours = [TokenLogprobs(1, -1.0, 1, ((1, -1.0), (2, -1.0 - here)))]
    result = comparison.follow(ours, [[(2, -1.0), (1, -1.0 - there)]], str)
    assert (result.ties, len(result.differences)) == (ties, differences)
    assert result.largest < 1e-3


def test_only_the_first_difference_of_each_kind_is_reported() -> None:
    ours = [TokenLogprobs(1, -1.0, 1, ((1, -1.0), (2, -2.0)))] * 3
    result = comparison.follow(ours, [[(2, -1.0), (1, -3.0)]] * 3, str)
    assert [text.split(":")[0] for text in result.differences] == ["token 1", "token 1"]
    assert result.largest == pytest.approx(1.0)


def test_a_log_probability_that_is_no_number_differs() -> None:
    result = comparison.follow([TokenLogprobs(1, math.nan, 1, ((1, math.nan), (2, -2.0)))], [[(1, -1.0), (2, -2.0)]], str)
    assert result.differences == ["token 1: the log-probability of 1 1 is nan, and -1 in the reference"]
    assert result.largest == math.inf


@pytest.mark.parametrize("family", ["Bert", "Gemma3Text", "BertForSequenceClassification"])
def test_encoders_agree_and_a_changed_weight_is_found(tmp_path: Path, family: str) -> None:
    tiny_encoders.write(family, tmp_path / "one")
    model = EncoderConfig.find(tmp_path / "one")
    assert model is not None
    name = {"Bert": "encoder.layer.1.output.dense.weight", "Gemma3Text": "layers.1.mlp.down_proj.weight"}
    tensor = name.get(family, "bert.pooler.dense.weight")
    changed(tmp_path / "one", tmp_path / "other", tensor)
    with LLM(tmp_path / "one") as llm:
        for path, kind, differs in (("one", InProcess, False), ("other", InProcess, True), ("one", NoNumbers, True)):
            reference, findings = kind(tmp_path / path), Findings()
            if model.score is None:
                compare_embeddings(llm, reference, model, findings)
            else:
                compare_scores(llm, reference, findings)
            assert bool(findings.differences) == differs, findings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('echo \'{"answer": "transformers 5"}\'; read q; echo \'{"error": "KeyError: lm_head"}\'', "compute the model: KeyError: lm_head"),
        ('echo \'{"answer": "transformers 5"}\'; echo "out of memory" >&2; exit 1', "compute the model: out of memory"),
    ],
)
def test_a_failure_of_the_other_process_is_reported(directory: Path, tmp_path: Path, line: str, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{line}\n")
    python.chmod(0o755)
    reference = TransformersReference(python, directory)
    assert reference.name == f"transformers 5 ({python})"
    with pytest.raises(CannotCompare, match=message):
        reference.encode("a")
    reference.close()


@pytest.mark.parametrize("line", ["echo Loading", """echo '{"error": "no"}'"""])
def test_a_process_that_does_not_start_well_is_ended(directory: Path, tmp_path: Path, line: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{line}\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(CannotCompare, match="transformers "):
        TransformersReference(python, directory)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_transformers_is_imported_offline(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"answer\": \"offline='$HF_HUB_OFFLINE'\"}'\n")
    python.chmod(0o755)
    reference = TransformersReference(python, directory)
    reference.close()
    assert reference.name.startswith("offline=1 ")


def test_llama_server_is_asked_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import http.server, json, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(json.dumps({'status': 'ok', 'build_info': 'b1'}).encode())\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()\n"
    )
    program.chmod(0o755)
    gguf_files.gguf_of(gguf_files.tiny_model("qwen2"), tmp_path / "tiny.gguf")
    monkeypatch.setattr(llama_reference, "START_SECONDS", 20)
    reference = llama_reference.LlamaReference(program, tmp_path / "tiny.gguf", 64, None)
    reference.close()
    assert reference.name == f"llama.cpp b1 ({program})"


def test_what_cannot_be_compared_has_a_status_of_its_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf_files.gguf_of(gguf_files.tiny_model("qwen2"), tmp_path / "tiny.gguf")
    monkeypatch.setattr("chairlift.verification.verify.find_python", lambda named: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    failing = tmp_path / "llama-server"
    failing.write_text("#!/bin/sh\necho 'error loading model: unknown architecture'\nexit 1\n")
    failing.chmod(failing.stat().st_mode | stat.S_IXUSR)
    for arguments, message in [
        ([str(directory)], "install transformers and torch here"),
        ([str(directory), "--llama-cpp", str(failing)], "llama.cpp computes GGUF files alone"),
        ([str(tmp_path / "tiny.gguf")], "or llama-server on the path (or LLAMA_CPP, or --llama-cpp)"),
        ([str(tmp_path / "tiny.gguf"), "--llama-cpp", str(tmp_path / "none")], "neither llama-server nor a folder that has it"),
        ([str(tmp_path / "tiny.gguf"), "--llama-cpp", str(tmp_path)], "error loading model: unknown architecture"),
        ([str(tmp_path / "missing")], "there is no model"),
    ]:
        assert main.main(["verify", *arguments]) == 2, arguments
        assert message in capsys.readouterr().out


def test_where_references_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "build" / "bin" / "llama-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert find_llama_server(None) == find_llama_server(program) == program
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_llama_server(None) == program
    monkeypatch.setenv("PATH", "")
    assert find_llama_server(None) is None
    assert find_python(None) == Path(sys.executable)
    with pytest.raises(CannotCompare, match="no Python interpreter"):
        find_python(tmp_path)


def test_choices_of_llama_cpp_are_matched_with_its_tokens() -> None:
    def listed(*tokens: int) -> list[dict[str, Any]]:
        return [{"id": token, "top_logprobs": [{"id": token, "logprob": -1.0}]} for token in tokens]

    known, unknown = (lambda token: [(token, -1.0)]), (lambda token: [token])
    match = llama_reference.choices_by_token
    assert match([5, 6, 7], listed(5, 6, 7)) == [known(5), known(6), known(7)]
    found = match([5, 9, 7], listed(5, 7))
    assert found[0::2] == [known(5), known(7)]
    assert [token for token, _ in found[1]] == unknown(9)
    assert math.isnan(found[1][0][1])
    # Which of the two has the choices is not known.
    assert all(math.isnan(choices[0][1]) for choices in match([9, 9], listed(9)))


def test_a_copy_in_float32_has_the_same_metadata_and_numbers(tmp_path: Path) -> None:
    model = gguf_files.tiny_model("qwen2")
    gguf_files.gguf_of(model, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    parts = gguf_files.split_gguf_of(model, tmp_path / "split.gguf", 5, quantization=gguf.GGMLQuantizationType.Q8_0)
    for source in (tmp_path / "tiny.gguf", parts[0]):
        copy, file = write_float(source, tmp_path / f"{source.stem}-f32.gguf"), open_gguf(source)
        again = open_gguf(copy)
        assert float_size(copy) == 0
        assert float_size(source) == sum(entry.size for entry in again.tensors.values())
        assert again.tensors.keys() == file.tensors.keys()
        for name, entry in file.tensors.items():
            assert np.array_equal(read_float32(file, entry), read_float32(again, again.tensors[name]))
        keys = [key for key in file.keys("") if not key.startswith("split.")]
        assert {key: again.value(key) for key in keys} == {key: file.value(key) for key in keys}


def test_the_program_follows_an_answer(directory: Path) -> None:
    model = Model(str(directory), None)
    prompt, answer = [5, 6, 7], [8, 9]
    choices = model.follow(prompt, answer, 3)
    assert [len(position) for position in choices] == [3, 3]
    with torch.no_grad():
        logits = model.load("AutoModelForCausalLM")(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    assert choices[1][0] == (int(logits[3].argmax()), logits[3].max().item())
    assert json.dumps(choices)
