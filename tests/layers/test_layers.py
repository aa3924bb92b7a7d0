import subprocess
import sys

import numpy as np
import pytest
import torch

from chairlift.layers.attention import paged_attention, plan_attention, write_kv
from chairlift.layers.rope import inverse_frequencies, rotate, rotations

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 8, 4


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of the last tokens of one context, written out: query [n, heads, d], keys and values [context, kv_heads, d]."""
    outputs = []
    for i in range(len(query)):
        position = len(keys) - len(query) + i
        low = 0 if window is None else max(0, position - window + 1)
        k, v = (part[low : position + 1].repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        weights = torch.einsum("hd,khd->hk", query[i], k).div(HEAD_DIM**0.5).softmax(-1)
        outputs.append(torch.einsum("hk,khd->hd", weights, v).reshape(-1))
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_paged_attention_equals_attention_written_out(window):
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, 1), (1, 13), (7, 7), (5, 12), (1, 4), (4, 24), (12, 12)]  # (queries, context), around block boundaries
    blocks = np.random.default_rng(0).permutation(np.arange(1, 40))
    tables = np.zeros((len(lengths), 6), dtype=np.int32)
    cache = torch.full((40, 2, KV_HEADS, BLOCK, HEAD_DIM), float("nan"))
    slots, contexts = [], []
    for i, (queries, context) in enumerate(lengths):
        used, blocks = np.split(blocks, [-(-context // BLOCK)])
        tables[i, : len(used)] = used
        kv = torch.randn(context, 2, KV_HEADS, HEAD_DIM, generator=generator)
        contexts.append(kv)
        for position in range(context - queries):
            cache[used[position // BLOCK], :, :, position % BLOCK] = kv[position]
        slots += [used[position // BLOCK] * BLOCK + position % BLOCK for position in range(context - queries, context)]
    plan = plan_attention(
        np.array(slots, dtype=np.int32),
        np.cumsum([0] + [queries for queries, _ in lengths], dtype=np.int32),
        np.array([context for _, context in lengths], dtype=np.int32),
        tables,
        heads=HEADS,
        windows=frozenset({window}),
        cache=cache,
    )
    query = torch.randn(len(slots), HEADS, HEAD_DIM, generator=generator)
    write_kv(torch.cat([kv[-queries:] for kv, (queries, _) in zip(contexts, lengths, strict=True)]).flatten(1, 2), cache, plan)
    found = paged_attention(query, cache, plan, window)
    expected = [
        dense(part, kv[:, 0], kv[:, 1], window) for part, kv in zip(query.split([queries for queries, _ in lengths]), contexts, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance():
    q, k = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    frequencies = inverse_frequencies(16, 100.0)

    def score(at: int, to: int) -> torch.Tensor:
        turned_q = rotate(q, *rotations(torch.tensor([at]), frequencies, torch.float32))
        turned_k = rotate(k, *rotations(torch.tensor([to]), frequencies, torch.float32))
        torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_neither_triton_nor_transformers_is_imported_on_the_cpu():
    code = "import sys, chairlift.runner.runner; print(sorted({'triton', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
