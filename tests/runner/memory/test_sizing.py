import numpy as np
import pytest
from model_sizes import GIB, LARGE, MIB, MODEL, SMALL

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.memory.precision import Precision, decide, weight_bytes
from chairlift.runner.memory.sizing import HostBudget, Size, block_bytes, fit, fit_host, step_bytes, tile_step_tokens

EACH = block_bytes(MODEL, 16, "float32")
ONE = 63
"""Blocks of 16 tokens that 1000 tokens of MODEL need."""
HYBRID = ModelConfig.parse(
    SMALL
    | {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
)
LARGE_TOKEN = 2 * 32 * 8 * 128 * 4


def fitted(available: int = 10**12, model: ModelConfig = MODEL, **settings: int) -> Size:
    return fit(EngineConfig(**settings), model, "float32", available)


def cache(size: Size) -> tuple[int, int]:
    return size.num_blocks, size.max_model_len


def test_a_block_counts_keys_and_values_of_all_layers():
    # Keys of 8 numbers, and values that are padded to 16.
    assert EACH == 2 * 2 * 16 * (8 + 16) * 4
    assert block_bytes(MODEL, 16, "float16") == block_bytes(MODEL, 16, "bfloat16") == EACH // 2


def test_a_block_in_int8_has_a_scale_for_each_head_and_token():
    assert block_bytes(MODEL, 16, "int8") == 2 * 2 * 16 * (8 + 16 + 2 * 4)
    assert block_bytes(MODEL, 1, "int8") == 2 * 2 * 64


def test_the_default_is_what_can_be_used_but_at_most_a_quarter_of_memory():
    assert cache(fitted(max_num_seqs=4)) == (4 * ONE + 1, 1000)
    assert cache(fitted(256 * GIB, LARGE)) == (64 * GIB // (16 * LARGE_TOKEN) + 1, 131_072)


def test_one_full_sequence_may_take_more_than_a_quarter():
    assert cache(fitted(48 * GIB, LARGE)) == (131_072 // 16 + 1, 131_072)


def test_length_shrinks_to_what_fits_unless_it_was_asked_for():
    size = fitted(4 * GIB, LARGE)
    assert size.max_model_len == (size.num_blocks - 1) * 16
    assert 2.9 * GIB < size.max_model_len * LARGE_TOKEN < 3.5 * GIB
    assert cache(fitted(num_kv_blocks=11)) == (11, 160)
    with pytest.raises(InvalidSetting, match=r"--max-model-len 900 needs 57 blocks .* gives 10: at most 160 tokens"):
        fitted(num_kv_blocks=11, max_model_len=900)
    with pytest.raises(InvalidSetting, match=r"--max-model-len 131072 needs 8192 .* but 4.0 GiB of free memory gives"):
        fitted(4 * GIB, LARGE, max_model_len=131_072)


def test_blocks_and_bytes_are_taken_at_their_word():
    assert cache(fitted(num_kv_blocks=5000)) == (5000, 1000)
    assert cache(fitted(kv_cache_memory_bytes=EACH * 70 + 1)) == (70, 1000)
    assert cache(fitted(num_kv_blocks=20, max_model_len=304)) == (20, 304)


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 1}, {"kv_cache_memory_bytes": EACH}, {"available": EACH}])
def test_too_little_for_any_sequence_is_refused(settings):
    with pytest.raises(InvalidSetting, match=f"two blocks of {EACH} bytes are needed"):
        fitted(**settings)


def test_a_length_that_the_model_was_not_made_for_is_refused():
    with pytest.raises(InvalidSetting, match="made for 1000 positions"):
        fitted(max_model_len=1001)


def test_steps_have_the_default_size_where_memory_is_not_short():
    size = fitted(8 * GIB, LARGE)
    assert (size.max_num_seqs, size.max_num_batched_tokens) == (64, 128)
    assert fitted(max_num_seqs=300).max_num_batched_tokens == 300
    assert fitted(max_num_batched_tokens=20).max_num_seqs == 20


def test_matrix_tiles_compute_larger_steps_of_small_models():
    def tokens(model: ModelConfig, compute: str = "float32", **settings: int) -> tuple[int, str]:
        default = tile_step_tokens(model, Precision("blocks", "none", "float32", compute))
        size = fit(EngineConfig(**settings), model, "float32", 8 * GIB, step_tokens=default)
        (why,) = (decision.reason for decision in size.decisions if decision.what == "tokens a step")
        return size.max_num_batched_tokens, why

    assert tokens(MODEL) == (256, "the default for a small model with matrix tiles")
    assert tokens(MODEL, "bfloat16") == (512, "the default for a small model with matrix tiles")
    assert tokens(LARGE) == (128, "the default")
    assert tokens(MODEL, max_num_seqs=300) == (300, "follows from the other")
    assert tokens(MODEL, max_num_batched_tokens=20) == (20, "--max-num-batched-tokens says so")


