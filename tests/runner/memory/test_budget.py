"""What a device's memory is shared out to, on a device that only says how much of it there is."""

import json
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from model_sizes import GIB, LARGE_SHAPE, MIB

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, OutOfMemory
from chairlift.models.config import ModelConfig
from chairlift.models.latent import Latent
from chairlift.models.shape import ModelShape
from chairlift.runner.build import build_runner
from chairlift.runner.memory.budget import DeviceBudget, graph_bytes
from chairlift.runner.memory.decision import gib
from chairlift.runner.memory.device_memory import Memory, is_out_of_memory, raise_out_of_memory
from chairlift.runner.memory.precision import decide, torch_weight_bytes
from chairlift.runner.memory.sizing import StepSize, block_bytes
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor

RAW = LARGE_SHAPE | {"tie_word_embeddings": False, "dtype": "bfloat16"}
MODEL = ModelConfig.parse(RAW)
CUDA = EngineConfig(device="cuda")
PRECISION = decide(CUDA, MODEL, 0)


class Theirs(ModelShape):
    """The same model without code of ours."""

    kv_specs, num_weights = MODEL.kv_specs, MODEL.num_weights


@dataclass
class Given:
    """The memory of a device where `others` is taken before, and what tensors take is as a test says."""

    total: int = 80 * GIB
    others: int = 0
    tensors: int = 0
    peak: int = 0
    trims: int = 0
    seen: list[str] = field(default_factory=list)

    def read(self) -> Memory:
        return Memory(self.total, self.total - self.others - self.tensors, self.tensors, self.tensors, self.peak)

    def watch(self) -> None:
        self.peak = self.tensors

    def trim(self) -> None:
        self.trims += 1


def fitted(memory: Given, weights: int = 16 * GIB, step: int = 2 * GIB, own: int = 512 * MIB, **settings: object):
    """Sizes for a model whose weights and steps take so much, and `own` bytes beside torch's allocator."""
    config = EngineConfig(device="cuda", **settings)
    budget = DeviceBudget(memory, config.gpu_memory_utilization)
    memory.tensors += weights
    memory.others += own

    def run(size: StepSize) -> None:
        memory.peak = memory.tensors + step

    return budget, budget.fit(config, MODEL, PRECISION, run)


def taken(size, weights: int = 16 * GIB, step: int = 2 * GIB, own: int = 512 * MIB) -> int:
    graphs = graph_bytes(MODEL, PRECISION, size.max_num_seqs, MODEL.max_position_embeddings)
    return weights + step + own + graphs + size.num_blocks * block_bytes(MODEL, 16, "bfloat16")


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_cache_gets_what_weights_steps_and_graphs_leave_of_the_share(share):
    budget, size = fitted(Given(), gpu_memory_utilization=share)
    assert budget.limit == int(share * 80 * GIB)
    assert 0 <= budget.limit - taken(size) < 2 * block_bytes(MODEL, 16, "bfloat16")
    assert (size.max_num_seqs, size.max_num_batched_tokens) == (256, 2048)


