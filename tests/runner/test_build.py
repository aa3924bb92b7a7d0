"""Which code computes a model."""

import json
from pathlib import Path

import pytest
import tiny_models
from tiny_transformers import configure

from chairlift.checkpoint.cache import LINK
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import load_shape
from chairlift.models.transformers_config import TransformersConfig
from chairlift.runner.build import build_runner, choose_backend
from chairlift.runner.memory.device_memory import HostMemory
from chairlift.runner.rust_backend import RustBackend
from chairlift.runner.torch_backend import TorchBackend


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_models.write("llama", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, RustBackend),
        ({"runner": "rust"}, RustBackend),
        ({"runner": "torch"}, TorchBackend),
        ({"tensor_parallel_size": 2}, TorchBackend),
        ({"device": "cuda"}, TorchBackend),
    ],
)
def test_a_cpu_uses_the_rust_kernels_unless_the_settings_need_torch(directory, settings, backend):
    assert choose_backend(EngineConfig(**{"device": "cpu"} | settings), load_shape(directory)) is backend


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"tensor_parallel_size": 2}])
def test_the_rust_kernels_are_refused_where_they_cannot_run(directory, settings):
    refused = r"^--runner rust computes the models of docs/models\.md in one process on a CPU: use --device cpu, or --runner torch$"
    with pytest.raises(InvalidSetting, match=refused):
        choose_backend(EngineConfig(**{"device": "cpu", "runner": "rust"} | settings), load_shape(directory))


@pytest.mark.parametrize(
    ("settings", "backend"), [({}, RustBackend), ({"runner": "torch"}, TorchBackend), ({"device": "cuda"}, TorchBackend)]
)
def test_adapters_are_allowed_in_rust_and_in_torch(directory, settings, backend):
    assert choose_backend(EngineConfig(**{"device": "cpu", "enable_lora": True} | settings), load_shape(directory)) is backend


def test_adapters_are_refused_in_several_processes_and_in_transformers_code(directory):
    with pytest.raises(InvalidSetting, match=r"^--enable-lora: adapters are computed in one process, not with --tensor-parallel-size 2$"):
        choose_backend(EngineConfig(device="cpu", enable_lora=True, tensor_parallel_size=2), load_shape(directory))
    other = TransformersConfig.of(configure("olmo2"), "a test")
    refused = r"^--enable-lora: transformers' code computes Olmo2ForCausalLM; adapters need a model of docs/models\.md$"
    with pytest.raises(InvalidSetting, match=refused):
        choose_backend(EngineConfig(device="cpu", enable_lora=True), other)


@pytest.mark.parametrize(("runner", "code"), [("rust", "LlamaForCausalLM, in Rust"), ("torch", "LlamaForCausalLM, in torch")])
def test_the_start_table_says_that_the_flag_chose_the_code(directory, runner, code, caplog):
    raw = json.loads((directory / "config.json").read_text()) | {"depth_of_thought": 3}
    (directory / "config.json").write_text(json.dumps(raw))
    made = build_runner(EngineConfig(device="cpu", runner=runner, num_kv_blocks=10), directory)
    assert tuple(made.decisions[0]) == ("code", code, "--runner says so")
    unused = f"{directory / 'config.json'} has entries that are not known here and not used: depth_of_thought"
    assert [message for message in caplog.messages if "entries" in message] == [unused]


def test_a_cuda_device_computes_a_gguf_file_in_16_bits(directory):
    model = load_shape(directory)
    assert model.dtype == "float32"
    config, memory = EngineConfig(device="cuda"), HostMemory()
    found = {}
    for name in ("safetensors", "gguf"):
        if name == "gguf":
            (directory / LINK).symlink_to(directory / "model.gguf")
        found[name] = TorchBackend(config, directory, model, 1, memory=memory).decide(10**12).compute
    assert found == {"safetensors": "float32", "gguf": "bfloat16"}


def test_a_context_length_for_all_models_is_not_used_by_one_that_was_made_for_less(directory):
    positions = load_shape(directory).max_position_embeddings
    settings = {"device": "cpu", "num_kv_blocks": 1000, "max_model_len": positions + 1}
    with pytest.raises(InvalidSetting, match=f"made for {positions} positions"):
        build_runner(EngineConfig(**settings), directory)
    assert build_runner(EngineConfig(**settings, shared_max_model_len=True), directory).max_model_len == positions
