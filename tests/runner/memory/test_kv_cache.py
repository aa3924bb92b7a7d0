from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chairlift.errors import InvalidSetting
from chairlift.models.shape import KvSpec
from chairlift.runner.memory.kv_cache import KvCache, host_pool

SPECS = (KvSpec(2, 8, 8), KvSpec(1, 24, 16, 9), KvSpec(2, 8, 4))


def filled(host_blocks: int = 0) -> KvCache:
    cache = KvCache(SPECS, 6, 4, torch.float32, torch.device("cpu"), host_blocks)
    for part in cache.layers:
        for tensor in part:
            tensor.copy_(torch.randn(tensor.shape))
    return cache


def test_layers_have_keys_and_values_of_their_own_shapes_and_a_block_of_all_is_one_row():
    cache = filled()
    for spec, (keys, values) in zip(SPECS, cache.layers, strict=True):
        assert keys.shape == (6, spec.kv_heads, 4, spec.head_dim)
        assert values.shape == (6, spec.kv_heads, 4, spec.value_dim)
        assert keys.stride()[1:] == (4 * spec.head_dim, spec.head_dim, 1)
    assert torch.equal(cache.tensor[3], torch.cat([part[3].flatten() for layer in cache.layers for part in layer]))
    assert cache.tensor.stride() == (cache.tensor.shape[1], 1)


def test_copies_take_a_block_of_every_layer():
    cache = filled()
    before = cache.tensor.clone()
    cache.copy(np.array([[1, 4], [2, 5]], dtype=np.int32))
    assert torch.equal(cache.tensor[[4, 5]], before[[1, 2]])
    assert torch.equal(cache.tensor[:4], before[:4])


def test_what_is_swapped_out_comes_back_bit_for_bit_wherever_it_is_put():
    cache = filled(host_blocks=4)
    before = cache.tensor.clone()
    cache.swap([(1, 3), (4, 0)], [])
    cache.tensor[[1, 4]] = float("nan")
    # In one step: block 2 goes to the host before the others come back, one of them into its place.
    cache.swap([(2, 1)], [(3, 2), (0, 1)])
    assert torch.equal(cache.tensor[[2, 1]], before[[1, 4]])
    assert torch.equal(cache.tensor[[0, 3, 5]], before[[0, 3, 5]])
    cache.swap([], [(1, 4)])
    assert torch.equal(cache.tensor[4], before[2])


def test_more_memory_than_there_is_is_refused_with_the_number():
    with pytest.raises(InvalidSetting, match="lower --num-kv-blocks"):
        KvCache(SPECS, 2**45, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(InvalidSetting, match="lower --swap-space"):
        KvCache(SPECS, 2, 16, torch.float32, torch.device("cpu"), 2**45)


@pytest.mark.parametrize("status", [0, 2])
def test_swapped_blocks_take_the_memory_asked_for_and_are_page_locked_if_the_driver_allows(status, monkeypatch, caplog):
    locked, freed = [], []
    driver = SimpleNamespace(cudaHostRegister=lambda *given: locked.append(given) or status, cudaHostUnregister=freed.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pool = host_pool(3, 5, torch.float32, pinned=True)
    place = pool.data_ptr()
    # torch's own page-locked memory would be 64 bytes.
    assert (pool.untyped_storage().nbytes(), locked) == (60, [(place, 60, 0)])
    del pool
    assert freed == ([] if status else [place])
    assert ("swapping will be slow: cannot page-lock 0.0 GiB (CUDA error 2); lower --swap-space" in caplog.text) == bool(status)
