"""What the CPU's kernels make of a few tokens."""

from pathlib import Path

import numpy as np

from chairlift import _core
from chairlift.checkpoint.adapter import AdapterFiles
from chairlift.config import EngineConfig
from chairlift.models.config import ModelConfig
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import open_weights

EXACT = Precision("blocks", "none", "float32")
IN_FP32 = EngineConfig(device="cpu", threads=2, cpu_isa=next(isa for isa in _core.instruction_sets() if isa not in ("amx", "vnni")))
"""With the fastest instruction set that sums products of blocks in fp32."""


def logits(
    directory: Path,
    precision: Precision = EXACT,
    config: EngineConfig | None = None,
    adapter: AdapterFiles | None = None,
    shape: ModelConfig | None = None,
) -> np.ndarray:
    """What the CPU's kernels make of a few tokens, with an adapter if one is given. The shape is that of config.json by default."""
    shape = shape or ModelConfig.load(directory)
    config = config or EngineConfig(device="cpu", threads=2)
    model = CpuExecutor.load(config, open_weights(config, directory), shape, precision)
    model.allocate(2, 16, 0)
    ids = np.arange(11, dtype=np.int32) * 7 % 300
    at = np.arange(11, dtype=np.int32)
    states = model.decoder.allocate_states(1)
    number = None if adapter is None else model.adapters.add(model.adapters.pack(adapter))
    model.decoder.forward(
        model.cache,
        input_ids=ids,
        positions=at,
        slot_mapping=16 + at,
        query_starts=np.array([0, 11], np.int32),
        context_lens=np.array([11], np.int32),
        batch_slots=np.zeros(1, np.int32),
        block_tables=np.array([[1]], np.int32),
        adapters=None if number is None else np.array([number], np.int32),
        states=states,
        state_slots=None if states is None else np.zeros(1, np.int32),
    )
    return model.logits(at).copy()
