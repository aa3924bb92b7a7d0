"""Checkpoints that transformers computes, through the whole engine: greedy tokens equal those of its own `generate`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import EXPERTS, MIXED, YARN, build, configure

from chairlift import LLM, SamplingParams
from chairlift.errors import UnsupportedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5], list(range(3, 40)), [7, 9, 7, 9, 7, 9], list(range(60, 80)), [200] * 13]
SETTINGS = {"device": "cpu", "num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.fixture
def save(tmp_path: Path, byte_model: Path):
    """Writes a checkpoint of random weights, with a tokenizer, and returns the model that it is of."""

    def write(name: str, **changes: object) -> torch.nn.Module:
        model = build(configure(name, vocab_size=300, **changes))
        model.save_pretrained(tmp_path)
        shutil.copy(byte_model / "tokenizer.json", tmp_path)
        return model

    return write


def code(llm: LLM) -> list[str]:
    [row] = [row for row in llm.facts["decisions"] if row[0] == "code"]
    return row[1:]


@pytest.mark.parametrize(
    ("name", "changes", "by"),
    [
        ("gemma2", MIXED, "Gemma2ForCausalLM, in torch"),
        ("gpt_neox", {}, "transformers' GPTNeoXForCausalLM, with paged attention"),
        ("gpt_oss", EXPERTS | MIXED, "transformers' GptOssForCausalLM, with paged attention"),
        ("llama", {"rope_parameters": YARN}, "transformers' LlamaForCausalLM, with paged attention"),
    ],
)
def test_greedy_tokens_are_those_of_generate(name, changes, by, save, tmp_path):
    reference = save(name, **changes)
    llm = LLM(str(tmp_path), **SETTINGS)
    assert code(llm)[0] == by
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
        assert output.token_ids == expected
    # And from the prefix cache.
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in outputs]


def test_random_weights_need_a_config_alone(save, tmp_path):
    save("gpt2", max_position_embeddings=64)
    (tmp_path / "model.safetensors").unlink()
    llms = [LLM(str(tmp_path), load_format="dummy", seed=seed, **SETTINGS) for seed in (3, 3, 4)]
    first, again, other = (llm.generate([[5, 6, 7]], GREEDY)[0].token_ids for llm in llms)
    assert first == again != other
    assert llms[0].facts["max_model_len"] == 64


def test_weights_that_are_missing_are_not_made_up(save, tmp_path):
    save("gpt_neox")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks weights .* gpt_neox.layers.1.mlp.dense_h_to_4h.weight"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("quantization", "package"),
    [({"quant_method": "gptq", "bits": 4}, "optimum"), ({"quant_method": "compressed-tensors"}, "compressed.tensors")],
)
def test_a_quantised_checkpoint_needs_its_package(quantization, package, save, tmp_path):
    save("llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    method = quantization["quant_method"]
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM, quantised with {method}, cannot be loaded .*install {package}"):
        LLM(str(tmp_path), **SETTINGS)


def test_code_that_comes_with_a_checkpoint_is_not_run(save, tmp_path):
    save("llama")
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(UnsupportedModel, match=r"MineForCausalLM has no code of ours .* transformers cannot read it either"):
        LLM(str(tmp_path), **SETTINGS)


def test_models_with_code_of_ours_start_without_transformers():
    script = "import sys, chairlift.engine.loop, chairlift.runner.runner; print('transformers' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]
