from dataclasses import replace

import numpy as np
import pytest
import torch
from test_sizing import MODEL

from chairlift.errors import InvalidSetting
from chairlift.runner.cache import KvCache


def test_copies_take_a_block_of_every_layer():
    cache = KvCache(replace(MODEL, num_layers=3), 6, 4, torch.float32, torch.device("cpu"))
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    before = cache.tensor.clone()
    cache.copy(np.array([[1, 4], [2, 5]], dtype=np.int32))
    assert torch.equal(cache.tensor[:, [4, 5]], before[:, [1, 2]])
    assert torch.equal(cache.tensor[:, :4], before[:, :4])


def test_what_is_swapped_out_comes_back_bit_for_bit_wherever_it_is_put():
    cache = KvCache(replace(MODEL, num_layers=3), 6, 4, torch.float32, torch.device("cpu"), 4)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    before = cache.tensor.clone()
    cache.swap([(1, 3), (4, 0)], [])
    cache.tensor[:, [1, 4]] = float("nan")
    # In one step: block 2 goes to the host before the others come back, one of them into its place.
    cache.swap([(2, 1)], [(3, 2), (0, 1)])
    assert torch.equal(cache.tensor[:, [2, 1]], before[:, [1, 4]])
    assert torch.equal(cache.tensor[:, [0, 3, 5]], before[:, [0, 3, 5]])
    cache.swap([], [(1, 4)])
    assert torch.equal(cache.tensor[:, 4], before[:, 2])


def test_more_memory_than_there_is_is_refused_with_the_number():
    with pytest.raises(InvalidSetting, match="lower --num-kv-blocks"):
        KvCache(MODEL, 2**45, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(InvalidSetting, match="lower --swap-space"):
        KvCache(MODEL, 2, 16, torch.float32, torch.device("cpu"), 2**45)
