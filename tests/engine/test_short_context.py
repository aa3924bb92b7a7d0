"""A KV cache that makes the context too short is warned of, in the words of the flag that made it so."""

import logging

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.engine.engine_info import EngineInfo, warn_of_short_context


def test_a_cache_of_three_blocks_is_warned_of(byte_model, caplog):
    with caplog.at_level(logging.WARNING, "chairlift"):
        LLM(str(byte_model), load_format="dummy", device="cpu", num_kv_blocks=4)
    assert "the KV cache holds only 48 tokens" in caplog.text
    assert "raise --num-kv-blocks, which is 4" in caplog.text


@pytest.mark.parametrize(
    ("settings", "context", "says"),
    [
        ({"kv_cache_memory_bytes": 5000}, 48, "raise --kv-cache-memory-bytes, which is 5000"),
        ({}, 48, "free some memory"),
        ({"num_kv_blocks": 4}, 32, ""),  # the model was made for no more
        ({"num_kv_blocks": 4, "max_model_len": 48}, 48, ""),
        ({"num_kv_blocks": 100}, 1584, ""),
    ],
)
def test_the_warning_names_the_limit(settings, context, says, caplog):
    config = EngineConfig(**settings)
    blocks = (config.num_kv_blocks or 4) - 1
    warn_of_short_context(config, EngineInfo(max_model_len=context, num_kv_blocks=blocks, block_size=16))
    assert says in caplog.text
    assert bool(says) == bool(caplog.records)
