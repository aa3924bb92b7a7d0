"""Applies repetition, presence and frequency penalties on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.sampling.settings import Settings

BLOCK = 4096
"""Tokens per program."""


@triton.jit
def _penalise_kernel(
    logits_ptr, said_ptr, rows_ptr, slot_ptr, repetition_ptr, presence_ptr, frequency_ptr, stride, vocabulary, block: tl.constexpr
):
    # One program penalises one block of one row. It does nothing for a row without penalties.
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        repetition, presence, frequency = tl.load(repetition_ptr + row), tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
        tokens = part * block + tl.arange(0, block)
        said = tl.load(said_ptr + slot * vocabulary + tokens, mask=tokens < vocabulary, other=0)
        # Most tokens do not occur in the sequence: their logits are neither read nor written.
        logits_ptr += place * stride
        x = tl.load(logits_ptr + tokens, mask=said > 0, other=0.0)
        count = said >> 1
        x = tl.where(x > 0, x / repetition, x * repetition) - count * frequency - tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + tokens, x, mask=said > 0)


def penalise(logits: torch.Tensor, rows: torch.Tensor, settings: Settings, said: torch.Tensor) -> None:
    """Penalises the logits [N, vocabulary] of the rows [N] that have penalties. `said` is as in `reference.penalise`."""
    count, vocabulary = logits.shape
    columns = settings.slot, settings.repetition, settings.presence, settings.frequency
    stride = logits.stride(0)
    _penalise_kernel[(count, triton.cdiv(vocabulary, BLOCK))](logits, said, rows, *columns, stride, vocabulary, block=BLOCK, num_warps=8)
