import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runner_steps import GREEDY, Driver
from tiny_models import FAMILIES, IN_TORCH, write

from chairlift import _core
from chairlift.architectures import ARCHITECTURES
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, UnsupportedModel
from chairlift.outputs import TokenLogprobs
from chairlift.runner.build import build_runner
from chairlift.runner.executor import time_swap
from chairlift.runner.runner import ModelRunner
from chairlift.runner.rust_backend import RustBackend, choose_isa
from chairlift.runner.sampling.logprobs import PromptLogprobs
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.weights import DummyWeights
from chairlift.sampling import SamplingParams

LENGTHS = (37, 1, 18, 70)


@pytest.fixture(params=[RustBackend, TorchBackend], ids=["cpu", "torch"])
def runner_for(request):
    """Makes a runner, with the model in Rust and then in torch."""

    def make(directory, **settings) -> ModelRunner:
        small = {"num_kv_blocks": 80, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        return build_runner(EngineConfig(**{"device": "cpu"} | small | settings), directory, make_backend=request.param)

    return make


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 199, length).tolist()


@pytest.mark.parametrize(
    ("name", "runner_for"),
    [*((name, RustBackend) for name in FAMILIES), *((name, TorchBackend) for name in IN_TORCH)],
    ids=[*(f"{name}-cpu" for name in FAMILIES), *(f"{name}-torch" for name in IN_TORCH)],
    indirect=["runner_for"],
)
@pytest.mark.slow
def test_ragged_steps_give_the_logits_of_transformers(name, tmp_path, runner_for):
    reference = write(name, tmp_path)
    driver = Driver(runner_for(tmp_path))
    a, b, c, d = (driver.add_request(row, prompt(length)) for row, length in zip((3, 0, 5, 2), LENGTHS, strict=True))
    # Whole prompts, chunks that start and end inside blocks, and decodes, mixed, in changing order.
    driver.step([(a, 20), (b, 1), (d, 30)])
    driver.step([(d, 11), (b, 1), (c, 18), (a, 17)])
    driver.step([(a, 1), (d, 29), (c, 1)])
    for _ in range(4):
        driver.step([(c, 1), (a, 1), (b, 1), (d, 1)])
    for riding, length in zip((a, b, c, d), LENGTHS, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([riding.tokens[:-1]])).logits[0, length - 1 :]
        found = torch.stack(riding.logits)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert riding.tokens[length:] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("runner_for", [RustBackend], indirect=True, ids=["cpu"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gemma4", "granite4", "phi4-mini", "qwen2-moe", "gpt-oss", "deepseek-v3"]
)
@pytest.mark.slow
def test_a_sequence_has_the_same_bits_alone_and_in_company(name, tmp_path, runner_for):
    write(name, tmp_path)
    driver = Driver(runner_for(tmp_path))

    def ride(company: list[int]) -> list[torch.Tensor]:
        # Every other of them has the log-probabilities of its prompt told, and those of its answer.
        params = SamplingParams(temperature=0.0, logprobs=3)
        others = [
            driver.add_request(row, ids, params, prompt=PromptLogprobs(row, np.array(ids, dtype=np.int32), 3) if row % 2 else None)
            for row, ids in enumerate((prompt(length, 1) for length in company), 1)
        ]
        one = driver.add_request(0, prompt(21))
        for other in others[1:]:
            driver.step([(other, len(other.tokens))])
        driver.step([(others[0], len(others[0].tokens)), (one, 21), *((other, 1) for other in others[1:])] if others else [(one, 21)])
        for _ in range(6):
            driver.step([*((other, 1) for other in others), (one, 1)])
        for riding in (one, *others):
            driver.remove_request(riding)
        return one.logits

    alone = ride([])
    for company in ([5], [9, 30], [30, 7, 40, 1, 12, 33, 2]):
        assert all(map(torch.equal, ride(company), alone))


@pytest.mark.parametrize("runner_for", [RustBackend], indirect=True, ids=["cpu"])
def test_sequences_that_share_blocks_have_the_bits_that_they_have_alone(tmp_path, runner_for):
    write("llama", tmp_path)
    driver, shared, own = Driver(runner_for(tmp_path, threads=1)), prompt(72, 2), [prompt(5 + i, 3) for i in range(6)]

    def ride(company: range) -> list[list[torch.Tensor]]:
        # The first 72 tokens are in the same 9 blocks, so decodes share one tile of 64 keys.
        first = driver.add_request(0, shared + own[0])
        driver.step([(first, 50)])
        driver.step([(first, 22)])
        ridings = [first] + [driver.add_request(i, shared + own[i]) for i in company]
        for riding in ridings[1:]:
            riding.blocks, riding.computed = list(first.blocks[:9]), 72
        driver.step([(riding, len(riding.tokens) - 72) for riding in ridings])
        for _ in range(4):
            driver.step([(riding, 1) for riding in ridings])
        driver.free += first.blocks[:9]
        for riding in ridings:
            driver.free += riding.blocks[9:]
        return [riding.logits for riding in ridings]

    together = ride(range(1, 6))
    for i in range(1, 6):
        assert all(map(torch.equal, ride(range(i, i + 1))[1], together[i]))
    assert all(map(torch.equal, ride(range(0))[0], together[0]))


@pytest.mark.parametrize("runner_for", [RustBackend], indirect=True, ids=["cpu"])
def test_every_instruction_set_computes_the_same_tokens(tmp_path, runner_for):
    write("llama", tmp_path)
    answers, logits = {}, {}
    for isa in ("auto", *_core.instruction_sets()):
        driver = Driver(runner_for(tmp_path, cpu_isa=isa))
        riding = driver.add_request(0, prompt(37))
        for count in (30, 7, 1, 1, 1):
            driver.step([(riding, count)])
        answers[isa], logits[isa] = riding.tokens, torch.stack(riding.logits)
    fastest = _core.instruction_sets()[0]
    assert torch.equal(logits["auto"], logits[fastest])
    assert len(set(map(tuple, answers.values()))) == 1
    # Registers of other widths sum in another order.
    assert not torch.equal(logits[fastest], logits["portable"])
    assert (logits[fastest] - logits["portable"]).abs().max() <= 1e-5 * logits[fastest].abs().max()


def test_an_instruction_set_that_the_processor_lacks_is_refused(tmp_path, monkeypatch):
    write("llama", tmp_path)
    monkeypatch.setattr(_core, "instruction_sets", lambda: ["avx2", "portable"])
    with pytest.raises(InvalidSetting, match=r"^--cpu-isa avx512: this processor has avx2, portable$"):
        build_runner(EngineConfig(device="cpu", cpu_isa="avx512"), tmp_path)


@pytest.mark.parametrize(
    ("sets", "tiles", "name", "value", "reason"),
    [
        (["avx2", "portable"], "absent", "auto", "avx2", "the processor's fastest"),
        (["amx", "vnni"], "usable", "auto", "amx", "the processor's fastest"),
        (["amx", "vnni"], "usable", "vnni", "vnni", "--cpu-isa says so"),
        (["avx512"], "refused", "auto", "avx512", "the operating system refuses AMX to this process"),
    ],
)
def test_matrix_tiles_are_used_where_the_process_may_use_them(monkeypatch, sets, tiles, name, value, reason):
    monkeypatch.setattr(_core, "instruction_sets", lambda: sets)
    monkeypatch.setattr(_core, "matrix_tiles", lambda: tiles)
    decision = choose_isa(name)
    assert (decision.what, decision.value) == ("instruction set", value)
    assert reason in decision.reason


def test_tiles_that_the_operating_system_refuses_are_not_used(monkeypatch):
    monkeypatch.setattr(_core, "instruction_sets", lambda: ["avx512", "portable"])
    monkeypatch.setattr(_core, "matrix_tiles", lambda: "refused")
    with pytest.raises(
        InvalidSetting, match=r"^--cpu-isa amx: this processor has avx512, portable; the operating system refuses AMX to this"
    ):
        choose_isa("amx")


@pytest.mark.slow
def test_each_token_of_a_prompt_is_told_once_however_it_was_cut(tmp_path, monkeypatch, runner_for):
    monkeypatch.setattr("chairlift.runner.runner.CHUNK_LOGITS", 3 * 199)  # three positions at a time
    reference = write("llama", tmp_path)
    driver = Driver(runner_for(tmp_path))
    tokens, short = prompt(21), prompt(9)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    other = driver.add_request(5, prompt(4))
    # The first cut in all ways; a second takes it up where the first lost its row, having computed a part of it again.
    for cuts in ([21], [1, 20], [20, 1], [5] * 4 + [1], [1] * 21, [8, "again", 16, 5]):
        reported = PromptLogprobs(77, np.array(tokens, dtype=np.int32), 2)
        riding, lines = driver.add_request(0, tokens, prompt=reported), []
        neighbour = driver.add_request(1, short, prompt=PromptLogprobs(78, np.array(short, dtype=np.int32), 5))
        beside: list[tuple] = [(neighbour, 9)]
        for cut in cuts:
            if cut == "again":
                driver.remove_request(riding)
                riding = driver.add_request(3, tokens, prompt=reported)
                continue
            driver.step([*beside, (riding, cut)])
            found = dict(driver.sampled.prompts)
            assert len(found) == len(driver.sampled.prompts)
            assert (78 in found) == bool(beside)
            lines += TokenLogprobs.read(found.get(77, b""), 2)
            beside = []
        assert reported.complete
        assert [line.token for line in lines] == tokens[1:]
        for position, line in enumerate(lines):
            row = expected[position]
            assert line.logprob == pytest.approx(row[line.token].item(), abs=1e-4)
            assert line.rank == 1 + int((row > row[line.token]).sum())
            assert [token for token, _ in line.top] == row.topk(2).indices.tolist()
        driver.step([(other, 1 if other.computed else 4), (riding, 1)])
        assert driver.sampled.prompts == []
        for one in (riding, neighbour):
            driver.remove_request(one)


def test_timing_a_swap_changes_nothing(tmp_path, runner_for):
    write("llama", tmp_path)
    logits = []
    for timed in (False, True):
        driver = Driver(runner_for(tmp_path, swap_space=2**20))
        one = driver.add_request(0, prompt(30))
        driver.step([(one, 30)])
        if timed:
            assert time_swap(driver.runner.model, 8) >= 1
        driver.step([(one, 1)])
        logits.append(one.logits[-1])
    assert torch.equal(*logits)


@pytest.mark.parametrize("runner_for", [RustBackend], ids=["cpu"], indirect=True)
def test_a_step_makes_progress(tmp_path, runner_for):
    write("qwen3", tmp_path)
    driver = Driver(runner_for(tmp_path))
    driver.step([(driver.add_request(0, prompt(3)), 3)])
    assert driver.runner.progress > 0


def test_blocks_are_copied_before_the_step(tmp_path, runner_for):
    write("llama", tmp_path)
    driver = Driver(runner_for(tmp_path))
    one = driver.add_request(0, prompt(13))
    driver.step([(one, 13)])
    fork = driver.add_request(1, one.tokens)
    fork.computed, fork.blocks = 13, [one.blocks[0], driver.free.pop()]
    driver.step([(fork, 1)], copies=[(one.blocks[1], fork.blocks[1])])
    driver.step([(one, 1)])
    assert torch.equal(fork.logits[0], one.logits[1])


def test_a_sequence_goes_on_bit_for_bit_after_its_blocks_were_swapped(tmp_path, runner_for):
    write("llama", tmp_path)
    runner = runner_for(tmp_path, swap_space=2**20)
    assert runner.swap_ns_per_block > 0
    driver = Driver(runner)
    one, twin, other = driver.add_request(0, prompt(21)), driver.add_request(1, prompt(21)), driver.add_request(2, prompt(21, 1))
    driver.step([(one, 21), (twin, 21), (other, 21)])
    places = [5, 0, runner.host_blocks - 1]
    runner.swap(list(zip(one.blocks, places, strict=True)), [])
    # The blocks that it had are somebody else's now.
    runner.model.copy(np.array(list(zip(other.blocks, one.blocks, strict=True)), dtype=np.int32))
    one.blocks = [driver.free.pop() for _ in places]
    runner.swap([], list(zip(places, one.blocks, strict=True)))
    for _ in range(4):
        driver.step([(one, 1), (twin, 1)])
    assert all(map(torch.equal, one.logits, twin.logits))


def test_a_row_with_logits_that_are_not_finite_fails_alone(tmp_path, runner_for):
    from safetensors.torch import load_file, save_file

    write("llama-biased", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    driver = Driver(runner_for(tmp_path))
    good, bad = driver.add_request(0, [3, 4]), driver.add_request(1, [5, 6])
    alone = Driver(driver.runner, seed=1).step([(driver.add_request(2, [3, 4]), 2)])
    assert driver.step([(bad, 2), (good, 2)]) == [-1, *alone]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_read_as_fp32_and_from_several_files(dtype, tmp_path, runner_for):
    reference = write("qwen2-sliding", tmp_path, dtype, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    driver = Driver(runner_for(tmp_path))
    riding = driver.add_request(0, prompt(30))
    driver.step([(riding, 30)])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt(30)])).logits[0, -1]
    assert (riding.logits[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_missing_misshapen_and_unexpected_tensors_are_named(tmp_path, runner_for):
    from safetensors.torch import load_file, save_file

    write("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = "model.layers.1.input_layernorm.weight"
    for change, message in (
        ({norm: None}, f"no tensor {norm}"),
        ({norm: torch.ones(3)}, rf"{norm} is \[3\] where config.json asks for \[48\]"),
        ({"model.layers.9.extra": torch.ones(1)}, "model.layers.9.extra"),
    ):
        save_file({name: tensor for name, tensor in (tensors | change).items() if tensor is not None}, path)
        with pytest.raises(UnsupportedModel, match=message):
            runner_for(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match="download complete"):
        runner_for(tmp_path)


def test_torch_refuses_what_only_the_kernels_for_cpus_compute(tmp_path):
    write("gemma4", tmp_path)
    with pytest.raises(UnsupportedModel, match="only the CPU kernels support Gemma4ForCausalLM"):
        build_runner(EngineConfig(device="cpu", num_kv_blocks=80), tmp_path, make_backend=TorchBackend)


@pytest.mark.slow
def test_dummy_weights_follow_the_seed_and_give_logits_that_are_not_flat(tmp_path, runner_for):
    write("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def logits(seed: int) -> torch.Tensor:
        driver = Driver(runner_for(tmp_path, load_format="dummy", seed=seed))
        riding = driver.add_request(0, prompt(9))
        driver.step([(riding, 9)])
        return riding.logits[0]

    one = logits(1)
    assert torch.equal(one, logits(1))
    assert not torch.equal(one, logits(2))
    assert 1 < one.std() < 20


def test_all_norms_of_dummy_weights_are_neutral():
    names = {name for known in ARCHITECTURES.values() for name in dataclasses.astuple(known.norms) if name is not None}
    weights = DummyWeights(0, 0.5)
    assert {name for name in names if weights.take(f"{name}.weight", 1) != 0.5} == set()


def test_phases_are_told_and_the_buffers_are_left_clean_after_one_step(tmp_path, monkeypatch):
    write("llama", tmp_path)
    phases, steps, run = [], [], ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, *sizes: steps.append(sizes[0]) or run(self, *sizes))
    runner = build_runner(EngineConfig(num_kv_blocks=10, device="cpu"), tmp_path, lambda name, seconds: phases.append((name, seconds)))
    assert [name for name, _ in phases] == ["weights", "kv cache", "warm-up"]
    assert steps == [1]
    assert all(not array.any() for array in runner.buffers[0].arrays().values())
    assert runner.buffers[0].block_tables.shape == (64, 9)


@pytest.mark.slow
def test_seeded_draws_do_not_depend_on_company(tmp_path, runner_for):
    write("llama", tmp_path)
    driver = Driver(runner_for(tmp_path))
    params = SamplingParams(temperature=1.5, top_p=0.95)

    def ride(others: int) -> list[int]:
        one = driver.add_request(0, prompt(9), params, seed=42)
        rest = [driver.add_request(row, prompt(4, row), params if row % 2 else GREEDY, seed=row) for row in range(1, 1 + others)]
        driver.step([*((riding, 4) for riding in rest), (one, 9)])
        for _ in range(12):
            driver.step([(one, 1), *((riding, 1) for riding in rest)])
        for riding in (one, *rest):
            driver.remove_request(riding)
        return one.tokens

    assert ride(0) == ride(3) == ride(6)


def test_a_draw_is_for_the_place_that_its_token_takes(tmp_path, runner_for, monkeypatch):
    write("llama", tmp_path)
    driver, requested = Driver(runner_for(tmp_path)), []
    sampler = driver.runner.sampler.tokens
    choose = sampler._pool.choose  # noqa: SLF001

    def choosing(logits, *settings):
        requested.append((settings[-2].tolist(), settings[-1].tolist()))
        return choose(logits, *settings)

    monkeypatch.setattr(sampler, "_pool", SimpleNamespace(choose=choosing))
    a, b = (driver.add_request(row, prompt(length), SamplingParams(), seed=row) for row, length in ((4, 9), (1, 20)))
    assert driver.step([(b, 12)]) == []
    driver.step([(a, 9), (b, 8)])
    driver.step([(b, 1), (a, 1)])
    assert requested == [([], []), ([4, 1], [9, 20]), ([1, 4], [21, 10])]


def test_a_draw_on_the_device_is_for_the_same_rows_and_places(tmp_path):
    write("llama", tmp_path)
    small = {"num_kv_blocks": 80, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    driver = Driver(build_runner(EngineConfig(device="cpu", **small), tmp_path, make_backend=partial(TorchBackend, overlaps=False)))
    requested, sample = [], driver.runner.sampler.tokens.sample
    driver.runner.sampler.tokens.sample = lambda logits, rows, positions, tier: (
        requested.append((rows.tolist(), positions.tolist())) or sample(logits, rows, positions, tier)
    )
    a, b = driver.add_request(4, prompt(9)), driver.add_request(1, prompt(20))
    driver.step([(b, 12)])
    driver.step([(a, 9), (b, 8)])
    driver.step([(b, 1), (a, 1)])
    assert requested == [([], []), ([4, 1], [9, 20]), ([1, 4], [21, 10])]


def test_cuda_is_refused_where_there_is_none(tmp_path, runner_for):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    write("llama", tmp_path)
    with pytest.raises(InvalidSetting, match="--device cpu"):
        runner_for(tmp_path, device="cuda")


def test_an_old_device_is_refused_or_left_alone(tmp_path, runner_for, monkeypatch):
    monkeypatch.setattr("chairlift.runner.cuda.has_cuda_driver", lambda: True)
    monkeypatch.setattr("chairlift.runner.build.cuda_devices", lambda: 1)
    monkeypatch.setattr("chairlift.runner.build.compute_capability", lambda: (7, 5))
    write("llama", tmp_path)
    why = "the device has compute capability 7.5, and the kernels need 8.0"
    with pytest.raises(InvalidSetting, match=rf"--device cuda: {why} \(use --device cpu for the CPU\)"):
        runner_for(tmp_path, device="cuda")
    runner = runner_for(tmp_path, device="auto")
    assert ("device", "cpu", why) in runner.decisions


def test_threads_are_the_physical_cores_unless_somebody_says_otherwise(tmp_path, monkeypatch):
    write("llama", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("chairlift.runner.build.usable_cores", lambda: 2)
    before = torch.get_num_threads()

    def threads(**settings) -> tuple[str, str]:
        requested = []

        def load(config, *rest):
            requested.append(config.threads)
            return TorchExecutor.load(config, *rest)

        config = EngineConfig(num_kv_blocks=10, block_size=8, **settings)
        runner = build_runner(config, tmp_path, make_backend=partial(TorchBackend, load=load))
        [decision] = [decision for decision in runner.decisions if decision.what == "threads"]
        assert requested == [torch.get_num_threads()] == [int(decision.value)]
        return decision.value, decision.reason

    try:
        assert threads() == ("2", "physical cores that this process may use")
        assert threads(threads=3) == ("3", "--threads says so")
        for limit, expected in (("1", "1"), ("5", "2"), ("2,1", "2")):
            monkeypatch.setenv("OMP_NUM_THREADS", limit)
            assert threads()[0] == expected
        assert threads(threads=3)[0] == "3"
    finally:
        torch.set_num_threads(before)


def test_what_was_chosen_is_told_with_reasons(tmp_path, runner_for):
    write("llama", tmp_path)
    decisions = runner_for(tmp_path, device="cpu").decisions
    assert [decision.what for decision in decisions] == [
        "code",
        "device",
        "threads",
        "weights",
        "arithmetic",
        "KV dtype",
        "context length",
        "KV cache",
        "sequences a step",
        "tokens a step",
        *(["instruction set"] if "in Rust" in decisions[0].value else []),
    ]
    assert decisions[1][1:] == ("cpu", "--device says so")
    assert all(decision.value and decision.reason for decision in decisions)


def test_steps_are_made_for_the_memory_that_there_is(tmp_path, monkeypatch):
    write("llama", tmp_path)
    config = EngineConfig(device="cpu")
    monkeypatch.setattr("chairlift.runner.memory.sizing.available_memory", lambda: 2**20)
    runner = build_runner(config, tmp_path, make_backend=TorchBackend)
    assert runner.max_num_seqs <= runner.max_num_batched_tokens == len(runner.buffers[0].input_ids) < 256
    assert runner.max_num_seqs == len(runner.buffers[0].batch_slots) == len(runner.sampler.detailed)
    assert runner.num_kv_blocks * 16 * 3 * 2 * 2 * 8 * 4 < 2**20
