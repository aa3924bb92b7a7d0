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
