"""All kernels are compiled at the start. Tensors say that they are on a GPU, and Triton dispatches to kernels that do nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from quantised_checkpoints import quantise_checkpoint

from chairlift import LLM, SamplingParams
from chairlift.engine import engine as engine_module
from chairlift.errors import ChairliftError
from chairlift.runner.build import build_runner
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.torch_runner import TorchRunner

triton = pytest.importorskip("triton", reason="Triton is not made for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from chairlift.kernels import launch_settings, paged_decode, paged_prefill  # noqa: E402

pytestmark = pytest.mark.slow

TOKENS = ("out_ptr", "tokens_ptr", "last_token_ptr", "lines_ptr")
"""Arguments whose numbers the host uses."""
SPLIT = 768  # Longer contexts are split.


class NoDevice:
    """A driver without a device. Triton remembers kernels by device: no other test finds those of this one."""

    def get_current_device(self) -> NoDevice:
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Nothing:
    """A compiled kernel that writes zeros where the host looks, and nothing else."""

    function = packed_metadata = None

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def launch_metadata(self, *given: object) -> None:
        return None

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def run(self, *given: object) -> None:
        # After the grid come the stream, the function, metadata and two hooks.
        self._launch(*given[9:])

    def _launch(self, *arguments: object) -> None:
        for name, argument in zip(self._names, arguments, strict=True):
            if name in TOKENS and isinstance(argument, torch.Tensor):
                argument.zero_()


@dataclass
class Compiler:
    """The kernels that Triton was asked to compile, and one that needs more than the device has."""

    names: list[str] = field(default_factory=list)
    too_large: str | None = None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()

    def compile_nothing(self: Any, key: object, signature: object, device: object, *given: object) -> Nothing:
        found.names.append(self.fn.__name__)
        if self.fn.__name__ == found.too_large:
            raise OutOfResources(139264, 101376, "shared memory")
        made = self.device_caches[device][0][key] = Nothing(self.arg_names)
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", NoDevice())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    # A copy to a device is in memory of its own.
    monkeypatch.setattr(CopyStream, "send", lambda stream, array: torch.from_numpy(array.copy()))
    return found


class Backend(TorchBackend):
    def make_runner(self, *given: Any) -> TorchRunner:
        runner = super().make_runner(*given)
        runner.compiles_kernels = True
        return runner


def load(*given: Any) -> TorchExecutor:
    model = TorchExecutor.load(*given)
    model.in_kernels = True
    return model


def requests(vocabulary: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds and lengths."""
    random = np.random.default_rng(0)
    prompts, params = [], []
    for i in range(24):
        length = int(random.integers(SPLIT - 20, SPLIT + 20) if i % 6 == 0 else random.integers(1, 40))
        prompts.append(random.integers(0, vocabulary, length).tolist())
        way = SamplingParams(
            max_tokens=int(random.integers(2, 9)),
            ignore_eos=True,
            temperature=float(random.choice([0.0, 0.8])),
            top_k=int(random.choice([0, 7])),
            top_p=float(random.choice([1.0, 0.8])),
            presence_penalty=float(random.choice([0.0, 1.5])),
            logprobs=random.choice([None, 1, 2, 5]),
            prompt_logprobs=random.choice([None, 3]),
        )
        params.append(way)
    return prompts, params


def start(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    backend = partial(Backend, load=load, overlaps=True)
    monkeypatch.setattr(engine_module, "_build_runner", lambda config, path, eos, on_phase: build_runner(config, path, on_phase, backend))
    sizes = {"num_kv_blocks": 300, "block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 200, "max_model_len": SPLIT + 60}
    return LLM(str(directory), device="cpu", **sizes, **settings)


@pytest.mark.parametrize("form", [None, "states", "experts", "gptq, desc_act", "fp8 in blocks"])
def test_nothing_is_compiled_while_requests_run(form, compiler, tmp_path: Path, byte_model: Path, monkeypatch):
    for name, value in {"vocab_size": 8201, "max_position_embeddings": 2 * SPLIT}.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, value)
    directory = tmp_path / "plain"
    directory.mkdir()
    tiny_models.write({None: "gemma3", "states": "qwen3.5", "experts": "gpt-oss"}.get(form, "llama"), directory)
    if form not in (None, "states", "experts"):
        quantise_checkpoint(directory, tmp_path / "packed", form)
        directory = tmp_path / "packed"
    shutil.copy(byte_model / "tokenizer.json", directory)
    # Products of experts have kernels for 16 bits alone.
    llm = start(directory, monkeypatch, **({"dtype": "bfloat16"} if form == "experts" else {}))
    assert "_draw_kernel" in compiler.names
    assert ("_expert_linear_kernel" in compiler.names) == (form == "experts")
    assert ("_advance_heads_kernel" in compiler.names) == (form == "states")
    at_start = len(compiler.names)
    for output in llm.generate(*requests(8201), progress=False):
        assert output.token_ids
    assert compiler.names[at_start:] == []


OUT = f"OutOfResources: {OutOfResources(139264, 101376, 'shared memory')}"
HEADS = "HeadsTooLarge: attention with 8 dimensions a head in 32 bits needs 3 KiB of shared memory, and this device has 1"


@pytest.mark.parametrize(("too_large", "why"), [("_act_mul_kernel", OUT), ("_part_kernel", OUT), (None, HEADS)])
def test_a_kernel_that_cannot_run_on_the_device_ends_the_start_in_one_line(too_large, why, compiler, tmp_path, byte_model, monkeypatch):
    monkeypatch.setitem(tiny_models.SHAPE, "max_position_embeddings", 2 * SPLIT)
    tiny_models.write("llama", tmp_path)
    shutil.copy(byte_model / "tokenizer.json", tmp_path)
    compiler.too_large = too_large
    if too_large is None:
        small = launch_settings.INTERPRETER._replace(shared_memory=1024)
        for module in (launch_settings, paged_decode, paged_prefill):
            monkeypatch.setattr(module, "device_limits", lambda device: small)
    with pytest.raises(ChairliftError) as raised:
        start(tmp_path, monkeypatch)
    assert str(raised.value) == (
        f"this device cannot run the model's kernels ({why}): use --device cpu, and report the output of `chairlift doctor`"
    )
