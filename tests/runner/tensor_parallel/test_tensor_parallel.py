import contextlib
import dataclasses
import gc
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from chairlift import LLM, SamplingParams
from chairlift.child_process import STOPS
from chairlift.errors import ChairliftError, InvalidSetting, OutOfMemory, UnsupportedModel
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.blocks import LayerWeights
from chairlift.models.config import ModelConfig, load_shape
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.tensor_parallel.executor import TensorParallelExecutor
from chairlift.runner.tensor_parallel.split import part_of
from chairlift.runner.tensor_parallel.worker import Worker

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, "device": "cpu", "seed": 3}
TIGHT = {"num_kv_blocks": 17, "block_size": 8}
"""So few blocks that sequences lose theirs."""


@pytest.fixture
def prompts() -> list[list[int]]:
    """Prompts of 1 to 60 tokens, of which three begin alike."""
    rng = np.random.default_rng(0)
    begin = rng.integers(8, 199, 20).tolist()
    return [rng.integers(8, 199, length).tolist() for length in (1, 2, 7, 33, 60)] + [[*begin, 9 + i] for i in range(3)]


@pytest.mark.parametrize("family", ["llama-biased", "mistral-like", "gemma2"])
def test_two_processes_answer_as_one_does(
    family: str, prompts: list[list[int]], byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, "mistral-like", ("Mistral", {"sliding_window": 13, "head_dim": 16}))
    model = tiny_models.write(family, tmp_path)
    shutil.copy(byte_model / "tokenizer.json", tmp_path)
    one, two = (LLM(str(tmp_path), **SIZES, **TIGHT, swap_space=1 << 20, tensor_parallel_size=size) for size in (1, 2))
    answers = [output.token_ids for output in two.generate(prompts, GREEDY)]
    assert two.engine.stats().preemptions > 0
    assert answers == [output.token_ids for output in one.generate(prompts, GREEDY)]
    ids = model.generate(tiny_models.torch.tensor([prompts[4]]), do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None)
    assert answers[4] == ids[0, 60:].tolist()
    drawn = SamplingParams(temperature=1.0, seed=7, max_tokens=12, n=2, logprobs=2, ignore_eos=True)
    assert [o.token_ids for o in two.generate(prompts[3:5], drawn)] == [o.token_ids for o in one.generate(prompts[3:5], drawn)]


@pytest.mark.parametrize(
    ("family", "size", "says"),
    [
        ("qwen3", 2, "the model has 1 KV heads, which cannot be split into 2 equal parts"),
        ("llama", 3, "2 KV heads, which cannot be split into 3"),
        ("phi3", 2, "the fused projections of Phi3ForCausalLM, self_attn.qkv_proj, cannot be split"),
        ("llama", 4, "6 attention heads, which cannot be split into 4"),
        ("qwen3-moe", 2, "the experts of Qwen3MoeForCausalLM cannot be split: leave it out. The model must fit into one device"),
        ("olmo2", 2, "the norms of all heads together of Olmo2ForCausalLM cannot be split"),
        ("cohere-norms", 2, "the norms of each head of CohereForCausalLM cannot be split"),
        ("gpt2", 2, "the fused projections of GPT2LMHeadModel, attn.c_attn, cannot be split"),
        ("deepseek-v3", 2, "the latents and experts of DeepseekV3ForCausalLM cannot be split"),
    ],
)
def test_what_cannot_be_cut_is_refused(family: str, size: int, says: str, tmp_path: Path) -> None:
    tiny_models.write(family, tmp_path)
    with pytest.raises(InvalidSetting, match=f"--tensor-parallel-size {size}: .*{says}"):
        part_of(load_shape(tmp_path), size)


def test_an_mlp_without_a_gate_can_be_cut(tmp_path: Path) -> None:
    tiny_models.write("arcee", tmp_path)
    whole = load_shape(tmp_path)
    assert part_of(whole, 2).intermediate_size == whole.intermediate_size // 2


def test_parts_of_a_matrix_and_of_a_bias_have_equal_sizes() -> None:
    for shape in ((5,), (5, 3)):
        first, second = (TensorParallelGroup(rank, 2).part(torch.ones(shape)) for rank in (0, 1))
        assert first.shape == second.shape == (3, *shape[1:])
        assert (first.sum(0) == 3).all()
        assert (second.sum(0) == 2).all()


def test_a_fused_projection_of_an_old_file_is_not_cut(tmp_path: Path) -> None:
    tiny_models.write("phi", tmp_path)
    source: Any = SimpleNamespace(has=lambda name: name.endswith("qkv_proj.weight"))
    for size in (1, 2):
        weights = LayerWeights(ModelConfig.load(tmp_path), 1, source, torch.float32, TensorParallelGroup(0, size), None, False)
        with contextlib.nullcontext() if size == 1 else pytest.raises(UnsupportedModel, match="qkv_proj is a fused"):
            assert weights.fused_qkv() == ("self_attn.qkv_proj",)
        source_of_all: Any = SimpleNamespace(has=lambda name: True)  # as random weights
        weights.source = source_of_all
        assert weights.fused_qkv() == ()


