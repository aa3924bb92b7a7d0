"""The kernels of paged attention against attention written out, by way of the plan that GPUs use."""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_steps import AttentionStep, dense
from compile_gate import FULL
from interpreted import DTYPES

from chairlift.kernels.paged_combine import paged_combine, paged_combine_reference
from chairlift.layers.attention import paged_attention
from chairlift.layers.device_attention import DevicePlan

SPLIT = 768  # Longer contexts are split.
AROUND_BLOCKS = [(1, 0), (1, 1), (1, 15), (1, 16), (1, 17)]
AROUND_SPLITS = [(1, SPLIT - 1), (1, SPLIT), (1, SPLIT + 1)]
SHAPES = [
    (2, 1, 32, 32, torch.float32),
    (1, 3, 64, 64, torch.float16),
    (2, 8, 24, 16, torch.float32),
    *[(1, 4, 128, 128, torch.float16), (1, 7, 80, 80, torch.float32)] * FULL,
]
"""KV heads, query heads to each, dimensions of keys and values, dtype."""


def pairs(ones: list[object], others: list[object]) -> list[tuple[object, object]]:
    """All pairs of two lists, or as many as have each value once."""
    return list(itertools.product(ones, others)) if FULL else list(zip(ones, itertools.cycle(others), strict=False))


def attend(step: AttentionStep, dtype: torch.dtype = torch.float32, **options: object) -> torch.Tensor:
    """What the kernels make of a step."""
    if step.keys.dtype != torch.float8_e4m3fn:
        step.keys, step.values = step.keys.to(dtype), step.values.to(dtype)
    # Stored by torch: the interpreter rounds to 8 bits wrongly.
    step.write(options.get("scales"))
    plan = DevicePlan.send(*step.arrays(), windows=[options.get("window")], device=torch.device("cpu"))
    step.query = step.query.to(dtype)
    return paged_attention(step.query, step.keys, step.values, plan, **options)


def check(step: AttentionStep, dtype: torch.dtype = torch.float32, **options: object) -> None:
    found = attend(step, dtype, **options)
    real = torch.tensor(step.slots >= 0)
    expected = dense(step, **{name: value for name, value in options.items() if name != "scales"})
    torch.testing.assert_close(found[real].float(), expected[real], rtol=0, atol=4 * DTYPES[dtype])
    # What only fills up the step is not touched: memory was full of NaN.
    assert found[~real].isnan().all()


@pytest.mark.parametrize(("kv_heads", "group", "dim", "value_dim", "dtype"), SHAPES)
def test_decodes_around_blocks_and_splits(kv_heads, group, dim, value_dim, dtype):
    lengths = AROUND_BLOCKS + AROUND_SPLITS
    check(AttentionStep(lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, value_dim=value_dim, block_size=16), dtype)


@pytest.mark.parametrize(("window", "sinks"), pairs([1, 20, 64, SPLIT, SPLIT + 90], [False, True]))
def test_decodes_through_windows(window, sinks):
    # With a window of a split, a context of two splits and a half has parts of two, and the first split is not among them.
    drafted = [(1, 0), (1, 1), (1, 65), (2, SPLIT + 1), (3, 2 * SPLIT + 256)]
    for lengths in (drafted, [(1, context) for _, context in drafted]):
        step = AttentionStep(lengths, heads=3, kv_heads=1, dim=32, value_dim=32, block_size=16)
        check(step, window=window, sinks=torch.tensor([-3.0, 0.0, 4.0]) if sinks else None)


@pytest.mark.parametrize(("softcap", "sinks"), pairs([None, 1.5], [torch.linspace(-3, 4, 4), None]))
def test_drafted_tokens_see_no_further_than_themselves(softcap, sinks):
    lengths = [(2, 2), (4, 4), (3, 17), (4, SPLIT + 2), (2, SPLIT + 1)]
    check(AttentionStep(lengths, heads=4, kv_heads=2, dim=32, value_dim=32, block_size=16), softcap=softcap, sinks=sinks, scale=0.3)


@pytest.mark.parametrize(("kv_heads", "group", "dim", "value_dim", "dtype"), SHAPES)
def test_prefills_around_tiles(kv_heads, group, dim, value_dim, dtype):
    lengths = [(5, 5), (16, 16), (17, 40), (1, 3), (33, 65), (7, 130), (10, 72), (9, 72), (8, 72)]
    check(AttentionStep(lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, value_dim=value_dim, block_size=16), dtype)


@pytest.mark.parametrize(
    ("window", "more"), pairs([None, 1, 20, 64, 100], [{}, {"softcap": 1.5, "scale": 0.3}, {"sinks": torch.linspace(-3, 4, 8)}])
)
def test_prefills_through_windows(window, more):
    lengths = [(2, 130), (40, 40), (6, 200), (1, 0), (70, 129)]
    check(AttentionStep(lengths, heads=8, kv_heads=2, dim=32, value_dim=32, block_size=8), window=window, **more)


@pytest.mark.parametrize("window", [None, 30])
def test_a_cache_of_8_bits(window):
    step = AttentionStep([(1, 33), (2, SPLIT + 7), (20, 70)], heads=6, kv_heads=2, dim=32, value_dim=32, block_size=16)
    scales = torch.tensor([0.5, 0.01]), torch.tensor([2.0, 0.02])
    step.round_to_8_bits(scales)
    check(step, window=window, scales=scales)


@pytest.mark.parametrize(("heads", "dtype"), [(16, torch.float16), (20, torch.float32)])
def test_heads_share_latents(heads, dtype, monkeypatch):
    fewer_heads_a_tile(monkeypatch)
    for lengths in ([(1, 30), (1, SPLIT + 9)], [(1, 30), (3, 40), (20, 33), (1, 0)]):
        check(latent_step(lengths, heads), dtype, scale=0.3)