def test_steps_shrink_where_memory_is_short_but_not_what_was_asked_for():
    wide = ModelConfig.parse(SMALL | {"vocab_size": 1_000_000})
    size = fitted(600 * MIB, wide)
    assert (size.max_num_seqs, size.max_num_batched_tokens) == (4, 128)
    assert fitted(1200 * MIB, wide).max_num_seqs == 8
    assert fitted(600 * MIB, wide, max_num_seqs=6).max_num_seqs == 6
    assert fitted(600 * MIB, wide, static_batch_size=5, batching="static").max_num_seqs == 5
    deep = ModelConfig.parse(SMALL | {"intermediate_size": 150_000})
    size = fitted(600 * MIB, deep)
    assert (size.max_num_seqs, size.max_num_batched_tokens) == (64, 64)
    assert fitted(600 * MIB, deep, max_num_batched_tokens=100).max_num_batched_tokens == 100


def test_every_choice_has_its_reason():
    def reasons(size: Size) -> dict[str, str]:
        return {decision.what: f"{decision.value} ({decision.reason})" for decision in size.decisions}

    assert reasons(fitted(256 * GIB, LARGE)) == {
        "context length": "131072 tokens (what the model was made for)",
        "KV cache": "262144 tokens, 64.0 GiB (a quarter of the 256.0 GiB of free memory)",
        "sequences a step": "64 (the default)",
        "tokens a step": "128 (the default)",
    }
    short = reasons(fitted(600 * MIB, LARGE))
    assert short["KV cache"].endswith("(what is left of 0.6 GiB of free memory)")
    assert short["context length"].endswith("(what the KV cache holds; the model was made for 131072 tokens)")
    assert short["sequences a step"] == "32 (64 would need too much of 0.6 GiB of free memory)"
    assert reasons(fitted(48 * GIB, LARGE))["KV cache"].endswith("(one sequence of full length)")
    assert reasons(fitted(max_num_seqs=4))["KV cache"].endswith("(enough for 4 sequences of full length)")
    requested = reasons(fitted(max_num_seqs=4, max_num_batched_tokens=9, num_kv_blocks=20, max_model_len=300))
    assert requested == {
        "context length": "300 tokens (--max-model-len says so)",
        "KV cache": "304 tokens, 0 MiB (--num-kv-blocks says so)",
        "sequences a step": "4 (--max-num-seqs says so)",
        "tokens a step": "9 (--max-num-batched-tokens says so)",
    }


PROCESS = 400 * MIB
"""What a server and an engine have taken when the weights are loaded, beside these: 390 were measured."""


def random_model(rng: np.random.Generator) -> ModelConfig:
    """A model of any size there is, up to twice the KV for each token that the largest without grouped heads has."""
    while True:
        heads, head_dim = int(2 ** rng.integers(1, 8)), int(rng.choice([32, 64, 80, 96, 128, 256]))
        raw = {
            "vocab_size": int(np.exp(rng.uniform(np.log(256), np.log(1_000_000)))),
            "hidden_size": int(rng.integers(1, 65)) * 256,
            "intermediate_size": int(rng.integers(1, 209)) * 256,
            "num_hidden_layers": int(rng.integers(1, 127)),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // int(2 ** rng.integers(0, np.log2(heads) + 1)),
            "head_dim": head_dim,
            "max_position_embeddings": int(2 ** rng.integers(8, 21)),
            "tie_word_embeddings": bool(rng.integers(2)),
            "dtype": str(rng.choice(["float32", "float16", "bfloat16"])),
        }
        model = ModelConfig.parse(SMALL | raw)
        if block_bytes(model, 1, "float32") <= 10 * MIB:
            return model


