import numpy as np
import pytest
import torch
from attention_steps import AttentionStep, dense

from chairlift.layers.attention import paged_attention, plan_attention, write_kv

LENGTHS = [(1, 1), (1, 13), (7, 7), (5, 12), (1, 4), (4, 24), (12, 12)]
"""(queries, context) of sequences, around block boundaries."""


@pytest.mark.parametrize("window", [None, 1, 5, 8])
@pytest.mark.parametrize("more", [{}, {"scale": 0.3}, {"softcap": 1.5}, {"sinks": torch.linspace(-2, 3, 6)}], ids=str)
@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.slow
def test_paged_attention_equals_attention_written_out(window, more, value_dim):
    step = AttentionStep(LENGTHS, heads=6, kv_heads=2, dim=8, value_dim=value_dim, block_size=4)
    plan = plan_attention(*step.arrays(), windows=frozenset({window}), block_size=4, device=torch.device("cpu"))
    write_kv(step.new_k, step.new_v, step.keys, step.values, plan)
    found = paged_attention(step.query, step.keys, step.values, plan, window=window, **more)
    torch.testing.assert_close(found, dense(step, window=window, **more), rtol=1e-5, atol=1e-6)


def test_layers_of_one_step_may_have_different_heads_and_windows():
    wide = AttentionStep(LENGTHS, heads=6, kv_heads=2, dim=8, value_dim=8, block_size=4)
    slim = AttentionStep(LENGTHS, heads=4, kv_heads=4, dim=6, value_dim=3, block_size=4)
    plan = plan_attention(*wide.arrays(), windows=frozenset({None, 5}), block_size=4, device=torch.device("cpu"))
    for step, window in ((wide, None), (slim, 5)):
        write_kv(step.new_k, step.new_v, step.keys, step.values, plan)
        found = paged_attention(step.query, step.keys, step.values, plan, window=window)
        torch.testing.assert_close(found, dense(step, window=window), rtol=1e-5, atol=1e-6)


def test_a_cache_of_8_bits_gives_what_was_written_up_to_rounding():
    step = AttentionStep(LENGTHS, heads=6, kv_heads=2, dim=8, value_dim=8, block_size=4)
    scales = torch.tensor([0.5, 0.01]), torch.tensor([2.0, 0.02])
    step.round_to_8_bits(scales)
    plan = plan_attention(*step.arrays(), windows=frozenset({None}), block_size=4, device=torch.device("cpu"))
    write_kv(step.new_k, step.new_v, step.keys, step.values, plan, scales=scales)
    found = paged_attention(step.query, step.keys, step.values, plan, scales=scales)
    torch.testing.assert_close(found, dense(step), rtol=1e-5, atol=1e-6)
    # What 8 bits cannot hold becomes the largest that they can.
    write_kv(torch.full_like(step.new_k, -1e6), step.new_v, step.keys, step.values, plan, scales=scales)
    written = step.keys[step.slots // 4, :, step.slots % 4].float()
    assert torch.equal(written, torch.full_like(written, -448))


def test_padding_is_written_to_the_scratch_block_alone():
    keys = torch.zeros(3, 2, 4, 8)
    slots, starts = np.array([5, -1, -1], dtype=np.int32), np.array([0, 1, 2, 3], dtype=np.int32)
    lens, tables = np.array([2, 0, 0], dtype=np.int32), np.array([[1], [0], [0]], dtype=np.int32)
    plan = plan_attention(slots, starts, lens, tables, windows=frozenset({None}), block_size=4, device=torch.device("cpu"))
    write_kv(torch.ones(3, 2, 8), torch.ones(3, 2, 8), keys, keys.clone(), plan)
    written = keys.any(-1)
    assert written[1, :, 1].all()
    assert not written[1, :, [0, 2, 3]].any()
    assert not written[2].any()
    assert torch.isfinite(paged_attention(torch.ones(3, 2, 8), keys, keys, plan)).all()
