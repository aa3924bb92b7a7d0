from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.cache import CacheSize, KvCache, block_bytes, fit_cache, fit_host
from chairlift.runner.machine import available_memory, usable_cores

MODEL = ModelConfig.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
    }
)
EACH = block_bytes(MODEL, 16, torch.float32)
ONE = 63
"""Blocks of 16 tokens that 1000 tokens need."""


def fitted(available: int = 10**12, **settings: int) -> CacheSize:
    return fit_cache(EngineConfig(**{"max_num_seqs": 4} | settings), MODEL, torch.float32, available)


def test_a_block_counts_keys_and_values_of_all_layers():
    assert EACH == 2 * 2 * 2 * 16 * 8 * 4


def test_the_default_is_a_quarter_of_memory_but_no_more_than_can_be_used():
    assert fitted() == CacheSize(4 * ONE + 1, 1000)
    assert fitted(4 * EACH * 100) == CacheSize(101, 1000)


def test_one_full_sequence_may_take_more_than_a_quarter():
    assert fitted(EACH * 100) == CacheSize(ONE + 1, 1000)


def test_length_shrinks_to_what_fits_unless_it_was_asked_for():
    assert fitted(EACH * 40) == CacheSize(36, 35 * 16)
    assert fitted(num_kv_blocks=11) == CacheSize(11, 160)
    with pytest.raises(InvalidSetting, match=r"--max-model-len 900 needs 57 blocks .* gives 10: at most 160 tokens"):
        fitted(num_kv_blocks=11, max_model_len=900)


def test_blocks_and_bytes_are_taken_at_their_word():
    assert fitted(num_kv_blocks=5000) == CacheSize(5000, 1000)
    assert fitted(kv_cache_memory_bytes=EACH * 70 + 1) == CacheSize(70, 1000)
    assert fitted(num_kv_blocks=20, max_model_len=304) == CacheSize(20, 304)


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 1}, {"kv_cache_memory_bytes": EACH}, {"available": EACH}])
def test_too_little_for_any_sequence_is_refused(settings):
    with pytest.raises(InvalidSetting, match=f"a block takes {EACH} bytes"):
        fitted(**settings)


def test_a_length_that_the_model_was_not_made_for_is_refused():
    with pytest.raises(InvalidSetting, match="made for 1000 positions"):
        fitted(max_model_len=1001)


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


def test_timing_a_swap_changes_nothing():
    cache = KvCache(MODEL, 6, 4, torch.float32, torch.device("cpu"), 20)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    before = cache.tensor.clone()
    assert cache.time_swap() >= 1
    assert torch.equal(cache.tensor, before)


def test_the_host_has_as_many_blocks_as_fit():
    def fitted_host(space: int) -> int:
        return fit_host(EngineConfig(swap_space=space), MODEL, torch.float32, 10 * EACH)

    assert [fitted_host(space) for space in (0, EACH, 3 * EACH - 1, 10 * EACH)] == [0, 1, 2, 10]
    with pytest.raises(InvalidSetting, match=f"--swap-space {EACH - 1} does not hold a block of 16 tokens, which takes {EACH} bytes"):
        fitted_host(EACH - 1)
    with pytest.raises(InvalidSetting, match=f"--swap-space {11 * EACH}: there are 0.0 GiB"):
        fitted_host(11 * EACH)


def test_more_memory_than_there_is_is_refused_with_the_number():
    with pytest.raises(InvalidSetting, match="lower --num-kv-blocks"):
        KvCache(MODEL, 2**45, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(InvalidSetting, match="lower --swap-space"):
        KvCache(MODEL, 2, 16, torch.float32, torch.device("cpu"), 2**45)


def test_the_machine_has_cores_and_memory():
    assert usable_cores() >= 1
    assert 2**20 < available_memory(torch.device("cpu")) < 2**50
    assert Path("/proc/cpuinfo").exists() is False or usable_cores() <= Path("/proc/cpuinfo").read_text().count("processor\t")
