"""LoRA adapters: answers of merged weights in transformers, the same bits in any company, no stale KV, and loading at run time."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import adapters
import numpy as np
import pytest
import tiny_models
import torch

from chairlift import LLM, SamplingParams
from chairlift.engine import engine as engine_module
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidRequest, InvalidSetting, OutOfMemory, UnsupportedModel
from chairlift.runner.build import build_runner
from chairlift.runner.torch_backend import TorchBackend

PROMPTS = [np.random.default_rng(length).integers(8, 199, length).tolist() for length in (5, 40, 17, 33, 64, 9)]
ROOMY = {"num_kv_blocks": 200, "block_size": 8, "max_model_len": 128, "threads": 2}


def greedy(lora: str | None = None, **fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logprobs": 3, "lora": lora} | fields)


def make(directory: Path, tokenizer: Path, family: str = "llama") -> torch.nn.Module:
    model = tiny_models.write(family, directory)
    shutil.copy(tokenizer / "tokenizer.json", directory)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, byte_model: Path) -> Path:
    directory: Path = tmp_path_factory.mktemp("base")
    make(directory, byte_model)
    return directory


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: str(adapters.random(directory / name, base, seed, 3 + seed)) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def llm(base: Path, paths: dict[str, str]) -> LLM:
    return LLM(base, enable_lora=True, lora_modules=paths, **ROOMY)


def merge(model: torch.nn.Module, tensors: dict[str, np.ndarray], scale: float) -> None:
    """Adds an adapter to the weights."""
    weights = dict(model.named_parameters())
    for name in tensors:
        if name.endswith(".lora_A"):
            place = name.removesuffix(".lora_A")
            delta = tensors[f"{place}.lora_B"].astype(np.float64) @ tensors[name].astype(np.float64) * scale
            weights[f"{place}.weight"].data += torch.from_numpy(delta).float()


@pytest.mark.parametrize("runner", ["rust", "torch"])
@pytest.mark.parametrize(
    ("family", "modules", "rslora"),
    [
        ("llama", adapters.MODULES, False),
        ("llama-biased", ("q_proj", "v_proj"), False),
        ("qwen3", ("k_proj", "o_proj", "up_proj"), True),
        ("gemma2", adapters.MODULES, True),
        ("granite", ("gate_proj", "down_proj"), False),
        ("qwen3-moe", ("q_proj", "o_proj"), False),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), False),
        ("phi4-mini", ("qkv_proj", "o_proj"), False),
        ("glm4-moe", ("q_proj", "k_proj", "v_proj"), False),
        ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"), False),
        ("ernie4.5", ("q_proj", "k_proj"), True),
        ("cohere", adapters.MODULES, False),
        ("olmo2", adapters.MODULES, True),
    ],
)
@torch.inference_mode()
def test_answers_are_those_of_merged_weights(
    tmp_path: Path, byte_model: Path, family: str, modules: tuple[str, ...], rslora: bool, runner: str
) -> None:
    if family == "granite" and runner == "torch":
        family = "gemma3"  # torch has no code for the other
    model = make(tmp_path / "base", byte_model, family)
    tensors = adapters.matrices(tmp_path / "base", rank=5, modules=modules)
    path = adapters.write(tmp_path / "adapter", tensors, rank=5, alpha=3, use_rslora=rslora)
    with LLM(tmp_path / "base", enable_lora=True, lora_modules={"a": str(path)}, runner=runner, **ROOMY) as llm:
        found = llm.generate(PROMPTS[:4], greedy("a", prompt_logprobs=0))
        plain = llm.generate(PROMPTS[:4], greedy())
    merge(model, tensors, 3 / math.sqrt(5) if rslora else 3 / 5)
    for output, other in zip(found, plain, strict=True):
        assert output.logprobs != other.logprobs
        tokens = torch.tensor([output.prompt_token_ids + output.token_ids])
        expected = model(tokens).logits[0].log_softmax(-1)[:-1].numpy()
        values = [one.logprob for one in [*output.prompt_logprobs[1:], *output.logprobs]]
        assert np.abs(np.take_along_axis(expected, tokens[0, 1:, None].numpy(), 1)[:, 0] - values).max() < 1e-4
        assert output.token_ids == expected[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()


@torch.inference_mode()
def test_ranks_and_alphas_by_module(tmp_path: Path, byte_model: Path) -> None:
    model = make(tmp_path / "base", byte_model, "llama")
    tensors = adapters.matrices(tmp_path / "base", rank=3) | adapters.matrices(tmp_path / "base", rank=5, modules=("up_proj",))
    ranks, alphas = {"mlp.up_proj": 5, ".*_proj": 3}, {r"layers\.0\.self_attn\..*": 6.0, "q_proj": 1}
    path = adapters.write(tmp_path / "adapter", tensors, rank=4, alpha=2, rank_pattern=ranks, alpha_pattern=alphas)
    with LLM(tmp_path / "base", enable_lora=True, lora_modules={"a": str(path)}, **ROOMY) as llm:
        found = llm.generate(PROMPTS[0], greedy("a", max_tokens=1))[0]
    with pytest.raises(InvalidSetting, match="has rank 5, above --max-lora-rank 4"):
        LLM(tmp_path / "base", enable_lora=True, lora_modules={"a": str(path)}, max_lora_rank=4, **ROOMY)
    for name in [name for name in tensors if name.endswith("lora_A")]:
        alpha = 6 if ".0.self_attn" in name else 1 if "q_proj" in name else 2
        layer = {one: tensors[one] for one in (name, name.replace("lora_A", "lora_B"))}
        merge(model, layer, alpha / tensors[name].shape[0])
    expected = model(torch.tensor([found.prompt_token_ids])).logits[0, -1].log_softmax(-1)
    assert abs(float(expected[found.token_ids[0]]) - found.logprobs[0].logprob) < 1e-4


@pytest.mark.parametrize("runner", ["rust", "torch"])
def test_an_adapter_in_a_gguf_file_is_that_of_peft(tmp_path: Path, byte_model: Path, runner: str) -> None:
    base = tmp_path / "base"
    make(base, byte_model, "llama")
    config, tensors = json.loads((base / "config.json").read_text()), adapters.matrices(base)
    file = adapters.write_gguf(tmp_path / "a.gguf", tensors, config["num_attention_heads"], config["num_key_value_heads"])
    modules = {"peft": str(adapters.write(tmp_path / "peft", tensors)), "gguf": str(file)}
    with LLM(base, enable_lora=True, lora_modules=modules, runner=runner, **ROOMY) as llm:
        one, other = (llm.generate(PROMPTS[0], greedy(name))[0] for name in modules)
        plain = llm.generate(PROMPTS[0], greedy())[0]
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert one.logprobs != plain.logprobs


def test_an_answer_has_the_same_bits_alone_and_in_any_mix(base: Path, paths: dict[str, str], llm: LLM) -> None:
    rng = np.random.default_rng(1)
    names = [None, "a", "b", "c"]
    prompts = [rng.integers(8, 199, rng.integers(1, 90)).tolist() for _ in range(60)]
    # Tokens are drafted only for requests without log-probabilities.
    params = [
        greedy(names[i % 4], max_tokens=1 + i % 13, temperature=float(i % 2), seed=i, logprobs=(3, None)[i // 4 % 2]) for i in range(60)
    ]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    # Few blocks and small steps: many sequences are preempted, and prompts are cut anywhere.
    tight = {**ROOMY, "num_kv_blocks": 22, "max_num_seqs": 20, "max_num_batched_tokens": 37}
    speculation = {"method": "auto", "num_speculative_tokens": 4}
    for settings in (ROOMY, tight, {**tight, "speculative_config": speculation, "swap_space": 1 << 20}):
        with LLM(base, enable_lora=True, lora_modules=paths, **settings) as other:
            mixed = other.generate(prompts, params)
            assert settings is ROOMY or sum(output.preemptions for output in mixed) > 5
            other.engine.check()
        for one, found in zip(alone, mixed, strict=True):
            assert (found.token_ids, found.logprobs) == (one.token_ids, one.logprobs)


@pytest.mark.parametrize("overlaps", [None, True, False])
def test_an_answer_in_torch_is_that_of_its_own_run_in_any_mix(
    base: Path, paths: dict[str, str], overlaps: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`overlaps` makes steps as on a device: sampled there, and two in flight."""
    if overlaps is not None:
        backend = partial(TorchBackend, overlaps=overlaps)
        monkeypatch.setattr(
            engine_module, "_build_runner", lambda config, path, eos, on_phase: build_runner(config, path, on_phase, backend)
        )
    rng, names = np.random.default_rng(2), [None, "a", "b"]
    prompts = [rng.integers(8, 199, rng.integers(1, 60)).tolist() for _ in range(24)]
    params = [greedy(names[i % 3], max_tokens=1 + i % 9) for i in range(24)]
    tight = {**ROOMY, "num_kv_blocks": 20, "max_num_seqs": 8, "max_num_batched_tokens": 37, "swap_space": 1 << 20}
    modules = {name: paths[name] for name in "ab"}
    with LLM(base, runner="torch", enable_lora=True, lora_modules=modules, **ROOMY) as llm:
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for settings in (ROOMY, tight):
        with LLM(base, runner="torch", enable_lora=True, lora_modules=modules, **settings) as llm:
            mixed = llm.generate(prompts, params)
            assert settings is ROOMY or sum(output.preemptions for output in mixed) > 0
        for one, found in zip(alone, mixed, strict=True):
            assert found.token_ids == one.token_ids
            values = [[line.logprob for line in output.logprobs] for output in (found, one)]
            assert np.abs(np.subtract(*values)).max() < 1e-4
    # Without an adapter the answer is the base's.
    with LLM(base, runner="torch", **ROOMY) as llm:
        plain = llm.generate(prompts[::3], [replace(one, lora=None) for one in params[::3]])
        assert [output.token_ids for output in plain] == [output.token_ids for output in alone[::3]]
        other = llm.generate(prompts[1::3], [replace(one, lora=None) for one in params[1::3]])
        assert [output.token_ids for output in other] != [output.token_ids for output in alone[1::3]]


