"""Divides a device's memory among weights, a step, CUDA graphs and the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chairlift._core import max_splits
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, OutOfMemory
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.cuda_graphs import MAX_SIZE, sizes
from chairlift.runner.memory.decision import Decision, gib
from chairlift.runner.memory.device_memory import DeviceMemory, raise_out_of_memory
from chairlift.runner.memory.precision import BYTES, EIGHT_BITS, Precision, torch_weight_bytes
from chairlift.runner.memory.sizing import Room, Size, StepSize, block_bytes, fit_cache, fit_step, headroom, step_bytes
from chairlift.runner.tensor_parallel.split import part_of

GRAPH_BYTES = 8 << 20
"""Bytes that the driver needs for a graph of some hundred kernels: a safe estimate."""
OWN_BYTES = 2 << 30
"""Most bytes that this process allocates outside torch, for kernels and NCCL. More than that is another process's."""
SMALLER = {"bfloat16": "--dtype bfloat16", "fp8": "--quantization fp8", "int8": "--quantization int8"}
"""The flags that make weights smaller, by dtype or quantization."""


class DeviceBudget:
    """Divides a device's memory. It is made before the model is loaded.

    The limit is a share of the device's total memory, as in vLLM, or less if other processes leave less.
    """

    def __init__(self, memory: DeviceMemory, share: float) -> None:
        self._memory, self._start = memory, memory.read()
        total, free = self._start.total, self._start.free
        wanted, most = int(total * share), free - headroom(free)
        self.limit = min(wanted, most)
        """Bytes that this process may allocate."""
        self.source = f"{share:g} of the device's {gib(total)} (--gpu-memory-utilization)"
        if most < wanted:
            self.source = f"{gib(free)} of the device's {gib(total)} were free, less than --gpu-memory-utilization {share:g}"

    def left(self) -> int:
        """Bytes that this process may still allocate."""
        now, start = self._memory.read(), self._start
        taken = now.ours - start.ours + min(max(0, now.others - start.others), OWN_BYTES)
        return max(0, min(self.limit - taken, now.free - headroom(now.free)))

    def check(self, config: EngineConfig, model: ModelShape, precision: Precision) -> None:
        """Raises OutOfMemory with remedies if the weights of the whole `model` will not fit.

        Quantised checkpoints in transformers are not checked, except fp8, which is dequantised.
        """
        processes = config.tensor_parallel_size
        part = model if processes == 1 else part_of(model, processes)
        dtype = precision.quantization
        if dtype == "none" or (dtype in EIGHT_BITS and not isinstance(model, ModelConfig)):
            dtype = precision.compute
        scheme = model.scheme if isinstance(model, ModelConfig) else None
        known = dtype in BYTES or (scheme and dtype == scheme.name)
        if not known or self._fits(part, dtype, precision.compute):
            return
        dtypes = dict.fromkeys((dtype, *SMALLER)) if isinstance(model, ModelConfig) and dtype in BYTES else (dtype,)
        needs = ", ".join(f"{gib(torch_weight_bytes(part, name, precision.compute, packs_experts=True))} in {name}" for name in dtypes)
        remedies = [flag for name, flag in SMALLER.items() if name in dtypes and self._fits(part, name, precision.compute)]
        remedies += [
            f"--tensor-parallel-size {more}, with as many devices"
            for more in (2, 4, 8, 16)
            if more > processes and self._part_fits(model, more, dtype, precision.compute)
        ][:1]
        raise OutOfMemory(
            f"the weights take {needs}{' on each device' if processes > 1 else ''}, and there are {gib(self.limit)} for them "
            f"({self.source}): use {', or '.join([*remedies, 'a smaller model'])}"
        )

    def _fits(self, model: ModelShape, dtype: str, compute: str) -> bool:
        return torch_weight_bytes(model, dtype, compute, packs_experts=True) <= self.limit

    def _part_fits(self, model: ModelShape, processes: int, dtype: str, compute: str) -> bool:
        try:
            return self._fits(part_of(model, processes), dtype, compute)
        except InvalidSetting:
            return False

    def fit(self, config: EngineConfig, model: ModelShape, precision: Precision, run: Callable[[StepSize], None]) -> Size:
        """Sizes a step and the KV cache, after the weights are loaded.

        `run` runs the largest step, whose peak memory is measured, and frees its memory. Raises OutOfMemory.
        """
        step = fit_step(config, model, self.left())
        self._memory.watch()
        with raise_out_of_memory(
            f"no memory for a step of {step.tokens} tokens and {step.seqs} sequences beside the weights: lower --max-num-batched-tokens or "
            "--max-num-seqs; "
        ):
            run(step)
        now = self._memory.read()
        weights, needs = now.tensors - self._start.tensors, now.peak - now.tensors
        longest = config.max_model_len or model.max_position_embeddings
        graphs = 0 if config.enforce_eager or config.tensor_parallel_size > 1 else graph_bytes(model, precision, step.seqs, longest)
        left = self.left() - needs - graphs
        source = f"{gib(self.limit)}, beside {gib(weights)} of weights, {gib(needs)} for a step and {gib(graphs)} for graphs"
        size = fit_cache(config, model, precision.kv, step, Room(max(0, left), source, max(0, left), source))
        states = size.state_slots * model.state_bytes
        rest = max(0, left - states - size.num_blocks * block_bytes(model, config.block_size, precision.kv))
        return replace(
            size,
            decisions=(
                Decision("GPU memory", gib(self.limit), self.source),
                Decision("  weights", gib(weights), "measured"),
                Decision("  a step", gib(needs), f"measured, of {step.tokens} tokens and {step.seqs} samples"),
                Decision(
                    "  graphs", gib(graphs), f"reserved for up to {min(step.seqs, MAX_SIZE)} sequences" if graphs else "there are none"
                ),
                *size.decisions,
                Decision("GPU memory left", gib(rest), "of this process's limit"),
            ),
        )


def graph_bytes(model: ModelShape, precision: Precision, seqs: int, longest: int) -> int:
    """Bytes that CUDA graphs may need for decode steps of up to `seqs` sequences with contexts of up to `longest` tokens.

    The graphs share one pool of working memory.
    """
    graph_sizes = sizes(seqs)
    splits = max(max_splits(longest, window=spec.window) for spec in model.kv_specs)
    # Layers of equal shape share the memory of split results, which `paged_combine` merges.
    parts = sum(model.num_heads * (dim + 1) for dim in {spec.value_dim or spec.head_dim for spec in model.kv_specs}) * splits * 4
    whole = 0
    if isinstance(model, ModelConfig) and (precision.quantization == "int8" or model.scheme):
        whole = max(outs * ins for outs, ins in model.matrices) * BYTES[precision.compute]  # see `Linear`
    largest = graph_sizes[-1]
    return len(graph_sizes) * GRAPH_BYTES + step_bytes(model, largest, largest) + largest * parts + whole
