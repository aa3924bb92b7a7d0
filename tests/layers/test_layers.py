import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from chairlift.layers.attention import paged_attention, plan_attention, write_kv
from chairlift.layers.linear import Linear, padded_rows
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


@pytest.fixture
def two_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_paged_attention_equals_attention_written_out(window, two_threads):
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
    rows = padded_rows(len(slots)) + 4
    query = torch.randn(rows, HEADS, HEAD_DIM, generator=generator)
    new = torch.cat([kv[-queries:] for kv, (queries, _) in zip(contexts, lengths, strict=True)]).flatten(1, 2)
    # Padding rows are garbage that must go nowhere.
    write_kv(torch.cat((new, torch.full((rows - len(new), *new.shape[1:]), float("nan")))), cache, plan)
    found = paged_attention(query, cache, plan, window)
    expected = [
        dense(part, kv[:, 0], kv[:, 1], window)
        for part, kv in zip(query[: len(slots)].split([queries for queries, _ in lengths]), contexts, strict=True)
    ]
    torch.testing.assert_close(found[: len(slots)], torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert not found[len(slots) :].any()
    assert torch.get_num_threads() == two_threads


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


@pytest.mark.parametrize(("outs", "ins"), [(960, 576), (576, 1536), (49152, 64), (40, 48)])
def test_rows_of_a_product_are_the_same_bits_in_any_number(outs, ins):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("promised for oneDNN alone")
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outs, ins, generator=generator), torch.randn(256, ins, generator=generator)
    linear = Linear(weight, weight[:, 0].clone())
    whole = linear(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, weight[:, 0]), rtol=1e-4, atol=1e-3)
    for rows in (4, 8, 12, 16, 32, 64, 100, 128, 200):
        assert torch.equal(linear(x[5 : 5 + rows]), whole[5 : 5 + rows])


def test_rows_are_padded_to_a_multiple():
    assert [padded_rows(rows) for rows in (0, 1, 3, 4, 5, 64)] == [0, 4, 4, 4, 8, 64]


def test_neither_triton_nor_transformers_is_imported_on_the_cpu():
    code = "import sys, chairlift.runner.runner; print(sorted({'triton', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
