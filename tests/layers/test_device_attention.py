import numpy as np
import pytest
import torch

from chairlift.layers.device_attention import DevicePlan


@pytest.mark.parametrize("first", [20, 1024, None])
def test_memory_for_parts_suffices_whichever_layer_asks_first(first):
    windows, context = [20, 1024, None], 2000
    positions = np.array([context - 1], dtype=np.int32)
    starts, lens = np.array([0, 1], dtype=np.int32), np.array([context], dtype=np.int32)
    plan = DevicePlan.send(positions, starts, lens, np.zeros((1, 125), dtype=np.int32), windows=windows, device=torch.device("cpu"))
    assert len({work.parts for work in plan.decodes.values()}) == 3
    memory = set()
    for window in (first, *windows):
        count = plan.decodes[window].parts
        parts, lses = plan.part_buffers(count, 3, 8)
        memory.add(parts.untyped_storage().data_ptr())
        assert len(parts) == count * 3 * 8
        assert len(lses) >= count * 3
    assert len(memory) == 1


@pytest.mark.parametrize(("at_once", "splits"), [(1, 1), (2, 1), (4, 2), (1000, 4)])
def test_contexts_are_split_while_that_gives_a_device_more_to_do(at_once, splits):
    """Two contexts of 2,000 tokens."""
    positions = np.array([1999, 1999], dtype=np.int32)
    starts, lens = np.array([0, 1, 2], dtype=np.int32), np.array([2000, 2000], dtype=np.int32)
    tables = np.zeros((2, 125), dtype=np.int32)
    plan = DevicePlan.send(positions, starts, lens, tables, windows=[None], device=torch.device("cpu"), at_once=at_once)
    assert plan.decodes[None].units == 2 * splits
