"""Whether a model that somebody else's code computes gives what that code gives by itself."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.errors import UnsupportedModel
from chairlift.layers.attention import plan_attention
from chairlift.models.llama import Step
from chairlift.models.transformers_model import TransformersModel
from chairlift.runner.memory.kv_cache import KvCache

LENGTHS = (21, 10)
STEPS = ((8, 3), (12, 6), (1, 1))
"""Tokens of two sequences that each step computes: pieces of prompts that end within blocks and at their ends, then decodes."""
BLOCK_SIZE, WINDOW = 16, 5
EXACT, CLOSE, MOST = 1e-3, 0.25, 0.9
"""The largest error relative to a token's logits: of any token in fp32, and of most where every sum is rounded (experts may change)."""


@torch.inference_mode()
def check(model: TransformersModel, dtype: torch.dtype, device: torch.device, vocab_size: int, name: str) -> None:
    """Runs two short sequences in pieces over a paged cache, and each as a whole with transformers' attention.

    Raises UnsupportedModel where their logits differ.
    """
    prompts = [np.random.default_rng(length).integers(0, vocab_size, length, dtype=np.int64) for length in LENGTHS]
    with model.narrowed(WINDOW):
        errors = []
        for prompt, found in zip(prompts, _in_pieces(model, prompts, dtype, device), strict=True):
            expected = model.reference(torch.from_numpy(prompt).to(device)).float()
            errors.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    error = torch.cat(errors)
    worst, bound = (error.max(), EXACT) if dtype == torch.float32 else (error.quantile(MOST), CLOSE)
    # Not a number is an error too.
    if not worst <= bound:
        raise UnsupportedModel(
            f"{name}: in a paged cache transformers' code for it gives other logits than by itself (error {worst:.0e}): "
            "it keeps or hides something beside keys and values"
        )


def _in_pieces(model: TransformersModel, prompts: list[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The logits of all tokens of each sequence, computed together, step by step."""
    each = -(-max(LENGTHS) // BLOCK_SIZE)
    # Blocks of the two lie among each other, backwards; block 0 stays empty.
    tables = np.arange(len(prompts) * each, 0, -1, dtype=np.int32).reshape(each, -1).T.copy()
    cache = KvCache(model.specs, tables.size + 1, BLOCK_SIZE, dtype, device)
    windows = frozenset(spec.window for spec in model.specs)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    ends = np.zeros(len(prompts), dtype=np.int32)
    for counts in STEPS:
        ends += counts
        positions = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        slots = [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(tables, positions, strict=True)]
        starts = np.cumsum((0, *counts), dtype=np.int32)
        plan = plan_attention(
            np.concatenate(slots).astype(np.int32), starts, ends, tables, windows=windows, block_size=BLOCK_SIZE, device=device
        )
        ids = np.concatenate([prompt[at] for prompt, at in zip(prompts, positions, strict=True)])
        step = Step(torch.from_numpy(ids).to(device), torch.from_numpy(np.concatenate(positions)).to(device), plan)
        hidden = model.forward(step, cache.layers)
        logits = model.logits(hidden, torch.arange(len(ids), device=device)).float()
        for parts, piece in zip(found, logits.split_with_sizes(counts), strict=True):
            parts.append(piece)
    return [torch.cat(parts) for parts in found]
