"""Times a step on the CPU beside torch's ways to do its linear layers, and writes benches/results/linear.md.

A step of N sequences that decode their first token is linear work and little else; one with contexts of 500 tokens has attention to do.
torch's ways do the linear layers alone: no norms, no attention, no sampling. Takes about three minutes on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import write
from peers.machine import describe, peaks
from torch.nn import functional

import chairlift.runner  # noqa: F401, before torch
from chairlift import _core
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.runner.build import build_runner
from chairlift.runner.runner import ModelRunner

ROWS = (1, 4, 16, 64, 256)
LAYERS, SHAPES, HEAD = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)
NUMBERS = LAYERS * sum(out * into for out, into in SHAPES) + HEAD[0] * HEAD[1]
"""What a token is multiplied by."""
ALONE = ", the head alone"
"""A step's last product, which is linear work and one norm: what the kernels reach without the rest of a step."""
FORMS = {
    "as the GGUF file has them (default)": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "`--cpu-math fast`": {"cpu_math": "fast"},
    "int8": {"quantization": "int8"},
} | ({"as the GGUF file has them, without AMX": {"cpu_isa": "vnni"}} if "amx" in _core.instruction_sets() else {})
ROUNDS, LEAST = 2, 0.5
CONTEXT = 500

Step = Callable[[], object]


def torch_ways(rows: int) -> dict[str, Step]:
    """The linear layers of a step in torch, each layer with weights of its own."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in SHAPES] + [torch.randn(HEAD) * 0.02]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]
    torch.backends.quantized.engine = "fbgemm"
    linears = [torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False) for weight in weights]
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.data = weight
    dynamic: Any = torch.ao.nn.quantized.dynamic.Linear
    quantised = [dynamic.from_float(with_config(linear)) for linear in linears]
    inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
    turned = {width: x.T.contiguous() for width, x in inputs.items()}

    def each(call: Callable[[int, int], object]) -> Step:
        return lambda: [call(i, weight.shape[1]) for i, weight in enumerate(weights)]

    return {
        "torch F.linear": each(lambda i, width: functional.linear(inputs[width], weights[i])),
        "torch oneDNN, packed": each(lambda i, width: torch.ops.mkldnn._linear_pointwise(inputs[width], packed[i], None, "none", [], "")),
        "torch W @ x.T": each(lambda i, width: weights[i] @ turned[width]),
        "torch int8, dynamic (fbgemm)": each(lambda i, width: quantised[i](inputs[width])),
    }


def with_config(linear: Any) -> Any:
    """A linear layer that says how it is to be quantised."""
    linear.qconfig = torch.ao.quantization.per_channel_dynamic_qconfig
    return linear


def runner(directory: Path, settings: dict[str, Any]) -> ModelRunner:
    """The default model in one form."""
    return build_runner(EngineConfig(device="cpu", max_num_seqs=256, max_model_len=512, num_kv_blocks=8193, **settings), directory)


def ours(model: ModelRunner, rows: int, context: int) -> Step:
    """A step of `rows` sequences that each decode one token, the last of `context`."""
    buffers, blocks, at = model.buffers[0], -(-context // 16), np.arange(rows)

    def step() -> None:
        # Anew each time: the other contexts' cases use the same buffers.
        buffers.input_ids[:rows] = at + 1000
        buffers.positions[:rows] = context - 1
        buffers.query_starts[: rows + 1] = np.arange(rows + 1)
        buffers.context_lens[:rows] = context
        buffers.batch_slots[:rows] = at
        buffers.block_tables[:rows, :blocks] = 1 + np.arange(rows * blocks).reshape(rows, blocks)
        buffers.slot_mapping[:rows] = buffers.block_tables[:rows, blocks - 1] * 16 + (context - 1) % 16
        model.model.forward(buffers, rows, rows)
        model.model.logits(at)

    return step


@torch.inference_mode()
def seconds(step: Step) -> float:
    """The least of as many steps as fit into LEAST seconds, two at least."""
    step()
    best, began, count = float("inf"), time.perf_counter(), 0
    while time.perf_counter() - began < LEAST or count < 2:
        at = time.perf_counter()
        step()
        best, count = min(best, time.perf_counter() - at), count + 1
    return best


def main() -> None:
    """Measures all, in turns, and writes the page."""
    directory = locate(DEFAULT_MODEL)
    machine, peak = describe(), peaks()
    models = {name: runner(directory, settings) for name, settings in FORMS.items()}
    found: dict[tuple[str, int], float] = {}
    for _ in range(ROUNDS):
        for rows in ROWS:
            cases = torch_ways(rows)
            for name, model in models.items():
                cases[name] = ours(model, rows, 1)
                cases[f"{name}, {CONTEXT} tokens of context"] = ours(model, rows, CONTEXT)
                cases[name + ALONE] = partial(model.model.logits, np.arange(rows))
            for name, step in cases.items():
                found[name, rows] = min(found.get((name, rows), float("inf")), seconds(step))
                print(f"{name}, {rows} rows: {rows / found[name, rows]:.0f} tokens/s", flush=True)
    names = dict.fromkeys(name for name, _ in found)
    lines = [
        "# A step on the CPU, beside torch's ways to do its linear layers",
        "",
        "Written by `benches/linear.py`. Tokens per second (GFLOP/s or GOP/s), the best of "
        f"{ROUNDS} rounds; SmolLM2-135M, {NUMBERS / 1e6:.0f} million weights a token.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {', '.join(machine['flags'])}. Kernels: {_core.instruction_sets()[0]}. "
        f"Peaks, measured in this run: {', '.join(f'{name} {value}' for name, value in peak.items())}.",
        "",
        "| way | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |",
        "|---|" + "---|" * len(ROWS),
    ]
    for name in names:
        numbers = HEAD[0] * HEAD[1] if name.endswith(ALONE) else NUMBERS
        cells = [f"{rows / found[name, rows]:.0f} ({2e-9 * numbers * rows / found[name, rows]:.0f})" for rows in ROWS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    write("linear.md", lines)


if __name__ == "__main__":
    main()
