"""Runs a model on a CPU with the Rust kernels. Without torch."""

from __future__ import annotations

from pathlib import Path

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.models.encoder import decoder_pooling
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.executor import ModelExecutor
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.precision import Precision, decide
from chairlift.runner.memory.sizing import HostBudget, Size
from chairlift.runner.runner import ModelRunner
from chairlift.runner.sampling.host import HostSampler
from chairlift.runner.warm_up import profile, warm_up
from chairlift.runner.weights import open_weights


class RustBackend:
    """The `Backend` of a CPU, for the architectures of `models.config`."""

    def __init__(self, config: EngineConfig, directory: Path, whole: ModelShape, sharing: int) -> None:
        """Raises InvalidSetting for an instruction set that the processor lacks."""
        assert isinstance(whole, ModelConfig)
        self._isa = choose_isa(config.cpu_isa)
        self._config, self.model = config, whole
        self._weights = open_weights(config, directory, 1 - whole.family.norm_offset, whole.scheme)
        self._pooling = "last" if whole.classifier else decoder_pooling(directory)
        self._bf16, self._bytes = _core.bf16_products(config.cpu_isa), _core.byte_products(config.cpu_isa)
        self.budget = HostBudget(sharing, tiles=self._bf16 == "tiles")
        why = asked("--runner") if config.runner == "rust" else "the CPU kernels support it"
        self.code = Decision("code", f"{whole.architecture}, in Rust", why)

    def decide(self, available: int) -> Precision:
        """Chooses the dtypes."""
        return decide(self._config, self.model, available, self._weights.sizes(), bf16=self._bf16, byte_products=self._bytes)

    def load(self, precision: Precision) -> ModelExecutor:
        """Packs the weights."""
        return CpuExecutor.load(self._config, self._weights, self.model, precision)

    def make_runner(self, executor: ModelExecutor, size: Size) -> ModelRunner:
        """Makes a runner."""
        seqs, block_size = size.max_num_seqs, self._config.block_size
        layout = Layout(size.max_num_batched_tokens, seqs, -(-size.max_model_len // block_size), state_slots=size.state_slots)
        buffers = StepBuffers(layout)
        assert isinstance(executor, CpuExecutor)
        sampler = HostSampler(seqs, executor.decoder.pool)
        runner = ModelRunner(executor, self.model, size, block_size, [buffers], sampler, self._pooling)
        runner.generates = not self.model.headless
        return runner

    def profile(self, runner: ModelRunner) -> None:
        """Runs the largest step."""
        profile(runner)

    def warm_up(self, runner: ModelRunner) -> tuple[Decision, ...]:
        """Runs the first steps."""
        warm_up(runner)
        return (self._isa,)


def choose_isa(name: str) -> Decision:
    """Chooses the instruction set of the CPU kernels. Raises InvalidSetting for one that this process cannot use."""
    usable, tiles = _core.instruction_sets(), _core.matrix_tiles()
    refused = "; the operating system refuses AMX to this process" if tiles == "refused" else ""
    if name not in ("auto", *usable):
        raise InvalidSetting(f"--cpu-isa {name}: this processor has {', '.join(usable)}{refused}")
    if name != "auto":
        return Decision("instruction set", name, asked("--cpu-isa"))
    return Decision("instruction set", usable[0], f"the processor's fastest{refused}")