def test_recurrent_states_are_not_reported_as_left(monkeypatch):
    mamba = {"mamba_n_heads": 16, "mamba_d_state": 64, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"], "num_local_experts": 0}
    names = {"architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 1000, "hidden_size": 512, "shared_intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 512}
    hybrid = ModelConfig.parse({**names, **heads, **mamba})
    monkeypatch.setitem(globals(), "MODEL", hybrid)
    budget, size = fitted(Given(), num_kv_blocks=100, max_num_seqs=64)
    states = size.state_slots * hybrid.state_bytes
    assert states > 64 << 20
    reported = {decision.what.strip(): decision.value for decision in size.decisions}
    assert reported["GPU memory left"] == gib(budget.limit - taken(size) - states)


def test_others_on_the_device_do_not_count_as_long_as_enough_is_free():
    assert fitted(Given(others=40 * GIB), gpu_memory_utilization=0.45)[1] == fitted(Given(), gpu_memory_utilization=0.45)[1]
    budget, size = fitted(Given(others=40 * GIB))
    assert budget.limit == 40 * GIB - 256 * MIB
    assert taken(size) <= budget.limit
    assert "40.0 GiB of the device's 80.0 GiB were free, less than --gpu-memory-utilization 0.9" in budget.source


def test_what_is_free_in_the_end_bounds_it_as_well():
    memory = Given()
    budget = DeviceBudget(memory, 0.9)
    memory.tensors += 16 * GIB
    memory.others += 60 * GIB  # somebody came meanwhile
    assert budget.left() == 4 * GIB - 256 * MIB


def test_the_decisions_have_the_numbers():
    _, size = fitted(Given())
    reported = {decision.what.strip(): f"{decision.value} ({decision.reason})" for decision in size.decisions}
    assert reported["GPU memory"] == "72.0 GiB (0.9 of the device's 80.0 GiB (--gpu-memory-utilization))"
    assert reported["weights"] == "16.0 GiB (measured)"
    assert reported["a step"] == "2.0 GiB (measured, of 2048 tokens and 256 samples)"
    graphs = re.fullmatch(r"([\d.]+) GiB \(reserved for up to 256 sequences\)", reported["graphs"])
    assert graphs is not None
    assert "what is left of 72.0 GiB, beside 16.0 GiB of weights, 2.0 GiB for a step" in reported["KV cache"]
    assert reported["GPU memory left"].startswith("0 MiB")
    _, size = fitted(Given(), num_kv_blocks=1000, max_model_len=1000, enforce_eager=True)
    reported = {decision.what.strip(): decision.value for decision in size.decisions}
    assert (reported["graphs"], reported["GPU memory left"]) == ("0 MiB", "51.5 GiB")


def test_graphs_get_what_decodes_compute_with():
    def size(model: ModelConfig = MODEL, form: str = "none", seqs: int = 256, longest: int = 131_072) -> int:
        return graph_bytes(model, replace(PRECISION, quantization=form), seqs, longest)

    results = 256 * 32 * 129 * 4  # of a split each, for sequences of 32 heads
    assert size(longest=1024) - size(longest=512) == results
    assert size() == size(longest=40_000) == size(longest=512) + 63 * results
    assert size(seqs=4096) == size(seqs=512)
    assert size(form="int8") - size() == 2 * 14_336 * 4096 * 2  # the widest matrix, as a whole
    assert size(form="fp8") == size()
    latent = Latent(heads=32, query_rank=None, rank=512, plain=128, rotated=64, value=128, adjacent=True, scale=1.0)
    latents = replace(MODEL, num_kv_heads=1, head_dim=latent.cached, latent=latent)
    assert size(latents, longest=1024) - size(latents, longest=512) >= 256 * 32 * (latent.rank + 1) * 4


def test_a_context_that_does_not_fit_is_shortened_or_refused():
    tight = {"weights": 60 * GIB, "step": 2 * GIB}
    _, size = fitted(Given(), **tight)
    assert size.max_model_len == (size.num_blocks - 1) * 16 < 131_072
    with pytest.raises(InvalidSetting, match=r"--max-model-len 131072 needs 8192 .* but 72.0 GiB, beside 60.0 GiB of weights"):
        fitted(Given(), **tight, max_model_len=131_072)
    with pytest.raises(InvalidSetting, match=r"two blocks of \d+ bytes are needed"):
        fitted(Given(), weights=72 * GIB)


def test_a_step_that_does_not_fit_is_refused():
    budget = DeviceBudget(Given(), 0.9)

    def run(size: StepSize) -> None:
        with raise_out_of_memory():  # as a runner's passes and samples do
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. If reserved but unallocated memory is large try")

    with pytest.raises(OutOfMemory, match=r"a step of 2048 tokens and 256 sequences .* lower --max-num-batched-tokens .* 3.00 GiB\.$"):
        budget.fit(CUDA, MODEL, PRECISION, run)


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded():
    def refused(total: int, **settings: object) -> str:
        config = EngineConfig(device="cuda", **settings)
        with pytest.raises(OutOfMemory) as raised:
            DeviceBudget(Given(total=total), 0.9).check(config, MODEL, decide(config, MODEL, 0))
        return str(raised.value)

    numbers = "the weights take 15.0 GiB in bfloat16, 8.5 GiB in fp8, 8.5 GiB in int8, and there are 10.8 GiB for them"
    said = refused(12 * GIB)
    assert said.startswith(numbers)
    assert said.endswith(
        "use --quantization fp8, or --quantization int8, or --tensor-parallel-size 2, with as many devices, or a smaller model"
    )
    assert "use --tensor-parallel-size 4, with" in refused(6 * GIB)
    assert "29.9 GiB in float32, 15.0 GiB in bfloat16" in refused(20 * GIB, dtype="float32")
    assert ": use --dtype bfloat16, or" in refused(20 * GIB, dtype="float32")
    assert "GiB in int8 on each device" in refused(2 * GIB, tensor_parallel_size=2)
    assert torch_weight_bytes(MODEL, "bfloat16") < 16.2 * GIB
    DeviceBudget(Given(total=17 * GIB), 0.9).check(CUDA, MODEL, decide(CUDA, MODEL, 0))
    # What transformers has of a checkpoint in fp8 is dequantised.
    given = {one.name: getattr(MODEL, one.name) for one in fields(ModelShape)}
    theirs = Theirs(**given | {"quantization": "fp8"})
    with pytest.raises(OutOfMemory, match=r"the weights take 15.0 GiB in bfloat16, and there are 10.8 GiB .* use a smaller model"):
        DeviceBudget(Given(total=12 * GIB), 0.9).check(CUDA, theirs, decide(CUDA, theirs, 0))
    gptq = replace(MODEL, quantization="gptq")
    DeviceBudget(Given(total=6 * GIB), 0.9).check(CUDA, gptq, decide(CUDA, gptq, 0))


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_other_errors_for_want_of_memory_are_known(text):
    assert is_out_of_memory(RuntimeError(text))
    with pytest.raises(OutOfMemory, match=r"^while it loaded: CUDA"), raise_out_of_memory("while it loaded: "):
        raise RuntimeError(text)


def test_errors_that_are_none_of_that_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), raise_out_of_memory():
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan")])
def test_shares_that_make_no_sense_are_refused(share):
    with pytest.raises(ValueError, match="--gpu-memory-utilization must be above 0 and at most 1"):
        EngineConfig(gpu_memory_utilization=share)


