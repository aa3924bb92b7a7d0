"""What `benches/gpu/serve.py` reads of vLLM, of which there is one here that does nothing."""

import os
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benches" / "gpu"
VLLM = """
class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["temperature"] == 0
        self.max_tokens = given["max_tokens"]

class LLM:
    def __init__(self, model, load_format, enable_prefix_caching, skip_tokenizer_init, **settings):
        print("INFO {vLLM logs}")
        assert load_format == "dummy" and settings == {"max_num_seqs": 4}
        self.model = model

    def generate(self, prompts, params, use_tqdm):
        if self.model == "stuck":
            import time
            time.sleep(60)
        if len(prompts) > 2:
            raise ValueError("too many")
"""


@pytest.fixture
def peer(monkeypatch, tmp_path):
    """The module, with a package `vllm` in the environment of the processes that it starts."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(VLLM)
    (package / "inputs.py").write_text("def TokensPrompt(prompt_token_ids): return prompt_token_ids\n")
    (tmp_path / "vllm-1.2.dist-info").mkdir()
    (tmp_path / "vllm-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2\n")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    monkeypatch.syspath_prepend(GPU)
    import peer_vllm

    return peer_vllm


def order(*counts: int, model: str = "here") -> dict[str, object]:
    cases = [{"name": f"{count} prompts", "answer": 3, "prompts": [[1, 2]] * count} for count in counts]
    return {"model": model, "settings": {"max_num_seqs": 4}, "cases": cases}


def test_its_version_and_the_seconds_of_each_case_are_read(peer):
    first, *cases = peer.replies(sys.executable, order(1, 2), 60)
    assert first == {"vllm": "1.2"}
    assert [case["case"] for case in cases] == ["1 prompts", "2 prompts"]
    assert all(case["seconds"] >= 0 for case in cases)


def test_what_it_did_before_it_failed_is_kept(peer):
    found = []
    with pytest.raises(RuntimeError, match="ValueError: too many"):
        found += peer.replies(sys.executable, order(1, 3), 60)
    found = peer.replies(sys.executable, order(1, 3), 60)
    assert [next(found), next(found)["case"]] == [{"vllm": "1.2"}, "1 prompts"]


def test_it_ends_when_its_time_is_over(peer):
    with pytest.raises(RuntimeError, match="it took more than 2 s"):
        list(peer.replies(sys.executable, order(1, model="stuck"), 2))


def test_a_python_without_it_is_told_apart(peer):
    assert peer.has_vllm(sys.executable)
    assert not peer.has_vllm("false")
