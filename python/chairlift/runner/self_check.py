"""Checks at load that a transformers model gives the same logits with paged, chunked attention as with its own attention."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.errors import UnsupportedModel
from chairlift.layers.attention import plan_attention
from chairlift.models.forward_batch import ForwardBatch
from chairlift.models.transformers_model import TransformersModel
from chairlift.runner.memory.kv_cache import KvCache

LENGTHS = (21, 10)
STEPS = ((8, 3), (12, 6), (1, 1))
"""Tokens of two sequences in each step: prompt chunks that end within blocks and at block ends, then decodes."""
BLOCK_SIZE, WINDOW = 16, 5
EXACT, CLOSE, MOST = 1e-3, 0.25, 0.9
"""Bounds of a token's relative error: EXACT for all tokens in fp32; CLOSE for the MOST quantile in other dtypes (experts may change)."""


@torch.inference_mode()
def check(model: TransformersModel, dtype: torch.dtype, device: torch.device, vocab_size: int, name: str) -> None:
    """Compares two short sequences in chunks over a paged cache with each as a whole in transformers' attention.

    Raises UnsupportedModel if the logits differ.
    """
    prompts = [np.random.default_rng(length).integers(0, vocab_size, length, dtype=np.int64) for length in LENGTHS]
    with model.narrowed(WINDOW):
        errors = []
        for prompt, found in zip(prompts, _chunked(model, prompts, dtype, device), strict=True):
            expected = model.reference(torch.from_numpy(prompt).to(device)).float()
            errors.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    error = torch.cat(errors)
    worst, bound = (error.max(), EXACT) if dtype == torch.float32 else (error.quantile(MOST), CLOSE)
    # Written so that NaN fails.
    if not worst <= bound:
        raise UnsupportedModel(
            f"{name}: the model's logits with a paged cache differ from transformers' own (error {worst:.0e}): "
            "it has state besides keys and values, hides tokens by its mask alone, or counts positions in a way of its own"
        )


def _chunked(model: TransformersModel, prompts: list[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The logits of all tokens of each sequence, computed together in several steps."""
    each = -(-max(LENGTHS) // BLOCK_SIZE)
    # The sequences' blocks are interleaved and in reverse order; block 0 is not used.
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
        step = ForwardBatch(torch.from_numpy(ids).to(device), torch.from_numpy(np.concatenate(positions)).to(device), plan)
        hidden = model.forward(step, cache.layers)
        logits = model.logits(hidden, torch.arange(len(ids), device=device)).float()
        for parts, piece in zip(found, logits.split_with_sizes(counts), strict=True):
            parts.append(piece)
    return [torch.cat(parts) for parts in found]
