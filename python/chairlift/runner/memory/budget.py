"""What a process may have of a device's memory, and what that goes to: weights, a step, graphs, and the rest to the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chairlift._core import max_splits
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, OutOfMemory
from chairlift.layers.linear import FORMS
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.cuda_graphs import LARGEST, sizes
from chairlift.runner.memory.decision import Decision, gib
from chairlift.runner.memory.device_memory import DeviceMemory, raise_out_of_memory
from chairlift.runner.memory.precision import BYTES, Precision, torch_weight_bytes
from chairlift.runner.memory.sizing import Room, Size, StepSize, block_bytes, fit_cache, fit_step, headroom, step_bytes
from chairlift.runner.tensor_parallel.shards import part_of

GRAPH_BYTES = 8 << 20
"""Bytes that the driver keeps for a graph of some hundred kernels: a guess on the safe side."""
OWN_BYTES = 2 << 30
"""The most that a process takes beside torch's allocator, for kernels and NCCL; what is gone beyond that another process has taken."""
SMALLER = {"bfloat16": "--dtype bfloat16", "fp8": "--quantization fp8", "int8": "--quantization int8"}
"""What makes weights smaller, by the form that it gives them."""


class Budget:
    """What this process may have of a device's memory, to be made before the model is loaded.

    That is a share of all there is, as in vLLM, whoever else is there; less where others have left less.
    """

    def __init__(self, memory: DeviceMemory, share: float) -> None:
        self._memory, self._start = memory, memory.read()
        total, free = self._start.total, self._start.free
        wanted, most = int(total * share), free - headroom(free)
        self.limit = min(wanted, most)
        """Bytes that it may have in all."""
        self.source = f"{share:g} of the device's {gib(total)} (--gpu-memory-utilization)"
        if most < wanted:
            self.source = f"{gib(free)} of the device's {gib(total)} were free, less than --gpu-memory-utilization {share:g}"

    def left(self) -> int:
        """Bytes that it may still take."""
        now, start = self._memory.read(), self._start
        taken = now.ours - start.ours + min(max(0, now.others - start.others), OWN_BYTES)
        return max(0, min(self.limit - taken, now.free - headroom(now.free)))

    def check(self, config: EngineConfig, model: ModelShape, precision: Precision) -> None:
        """Raises OutOfMemory, with the ways out, if the weights of `model` will not fit.

        It knows nothing of quantised checkpoints, but that those in fp8 are dequantised.
        """
        processes = config.tensor_parallel_size
        part = model if processes == 1 else part_of(model, processes)
        form = precision.quantization
        if form == "none" or (form in FORMS and not isinstance(model, ModelConfig)):
            form = precision.compute
        if form not in BYTES or self._holds(part, form, precision.compute):
            return
        forms = dict.fromkeys((form, *SMALLER)) if isinstance(model, ModelConfig) else (form,)
        needs = ", ".join(f"{gib(torch_weight_bytes(part, name, precision.compute))} in {name}" for name in forms)
        ways = [flag for name, flag in SMALLER.items() if name in forms and self._holds(part, name, precision.compute)]
        ways += [
            f"--tensor-parallel-size {more}, with as many devices"
            for more in (2, 4, 8, 16)
            if more > processes and self._holds_part(model, more, form, precision.compute)
        ][:1]
        raise OutOfMemory(
            f"the weights take {needs}{' on each device' if processes > 1 else ''}, and there are {gib(self.limit)} for them "
            f"({self.source}): use {', or '.join([*ways, 'a smaller model'])}"
        )

    def _holds(self, model: ModelShape, form: str, compute: str) -> bool:
        return torch_weight_bytes(model, form, compute) <= self.limit

    def _holds_part(self, model: ModelShape, processes: int, form: str, compute: str) -> bool:
        try:
            return self._holds(part_of(model, processes), form, compute)
        except InvalidSetting:
            return False

    def fit(self, config: EngineConfig, model: ModelShape, precision: Precision, run: Callable[[StepSize], None]) -> Size:
        """Sizes a step and the cache, into whose memory the weights are loaded already: as `sizing.fit` does for a host.

        `run` runs the largest step, and keeps nothing of what that takes. Raises OutOfMemory if there is too little for it.
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
        rest = max(0, left - size.num_blocks * block_bytes(model, config.block_size, precision.kv))
        return replace(
            size,
            decisions=(
                Decision("GPU memory", gib(self.limit), self.source),
                Decision("  weights", gib(weights), "measured"),
                Decision("  a step", gib(needs), f"measured, of {step.tokens} tokens and {step.seqs} samples"),
                Decision(
                    "  graphs", gib(graphs), f"kept for those of up to {min(step.seqs, LARGEST)} sequences" if graphs else "there are none"
                ),
                *size.decisions,
                Decision("GPU memory left", gib(rest), "of what this process may have"),
            ),
        )


def graph_bytes(model: ModelShape, precision: Precision, seqs: int, longest: int) -> int:
    """Bytes that graphs of steps may take with one token for each of up to `seqs` sequences, in contexts of up to `longest`.

    They share what they compute with.
    """
    kept = sizes(seqs)
    splits = max(max_splits(longest, window=spec.window) for spec in model.kv_specs)
    # Layers of equal shape share the results of splits, which `paged_combine` puts together.
    parts = sum(model.num_heads * (dim + 1) for dim in {spec.value_dim for spec in model.kv_specs}) * splits * 4
    whole = 0
    if precision.quantization == "int8" and isinstance(model, ModelConfig):
        whole = max(outs * ins for outs, ins in model.layer_matrices) * BYTES[precision.compute]  # see `Linear`
    return len(kept) * GRAPH_BYTES + step_bytes(model, kept[-1], kept[-1]) + kept[-1] * parts + whole