@pytest.mark.parametrize("seed", range(20))
def test_any_model_starts_with_no_flags_where_its_weights_and_a_gib_are_free(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        model, config = random_model(rng), EngineConfig(device="cpu")
        form = model.dtype or "float32"
        weights = weight_bytes(model, form)
        free = weights + GIB + int(rng.integers(2)) * int(rng.exponential(16 * GIB))
        precision = decide(config, model, free - PROCESS)
        assert (precision.weights, precision.quantization) == (form, "none")
        left = free - PROCESS - weights
        size = fit(config, model, precision.kv, left)
        assert size.max_num_batched_tokens >= size.max_num_seqs >= 1
        assert 1 <= size.max_model_len <= min(model.max_position_embeddings, (size.num_blocks - 1) * 16)
        used = size.num_blocks * block_bytes(model, 16, precision.kv)
        used += step_bytes(model, size.max_num_seqs, size.max_num_batched_tokens)
        assert used <= 0.9 * left
        assert used <= left - 128 * MIB


def test_the_host_has_as_many_blocks_as_fit():
    def fitted_host(space: int) -> int:
        return fit_host(EngineConfig(swap_space=space), MODEL, "float32", 10 * EACH)

    assert [fitted_host(space) for space in (0, EACH, 3 * EACH - 1, 10 * EACH)] == [0, 1, 2, 10]
    with pytest.raises(InvalidSetting, match=f"--swap-space {EACH - 1} does not hold a block of 16 tokens, which takes {EACH} bytes"):
        fitted_host(EACH - 1)
    with pytest.raises(InvalidSetting, match=f"--swap-space {11 * EACH}: there are 0.0 GiB"):
        fitted_host(11 * EACH)


def test_recurrent_states_share_the_memory_of_the_kv_cache():
    state, block = HYBRID.state_bytes, block_bytes(HYBRID, 16, "float32")
    assert (state, block) == (4 * 3 * (3 * 128 + 4 * 16 * 16), 2 * 2 * 16 * 16 * 4)  # three layers of four are recurrent
    ample = fitted(model=HYBRID, max_num_seqs=4)
    assert (ample.max_num_seqs, ample.state_slots, ample.num_blocks) == (4, 24, 4 * ONE + 1)
    few = fitted(model=HYBRID, kv_cache_memory_bytes=20 * state)
    assert (few.max_num_seqs, few.state_slots, few.num_blocks) == (3, 10, 10 * state // block)
    asked_for = fitted(model=HYBRID, kv_cache_memory_bytes=20 * state, max_num_seqs=10)
    assert (asked_for.max_num_seqs, asked_for.state_slots) == (10, 10)
    assert fitted(model=HYBRID, num_kv_blocks=100).state_slots == 6 * 64
    one = fitted(model=HYBRID, kv_cache_memory_bytes=state + 2 * block)
    assert (one.max_num_seqs, one.state_slots, one.num_blocks) == (1, 1, 2)
    assert fitted(max_num_seqs=4).state_slots == 0


def test_memory_that_does_not_hold_the_states_is_refused_with_what_would_fit():
    state = HYBRID.state_bytes
    for given in (state - 1, state + 8191):
        with pytest.raises(
            InvalidSetting, match=rf"does not hold one sequence: its recurrent state and two KV blocks take {state + 8192} bytes"
        ):
            fitted(model=HYBRID, kv_cache_memory_bytes=given)
    with pytest.raises(InvalidSetting, match=rf"--max-num-seqs 16 needs as many recurrent states, each of {state} bytes, but .* gives 10"):
        fitted(model=HYBRID, kv_cache_memory_bytes=20 * state, max_num_seqs=16)


def test_sizes_that_cannot_fit_are_refused_before_the_weights_are_loaded():
    def check(**settings: int) -> None:
        HostBudget(1).check(EngineConfig(**settings), MODEL, Precision("float32", "none", "float32"))

    check(max_model_len=MODEL.longest_context)
    for settings, message in (
        ({"max_model_len": MODEL.longest_context + 1}, "the model was made for"),
        ({"kv_cache_memory_bytes": 1000}, r"two blocks of \d+ bytes are needed"),
        ({"num_kv_blocks": 1}, r"two blocks of \d+ bytes are needed"),
        ({"swap_space": 1}, "does not hold a block"),
        ({"swap_space": 10**14}, "--swap-space 100000000000000: there are"),
        ({"max_num_seqs": 10**9}, r"--max-num-seqs 1000000000: such a step takes \S+ GiB, and there is \S+ GiB of free memory"),
        ({"max_num_seqs": 10**9, "num_kv_blocks": 100}, "--max-num-seqs 1000000000: such a step takes"),
        ({"static_batch_size": 10**9, "batching": "static"}, "--static-batch-size 1000000000: such a step takes"),
        ({"max_num_batched_tokens": 10**9}, "--max-num-batched-tokens 1000000000: such a step takes"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            check(**settings)