class Watched(Given):
    """Memory whose peak is what the largest step had at once, as if each of its tokens took a MiB."""

    def watch(self) -> None:
        self.peak = self.tensors + 40 * MIB


@pytest.mark.parametrize("overlaps", [None, True])
def test_a_runner_measures_its_largest_step_and_goes_on_with_a_fresh_cache(tmp_path: Path, overlaps):
    small = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(RAW | small | {"num_key_value_heads": 2, "max_position_embeddings": 64}))
    sizes: list[tuple[int, int, int]] = []

    class Model(TorchExecutor):
        def forward(self, buffers, num_tokens, num_seqs):
            sizes.append((num_tokens, num_seqs, self.cache.tensor.shape[0]))
            super().forward(buffers, num_tokens, num_seqs)

    memory = Watched(total=4 * GIB)
    config = EngineConfig(load_format="dummy", device="cpu", max_num_batched_tokens=150, max_num_seqs=9, block_size=8)
    runner = build_runner(config, tmp_path, make_backend=partial(TorchBackend, load=Model.load, overlaps=overlaps, memory=memory))
    assert sizes[:2] == [(150, 3, 1)] * 2  # two whole contexts and a piece, over one block
    assert {blocks for _, _, blocks in sizes[2:]} == {runner.num_kv_blocks}
    assert (runner.max_model_len, runner.max_num_batched_tokens, runner.max_num_seqs) == (64, 150, 9)
    reported = {decision.what.strip(): decision.value for decision in runner.decisions}
    assert (reported["GPU memory"], reported["a step"]) == ("3.6 GiB", "40 MiB")
    trims = memory.trims
    runner.wait()
    assert memory.trims == trims + 1