def test_each_choice_of_a_request_has_its_adapter(llm: LLM) -> None:
    params = greedy("b", n=3, temperature=1.0, seed=5)
    requested = [params, params, greedy("c", n=3, temperature=1.0, seed=5)]
    [first] = llm.generate([PROMPTS[1]], params)
    found = [[choice.token_ids for choice in output.outputs] for output in [first, *llm.generate([PROMPTS[1]] * 2, requested[1:])]]
    assert len(found[0]) == 3
    assert found[1] == found[0]
    assert found[2] != found[0]


@pytest.mark.parametrize("runner", ["rust", "torch"])
def test_kv_is_shared_within_an_adapter_only_and_never_stale(tmp_path: Path, base: Path, runner: str) -> None:
    def reload(name: str, path: Path) -> None:
        llm.unload_lora_adapter(name)
        llm.load_lora_adapter(name, path)

    one, two = (adapters.random(tmp_path / name, base, seed) for seed, name in enumerate(("one", "two")))
    with LLM(base, enable_lora=True, lora_modules={"a": str(one)}, runner=runner, **ROOMY) as llm:
        llm.load_lora_adapter("same", one)

        def run(lora: str | None) -> tuple[int, list[int]]:
            (output,) = llm.generate([PROMPTS[4]], greedy(lora))
            return output.cached_tokens, output.token_ids

        cached, first = run("a")
        assert cached == 0
        assert run(None)[0] == 0
        assert run("a") == (63, first)
        assert run("same") == (63, first)  # equal content
        reload("a", two)
        cached, second = run("a")
        assert cached == 0
        assert second != first
        reload("a", one)
        assert run("a") == (63, first)
        # The same matrices with another scale are another adapter.
        config = json.loads((one / "adapter_config.json").read_text())
        (one / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
        reload("a", one)
        assert run("a")[0] == 0


def test_an_adapter_is_not_unloaded_while_requests_use_it(llm: LLM, paths: dict[str, str]) -> None:
    stream = llm.stream(PROMPTS[0], greedy("b", max_tokens=50))
    next(stream)
    with pytest.raises(InvalidRequest, match="1 sequences use the adapter 'b'") as busy:
        llm.unload_lora_adapter("b")
    assert busy.value.code == "adapter_busy"
    assert len([*stream]) == 49
    expected = llm.generate([PROMPTS[0]], greedy("b"))[0].token_ids
    llm.unload_lora_adapter("b")
    with pytest.raises(InvalidRequest, match="no adapter is named 'b'; the loaded ones are a, c"):
        llm.generate([PROMPTS[0]], greedy("b"))
    with pytest.raises(InvalidRequest, match="named 'a' is loaded already"):
        llm.load_lora_adapter("a", paths["b"])
    llm.load_lora_adapter("b", paths["b"])
    assert llm.generate([PROMPTS[0]], greedy("b"))[0].token_ids == expected


def test_misuse_is_refused(base: Path, llm: LLM, byte_model: Path, tmp_path: Path, paths: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="no adapter is named 'x'; the loaded ones are a, b, c"):
        llm.generate(PROMPTS[:1], greedy("x"))
    with pytest.raises(InvalidRequest, match="without adapters"):
        SamplingParams(lora="a", embed=True)
    with pytest.raises(InvalidRequest, match="live sequences are computed without adapters"), llm.open(PROMPTS[0]) as sequence:
        sequence.generate(greedy("a"))
    with pytest.raises(InvalidSetting, match="rank 20, above --max-lora-rank 16"):
        llm.load_lora_adapter("big", adapters.random(tmp_path / "big", base, rank=20))
    other = adapters.random(tmp_path / "other", byte_model)
    with pytest.raises(UnsupportedModel, match="another base: down_proj of layer 0 is 32x48, and the model's is 48x80"):
        llm.load_lora_adapter("other", other)
    with pytest.raises(InvalidSetting, match="lora_modules needs enable_lora"):
        LLM(base, lora_modules=paths)
    with pytest.raises(InvalidSetting, match="lora_modules: expected a dict"):
        LLM(base, enable_lora=True, lora_modules={"a": Path("x")})
    for settings in ({"tensor_parallel_size": 2}, {"load_format": "none"}):
        with pytest.raises(InvalidSetting, match="--enable-lora: "):
            LLM(base, enable_lora=True, **settings)
    with LLM(base, **ROOMY) as plain:
        with pytest.raises(InvalidRequest, match="none is loaded: start with --enable-lora"):
            plain.generate(PROMPTS[:1], greedy("a"))
        with pytest.raises(InvalidRequest, match="adapters are off"):
            plain.load_lora_adapter("a", paths["a"])
    assert isinstance(llm.engine, Engine)


def test_an_adapter_for_which_a_device_lacks_memory_is_refused(base: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. If reserved but unallocated memory is large")

    with LLM(base, runner="torch", enable_lora=True, **ROOMY) as llm:
        adapter = llm.engine.read_adapter(paths["a"])
        with monkeypatch.context() as patch:
            patch.setattr("chairlift.runner.torch_adapters.LowRankUpdate", full)
            with pytest.raises(OutOfMemory, match=r"no memory for the adapter: unload others, .* Tried to allocate 2.00 MiB.$"):
                llm.engine.load_adapter("a", adapter)
        with pytest.raises(InvalidRequest, match=r"no adapter is named 'a'; none is loaded$"):
            llm.generate(PROMPTS[:1], greedy("a"))
        llm.load_lora_adapter("a", paths["a"])
        assert len(llm.generate(PROMPTS[:1], greedy("a"))[0].token_ids) == 10


def test_fused_projections_are_changed_as_a_whole(tmp_path: Path, base: Path, byte_model: Path, paths: dict[str, str]) -> None:
    make(tmp_path, byte_model, "phi3")
    with pytest.raises(UnsupportedModel, match="fused projections, of which adapters cannot change gate_proj alone"):
        LLM(tmp_path, enable_lora=True, lora_modules=paths, **ROOMY)
    for module in ("qkv_proj", "gate_up_proj"):
        path = adapters.write(tmp_path / module, adapters.matrices(base, modules=(module,)))
        with pytest.raises(UnsupportedModel, match=f"changes {module} of layer 0 of LlamaForCausalLM, which has none of this name"):
            LLM(base, enable_lora=True, lora_modules={"a": str(path)}, **ROOMY)
