"""Settings: what cannot work is refused with the name of its flag."""

import pytest

from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig
from chairlift.settings import from_environment, parse_value


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_static_batch_may_be_larger_than_the_default_batch_of_any_device(device):
    assert EngineConfig(device=device, batching="static", static_batch_size=300).slots == 300


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scheduling_policy": "lifo"}, "--scheduling-policy: expected one of fcfs, priority, .*, got 'lifo'"),
        ({"batching": "bus"}, "--batching: expected one of continuous, static, dynamic, got 'bus'"),
        ({"static_batch_size": 4}, "--static-batch-size needs --batching static or --batching dynamic"),
        ({"batching": "static", "static_batch_size": 0}, "--static-batch-size must be at least 1"),
        (
            {"batching": "static", "static_batch_size": 65, "max_num_seqs": 64},
            r"--static-batch-size \(65\) must be at most --max-num-seqs \(64\)",
        ),
        ({"batching": "static", "batch_timeout_ms": 5.0}, "--batch-timeout-ms needs --batching dynamic"),
        ({"batching": "dynamic", "batch_timeout_ms": -1.0}, "--batch-timeout-ms must be above 0 .* got -1"),
        ({"max_num_queued_reqs": 0}, "--max-num-queued-reqs must be at least 1"),
        ({"max_num_queued_tokens": 0}, "--max-num-queued-tokens must be at least 1"),
        ({"queue_ageing_ms": 0.0}, "--queue-ageing-ms must be above 0"),
        ({"queue_ageing_ms": float("nan")}, "--queue-ageing-ms must be above 0"),
        ({"target_itl_ms": 0.0}, "--target-itl-ms must be above 0"),
        ({"gather_ms": 5.0, "batching": "static"}, "--gather-ms needs --batching continuous"),
        ({"background_slowdown": 0.9}, "--background-slowdown must be at least 1 and at most 1000, got 0.9"),
        ({"background_slowdown": float("nan")}, "--background-slowdown must be at least 1"),
        ({"target_itl_ms": float("inf")}, "--target-itl-ms .* at most 1e.10"),
        ({"swap_space": -1}, "--swap-space must be at least 0"),
        ({"watermark": 1.0}, "--watermark must be at least 0 and below 1"),
        ({"watermark": float("nan")}, "--watermark must be at least 0"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"dtype": "int8"}, "--dtype: expected one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"quantization": "int4"}, "--quantization: expected one of auto, none, int8, fp8, got 'int4'"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype: expected one of auto, float32, float16, bfloat16, int8, fp8, got 'fp4'"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"--max-num-batched-tokens \(8\) must be at least --max-num-seqs \(9\)"),
        ({"model": "/m\udcff"}, "--model: expected text in UTF-8"),
        ({"tenant_weights": {"a\udcff": 2}}, "--tenant-weights: expected text in UTF-8"),
        ({"enable_lora": True, "lora_modules": {"a": "/m\udcff"}}, "--lora-modules: expected text in UTF-8"),
        ({"tenant_weights": {"a": 0}}, "--tenant-weights: a's must be an integer from 1 to 10000, got 0"),
        ({"tenant_weights": {"a": 10_001}}, "--tenant-weights: a's must be"),
    ],
)
def test_a_setting_that_cannot_work_is_named_by_its_flag(settings, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "slots", "tokens"),
    [
        ({}, 64, 128),
        ({"max_num_seqs": 4}, 4, 128),
        ({"device": "cuda"}, 256, 2048),
        ({"device": "cuda", "max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_seqs": 500}, 500, 500),
        ({"max_num_batched_tokens": 32}, 32, 32),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 70}, 70, 100),
    ],
)
def test_the_size_of_a_step_follows_what_was_said_of_it(settings, slots, tokens):
    config = EngineConfig(**settings)
    assert (config.slots, config.step_tokens) == (slots, tokens)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none(port):
    with pytest.raises(ValueError, match=f"--port must be at (least 0|most 65535), got {port}"):
        ServerConfig(port=port)
    assert ServerConfig(port=65535).port == 65535


def test_the_environment_has_them_all_in_their_own_words():
    found = from_environment(
        EngineConfig,
        EngineConfig.__dataclass_fields__,
        {
            "CHAIRLIFT_SCHEDULING_POLICY": "fair",
            "CHAIRLIFT_TENANT_WEIGHTS": "alice=2, bob=1,a=b=3",
            "CHAIRLIFT_BATCHING": "dynamic",
            "CHAIRLIFT_STATIC_BATCH_SIZE": "8",
            "CHAIRLIFT_BATCH_TIMEOUT_MS": "2.5",
            "CHAIRLIFT_MAX_NUM_QUEUED_TOKENS": "1M",
            "CHAIRLIFT_SWAP_SPACE": "2GiB",
            "CHAIRLIFT_WATERMARK": "0",
            "CHAIRLIFT_JOURNAL": "/tmp/j",
            "CHAIRLIFT_THREADS": "3",
            "CHAIRLIFT_DTYPE": "bfloat16",
            "CHAIRLIFT_QUANTIZATION": "int8",
            "CHAIRLIFT_KV_CACHE_DTYPE": "float16",
        },
    )
    assert EngineConfig(**found) == EngineConfig(
        scheduling_policy="fair",
        tenant_weights={"alice": 2, "bob": 1, "a=b": 3},
        batching="dynamic",
        static_batch_size=8,
        batch_timeout_ms=2.5,
        max_num_queued_tokens=2**20,
        swap_space=2 * 2**30,
        watermark=0.0,
        journal="/tmp/j",
        threads=3,
        dtype="bfloat16",
        quantization="int8",
        kv_cache_dtype="float16",
    )


@pytest.mark.parametrize("text", ["", "alice", "alice=", "=2", "alice=two", "alice=1.5", "alice=-1", "alice=1,"])
def test_weights_that_are_none_are_shown_what_they_look_like(text):
    field = EngineConfig.__dataclass_fields__["tenant_weights"]
    with pytest.raises(ValueError, match="expected weights like alice=2,bob=1"):
        parse_value(field.metadata, field.type, text)


def test_paths_of_a_server_have_their_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = ServerConfig(uds="~/s", admin_socket="~/a", ssl_certfile="~/c", ssl_keyfile="~/k", usage_log="~/u", data_dir="~/d")
    paths = (config.uds, config.admin_socket, config.ssl_certfile, config.ssl_keyfile, config.usage_log, config.data_dir)
    assert paths == tuple(f"/home/me/{letter}" for letter in "sackud")