def test_a_worker_that_ends_is_told_of(byte_model: Path) -> None:
    llm = LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)
    [worker] = llm.engine.runner.model.workers
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{worker.process.pid}/status").read_text().splitlines())
    assert all(int(status["SigIgn"], 16) >> (number - 1) & 1 for number in STOPS)
    worker.process.kill()
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(ChairliftError, match="a worker of --tensor-parallel-size exited with status -9"):
            llm.generate([[1, 2, 3]], GREEDY)


def test_a_step_that_fails_ends_the_workers(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)
    model = llm.engine.runner.model
    with monkeypatch.context() as patch:
        patch.setattr(model.part, "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], GREEDY)
    assert model.workers[0].has_exited()
    with pytest.raises(ChairliftError):
        llm.generate([[1, 2, 3]], GREEDY)


def test_a_worker_that_cannot_load_says_why(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = dataclasses.asdict
    monkeypatch.setattr(dataclasses, "asdict", lambda config: loaded(config) | {"load_format": "auto"})
    with pytest.raises(ChairliftError, match=r"a worker of --tensor-parallel-size: ModelNotFound: .* holds no \*\.safetensors file"):
        LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)


def test_workers_that_nobody_needs_any_more_are_gone(byte_model: Path) -> None:
    for close in (False, True):
        llm = LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)
        [worker] = llm.engine.runner.model.workers
        if close:
            llm.close()
        else:
            del llm
            gc.collect()
        # Not even the system's entry of it is left, which another process would have to clear away.
        assert not Path(f"/proc/{worker.process.pid}").exists()


def test_a_fork_that_exits_leaves_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    worker: Any = SimpleNamespace(end=lambda: ended.append(os.getpid()))
    part: Any = SimpleNamespace(device=None, batch_invariant=True)
    executor, other = (TensorParallelExecutor([worker], part, part) for _ in range(2))
    owner = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: owner + 1)
    executor.close()
    assert ended == []
    monkeypatch.undo()
    other.close()
    assert ended == [owner]


def test_too_little_memory_in_a_step_ends_all_and_is_not_tried_again(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)
    model = llm.engine.runner.model

    def lacking(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.part, "forward", lacking)
    with pytest.raises(ChairliftError, match="a device of --tensor-parallel-size has too little memory") as raised:
        llm.generate([[1, 2, 3]], GREEDY)
    assert not isinstance(raised.value, OutOfMemory)
    assert model.workers[0].has_exited()


def test_a_workers_buffers_are_those_of_the_other_process() -> None:
    passes: list[int] = []
    worker, cpu = Worker(), torch.device("cpu")
    worker.group = ALONE
    worker.part = SimpleNamespace(device=cpu, forward=lambda buffers, tokens, seqs: passes.append(buffers.slot_mapping[0]))
    # Blocks a row are fewer once the context is fitted to what there is.
    for blocks in (8, 8, 3):
        there = DeviceBuffers(2, 40, 6, blocks, cpu, CopyStream(cpu))
        there.host[1].slot_mapping[0] = blocks
        there.host[1].table_writes[:4] = 0, 7, 6 * blocks - 1, 9  # the first and the last entry of the tables
        there.load(1, 2)
        worker.forward(list(there.sizes), *there.loaded(1, 1), 1, 1)
        assert torch.equal(worker.buffers.block_tables, there.block_tables)
    assert passes == [8, 8, 3]


def test_workers_get_only_what_a_step_uses() -> None:
    cpu = torch.device("cpu")
    there = DeviceBuffers(2, 2048, 256, 512, cpu, CopyStream(cpu))
    there.load(0, 3)
    # A decode step of four sequences: starts, and for each its length, slot, position and place; and three entries of the block tables.
    assert len(there.loaded(4, 4)[2]) == 4 * (5 + 4 * 4 + 2 * 3)


LACKING = """
import chairlift.runner.torch_executor as here

def lacking(*arguments):
    raise here.torch.OutOfMemoryError("CUDA out of memory")

here.TorchExecutor.forward = lacking
"""


def test_a_worker_without_memory_says_so(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    monkeypatch.syspath_prepend(str(tmp_path))  # which workers get as well
    with pytest.raises(ChairliftError, match="a device of --tensor-parallel-size has too little memory"):
        LLM(str(byte_model), load_format="dummy", tensor_parallel_size=2, **SIZES, num_kv_blocks=64)
