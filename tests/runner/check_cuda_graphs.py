"""Steps as graphs and without: the same answers. Run in a process of its own, in which Triton's kernels are interpreted."""

import copy
import shutil
from functools import partial
from pathlib import Path

import adapters
import numpy as np
import pytest
import tiny_models
import torch
from compile_gate import FULL
from emulated_graphs import Emulator, LateCopyStream
from tokenizers import Tokenizer, decoders, models
from triton.runtime.errors import OutOfResources

from chairlift import LLM, SamplingParams
from chairlift.engine import engine as engine_module
from chairlift.kernels import advance_heads, convolve, gated_norm, launch_settings, recurrent_reference
from chairlift.layers.device_attention import DevicePlan
from chairlift.runner.build import build_runner
from chairlift.runner.cuda_graphs import PLAIN, TRUNCATED, Graph
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor

OVERLAPS = (False, True) if FULL else (True,)
VOCABULARY, SPLIT = 97, 768  # Longer contexts are split.
SHAPE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
SHAPE |= {"intermediate_size": 48, "max_position_embeddings": 2 * SPLIT}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers see all of the context, or some of it."""
    path: Path = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHAPE.items():
            patch.setitem(tiny_models.SHAPE, name, value)
        patch.setitem(tiny_models.FAMILIES["gemma3"][1], "layer_types", ["sliding_attention", "full_attention"])
        tiny_models.write("gemma3", path)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def make(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes engines on a CPU that attend as a GPU does: with graphs that `records` makes, or without."""
    monkeypatch.setattr("chairlift.runner.torch_runner.CopyStream", LateCopyStream)
    # Its kernel takes a program for each token, and the interpreter a millisecond for each program.
    monkeypatch.setattr(DevicePlan, "write", write)

    def load(*given: object) -> TorchExecutor:
        model = TorchExecutor.load(*given)
        model.in_kernels = True
        return model

    def engine(records: object, overlaps: bool, path: Path = directory, **settings: object) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr("chairlift.runner.torch_runner.graph_capture", lambda device: records)
            backend = partial(TorchBackend, load=load, overlaps=overlaps)
            patch.setattr(
                engine_module, "_build_runner", lambda config, where, eos, on_phase: build_runner(config, where, on_phase, backend)
            )
            small = {
                "num_kv_blocks": 200,
                "block_size": 16,
                "max_num_seqs": 5,
                "max_num_batched_tokens": SPLIT,
                "max_model_len": SPLIT + 40,
            }
            return LLM(str(path), **{"device": "cpu", "dtype": "float32"} | small | settings)

    return engine


