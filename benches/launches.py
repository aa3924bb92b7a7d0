"""Times on the host how long it takes to launch our kernels of one decoder layer, with Triton's dispatch and with remembered launches.

Needs no GPU: kernels are compiled for an H100 and launches do nothing, so that the driver's own time is not included. Shapes are those of
Llama-3.1-8B. Writes benches/results/launches.md; takes ten seconds, and wants the machine for itself.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from pages import machine, write
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from chairlift.kernels.act_mul import act_mul
from chairlift.kernels.cached_launch import CachedLaunch
from chairlift.kernels.rms_norm import add_rms_norm
from chairlift.kernels.rope_write import rope_write
from chairlift.layers.attention import paged_attention
from chairlift.layers.device_attention import DevicePlan

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
SEQS, BLOCK_SIZE, LAUNCHES = 8, 16, 5
REPEATS, ROUNDS = 500, 7


class NoDevice:
    """Triton's driver without a device."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    """Writes the page."""
    active: Any = driver
    active.set_active(NoDevice())
    patched: Any = CompiledKernel
    patched._init_handles = lambda kernel: None
    patched.run = property(lambda kernel: lambda *given: None)
    hidden, residual, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((SEQS, HIDDEN), (SEQS, HIDDEN), (HIDDEN,)))
    gate_up = torch.zeros(SEQS, 2 * INNER, dtype=torch.bfloat16)
    qkv = torch.zeros(SEQS, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    cache = torch.zeros(SEQS + 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    angles = torch.zeros(SEQS, HEAD_DIM // 2)
    slots, starts = np.arange(SEQS, dtype=np.int32), np.arange(SEQS + 1, dtype=np.int32)
    tables = np.arange(1, SEQS + 1, dtype=np.int32)[:, None]
    plan = DevicePlan.send(slots, starts, np.full(SEQS, 9, np.int32), tables, windows=[None], device=torch.device("cpu"))

    def layer() -> None:
        query = rope_write(qkv, angles, angles, cache[:, 0], cache[:, 1], plan.slots)
        paged_attention(query, cache[:, 0], cache[:, 1], plan)
        add_rms_norm(hidden, residual, weight, 1e-5)
        act_mul(gate_up, "silu")
        add_rms_norm(hidden, residual, weight, 1e-5)

    def microseconds() -> float:
        layer()
        times = []
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(REPEATS):
                layer()
            times.append((time.process_time() - began) / REPEATS)
        return min(times) * 1e6

    remembered = microseconds()
    with mock.patch.object(CachedLaunch, "run", JITFunction.run):
        dispatched = microseconds()
    lines = [
        "# Launches of a layer",
        "",
        f"CPU time of the host for our {LAUNCHES} kernels of a decoder layer, with their wrappers, in a decode step of {SEQS} sequences.",
        "There is no device, and the driver's time is not included. The shapes are those of Llama-3.1-8B.",
        "",
        f"Written by `benches/launches.py`: the least of {ROUNDS} means of {REPEATS} layers.",
        "",
        f"Machine: {machine()}; torch {torch.__version__}, Triton {triton.__version__}.",
        "",
        "| launches | us a layer | us a launch |",
        "|---|---|---|",
        *(
            f"| {name} | {found:.0f} | {found / LAUNCHES:.1f} |"
            for name, found in (("Triton's dispatch", dispatched), ("remembered", remembered))
        ),
    ]
    write("launches.md", lines)


if __name__ == "__main__":
    main()