def test_latents_of_8_bits(monkeypatch):
    fewer_heads_a_tile(monkeypatch)
    scales = (torch.tensor([0.02]),) * 2
    check(latent_step([(1, 40), (2, 7), (9, 20)], 20, scales), scales=scales)


def fewer_heads_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of up to 16 heads with one token, as those of DeepSeek V3, and of up to 4 heads with several."""
    from chairlift.kernels import launch_settings  # as below

    monkeypatch.setattr(launch_settings, "MAX_QUERIES", 16 * 64)
    monkeypatch.setattr(launch_settings, "_group", launch_settings._group.__wrapped__)


def latent_step(lengths: list[tuple[int, int]], heads: int, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> AttentionStep:
    """A step whose values are parts of its keys."""
    step = AttentionStep(lengths, heads=heads, kv_heads=1, dim=40, value_dim=32, block_size=16)
    if scales:
        step.round_to_8_bits(scales)
    step.values, step.new_v = step.keys[..., :32], step.new_k[..., :32]
    step.contexts = [(k, k[..., :32]) for k, _ in step.contexts]
    return step


def test_queries_and_caches_may_have_any_strides():
    step = AttentionStep([(1, 40), (9, 20)], heads=4, kv_heads=2, dim=32, value_dim=32, block_size=16)
    expected = attend(step)
    step.query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    pool = torch.full((len(step.keys), 16, 2, 2, 32), float("nan"))
    pool[:, :, 0].copy_(step.keys.transpose(1, 2))
    pool[:, :, 1].copy_(step.values.transpose(1, 2))
    step.keys, step.values = pool[:, :, 0].transpose(1, 2), pool[:, :, 1].transpose(1, 2)
    assert torch.equal(attend(step), expected)


@pytest.mark.parametrize("window", [None, 100])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(window):
    lengths = [(1, 30), (1, SPLIT + 60), (3, 2 * SPLIT + 1), (20, 90), (1, 0), (6, 300)]
    step = AttentionStep(lengths, heads=4, kv_heads=1, dim=32, value_dim=32, block_size=16)
    together = attend(step, window=window)
    slots, starts, lens, tables = step.arrays()
    for i, (_, context) in enumerate(lengths):
        own = slice(starts[i], starts[i + 1])
        arrays = slots[own], starts[i : i + 2] - starts[i], lens[i : i + 1], tables[i : i + 1]
        alone = DevicePlan.send(*arrays, windows=[window], device=torch.device("cpu"))
        if context:
            assert torch.equal(paged_attention(step.query[own], step.keys, step.values, alone, window=window), together[own])


def test_lists_may_be_shorter_than_the_grids_and_rows_anywhere():
    # As in a graph that is kept for several steps: bounds and addresses stay, what lies there does not.
    step = AttentionStep([(1, 30), (1, SPLIT + 60), (8, 50)], heads=4, kv_heads=1, dim=32, value_dim=32, block_size=16)
    expected = attend(step)
    slots, starts, lens, blocks = map(torch.from_numpy, step.arrays())
    rows = torch.tensor([5, 0, 3], dtype=torch.int32)
    tables = torch.full((7, blocks.shape[1] + 3), 2**30, dtype=torch.int32)
    tables[rows, :-3] = blocks
    plan = DevicePlan.make(slots, starts, lens, rows, tables, lengths=step.arrays()[1:3], windows=[None])
    work = plan.decodes[None]
    plan.decodes[None] = replace(work, units=work.units + 3, merges=work.merges + 2, parts=work.parts + 5)
    assert torch.equal(paged_attention(step.query, step.keys, step.values, plan), expected)
    [(tokens, tiles)] = plan.prefills.items()
    plan.prefills[tokens] = replace(tiles, units=tiles.units + 2)
    assert torch.equal(paged_attention(step.query, step.keys, step.values, plan), expected)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 5.0])])
@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_parts_are_combined(count, sinks):
    parts, lses = torch.randn(2 * count, 2, 24), torch.randn(2 * count, 2) * 3
    lses[2] = float("-inf")
    out = torch.empty(3, 2, 24)
    work = torch.tensor([[1, 2, 2 * count, 2], [0, 0, 0, 0], [2, 0, 2, count], [0, 1, 2, count]], dtype=torch.int32)
    paged_combine(out, parts, lses, work=work, merges=2, sinks=sinks)
    for token, first in ((2, 0), (0, 1)):
        torch.testing.assert_close(out[token], paged_combine_reference(parts[first::2], lses[first::2], sinks), rtol=1e-5, atol=1e-6)
    assert out[1].isnan().all()


@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 1.5}], ids=["plain", "gemma-2"])
def test_a_4090s_smaller_tiles_give_the_same_numbers(options, monkeypatch):
    # Imported here, because a launcher's module imports the function by name.
    from chairlift.kernels import launch_settings, paged_decode, paged_prefill

    limits = launch_settings.DeviceLimits((8, 9), 101376, 1)
    for module in (launch_settings, paged_decode, paged_prefill):
        monkeypatch.setattr(module, "device_limits", lambda device: limits)
    step = AttentionStep([(40, 40), (33, 130), (1, 70), (2, 66)], heads=4, kv_heads=2, dim=256, value_dim=256, block_size=16)
    shape = launch_settings.HeadShape(2, 256, 256, 2, 2)
    assert launch_settings.prefill_settings(shape, limits) != launch_settings.prefill_settings(shape, launch_settings.INTERPRETER)
    check(step, torch.float16, **options)