def write(plan: DevicePlan, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scales: object) -> None:
    """What is stored nowhere goes to the block that is nobody's."""
    slots = plan.slots.clamp(min=0)
    for new, cache in ((k, keys), (v, values)):
        cache[slots // cache.shape[2], :, slots % cache.shape[2]] = new


def script(seed: int, long: int, penalised: bool = True) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds, more than there are rows; the contexts of the `long` ones grow beyond a split."""
    random = np.random.default_rng(seed)
    prompts, params = [], []
    for i in range(10):
        length = int(random.integers(SPLIT - 8, SPLIT) if i < long else random.integers(1, 9))
        prompts.append(random.integers(0, VOCABULARY, length).tolist())
        way = SamplingParams(
            max_tokens=3 if i == 2 else int(random.integers(7, 13)),
            temperature=float(random.choice([0.0, 0.8, 1.5])),
            seed=i,
            top_k=int(random.choice([0, 0, 7])),
            top_p=float(random.choice([1.0, 1.0, 0.8])),
            # Of five rows four are penalised at first, for which there is room, and soon all.
            presence_penalty=1.5 if penalised and i != 2 else 0.0,
            repetition_penalty=float(random.choice([1.0, 1.4])) if penalised and i != 2 else 1.0,
            logprobs=random.choice([None, 2]),
            prompt_logprobs=None if i < long else random.choice([None, 1]),
            stop_token_ids=tuple(random.integers(0, VOCABULARY, 3).tolist()),
        )
        params.append(way)
    return prompts, params


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in llm.generate(prompts, copy.deepcopy(params), progress=False):
        lines = [*(output.logprobs or []), *(output.prompt_logprobs or [])[1:]]
        found.append((output.token_ids, [line.logprob for line in lines]))
    llm.close()
    return found


def same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        # How many rows a product of matrices has may change the last bits.
        assert one[1] == pytest.approx(other[1], abs=1e-4)


# With few tokens a step prompts come in pieces of one too, of which nothing is sampled.
@pytest.mark.parametrize(("seed", "long", "tokens", "penalised"), [(3, 1, 512, True)] + [(2, 0, 5, False)] * FULL)
def test_answers_are_the_same_with_graphs_and_without(seed, long, tokens, penalised, make, monkeypatch):
    requested = script(seed, long, penalised)
    expected = answers(make(None, False, max_num_batched_tokens=tokens), *requested)
    assert len({tuple(ids) for ids, _ in expected}) > 6
    sample, sampled = Graph.sample, set()

    def noted(graph, variant, num_samples):
        sampled.add(variant)
        return sample(graph, variant, num_samples)

    monkeypatch.setattr(Graph, "sample", noted)
    for overlaps in OVERLAPS:
        emulator = Emulator()
        sampled.clear()
        llm = make(emulator, overlaps, max_num_batched_tokens=tokens)
        runner = llm.engine.runner
        same(answers(llm, *requested), expected)
        # Penalties took new memory on the way.
        assert max(variant.count_rows for variant in sampled) == (8 if penalised else 0)
        assert penalised or sampled == {PLAIN, TRUNCATED}
        # The pass, the plain and the truncated sample of each size, all of them at the start.
        assert emulator.records == 3 * len(runner.graphs)
        assert emulator.replays > 15


def test_steps_with_adapters_run_without_graphs_and_others_with_them(make, directory, tmp_path):
    modules = {name: str(adapters.random(tmp_path / name, directory, seed)) for seed, name in enumerate("ab")}
    random = np.random.default_rng(3)
    prompts = [random.integers(0, VOCABULARY, 6).tolist() for _ in range(3)]
    # The last one runs on when those with adapters have ended.
    ends = {"a": 4, "b": 7, None: 15}
    params = [SamplingParams(max_tokens=end, temperature=0.0, logprobs=1, lora=name, ignore_eos=True) for name, end in ends.items()]
    expected = answers(make(None, False, enable_lora=True, lora_modules=modules), prompts, params)
    for overlaps in OVERLAPS:
        emulator = Emulator()
        same(answers(make(emulator, overlaps, enable_lora=True, lora_modules=modules), prompts, params), expected)
        # A pass and a sample of each of the about 8 last steps.
        assert 10 <= emulator.replays <= 20


def test_recurrent_states_are_the_same_with_graphs_and_without(make, directory, tmp_path, monkeypatch):
    for name, value in SHAPE.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, value)
    monkeypatch.setitem(tiny_models.FAMILIES["lfm2"][1], "layer_types", ["conv", "full_attention"])
    tiny_models.write("lfm2", tmp_path)
    shutil.copy(directory / "tokenizer.json", tmp_path)
    random, count = np.random.default_rng(4), 7 if FULL else 4
    prompts = [random.integers(0, VOCABULARY, int(random.integers(1, 20))).tolist() for _ in range(count)]
    turns = [random.integers(0, VOCABULARY, 40).tolist()] * 2
    params = [SamplingParams(max_tokens=3 + i, temperature=0.0, logprobs=1, ignore_eos=True) for i in range(7)]

    def answer(records: object, overlaps: bool) -> list[tuple[list[int], list[float]]]:
        llm = make(records, overlaps, tmp_path, block_size=8, speculative_config={"method": "off"})
        first = llm.generate(turns[:1], copy.deepcopy(params[-1:]), progress=False)[0]
        again = llm.generate([first.prompt_token_ids + first.token_ids], copy.deepcopy(params[:1]), progress=False)[0]
        assert again.cached_tokens == 48, "the state that the last decode saved"
        return [(again.token_ids, [line.logprob for line in again.logprobs]), *answers(llm, prompts, params[:count])]

    expected = answer(None, False)
    # In the place of a layer's own choice by device.
    for module, name in ((convolve, "convolve"), (advance_heads, "advance_heads"), (gated_norm, "gated_norm")):
        monkeypatch.setattr(recurrent_reference, name, getattr(module, name))
    for overlaps in OVERLAPS:
        emulator = Emulator()
        same(answer(emulator, overlaps), expected)
        assert emulator.replays > 15


def test_latents_give_the_answers_of_a_cpu_with_graphs_and_without(make, directory, tmp_path, monkeypatch):
    for name, value in SHAPE.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, value)
    # In float32 experts cannot be recorded.
    monkeypatch.setitem(tiny_models.FAMILIES["deepseek-v3"][1], "first_k_dense_replace", 2)
    tiny_models.write("deepseek-v3", tmp_path)
    shutil.copy(directory / "tokenizer.json", tmp_path)
    monkeypatch.setattr(launch_settings, "_group", lambda heads, dim, tokens: 1)  # a head a tile
    random = np.random.default_rng(5)
    turn = random.integers(0, VOCABULARY, 40).tolist()
    prompts = [random.integers(0, VOCABULARY, int(random.integers(1, 20))).tolist() for _ in range(3)]
    params = [SamplingParams(max_tokens=3 + 2 * i, temperature=0.0, logprobs=1, ignore_eos=True) for i in range(3)]

    def answer(llm: LLM) -> list[tuple[list[int], list[float]]]:
        llm.generate([turn], copy.deepcopy(params[:1]), progress=False)
        again = llm.generate([turn], copy.deepcopy(params[:1]), progress=False)[0]
        assert again.cached_tokens == 32
        return [(again.token_ids, [line.logprob for line in again.logprobs]), *answers(llm, prompts, params)]

    small = {
        "num_kv_blocks": 60,
        "block_size": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 24,
        "speculative_config": {"method": "off"},
    }
    expected = answer(LLM(str(tmp_path), device="cpu", dtype="float32", threads=1, **small))
    same(answer(make(None, False, tmp_path, **small)), expected)
    emulator = Emulator()
    same(answer(make(emulator, True, tmp_path, **small)), expected)
    assert emulator.replays > 8


class Unwilling(Emulator):
    """Finds that a model waits for the device."""

    def warm(self, work: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nand more")


class TooSmall(Emulator):
    """Finds that a kernel needs more shared memory than the device has."""

    def warm(self, work: object) -> None:
        raise OutOfResources(139264, 101376, "shared memory")


def test_a_model_that_cannot_be_recorded_runs_without_graphs(make, caplog):
    requested = [[1, 2, 3]], [SamplingParams(max_tokens=4, temperature=0.0)]
    found = []
    for records, settings, why in (
        (Unwilling(), {}, "the model cannot be recorded: called a synchronizing CUDA operation"),
        (TooSmall(), {}, f"the model cannot be recorded: OutOfResources: {OutOfResources(139264, 101376, 'shared memory')}"),
        (Emulator(), {"enforce_eager": True}, "--enforce-eager says so"),
    ):
        llm = make(records, True, **settings)
        assert ["CUDA graphs", "none", why] in llm.engine.info.decisions
        found.append(answers(llm, *requested))
        assert records.replays == 0
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        expected = [f"decode steps run without CUDA graphs, and slower: {why}. Please report this with `chairlift doctor`"]
        assert warnings == (expected if why.startswith("the model") else [])
        caplog.clear()
    same(found[0], found[1])
    same(found[0], found[2])
