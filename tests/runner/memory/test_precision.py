from dataclasses import dataclass, fields, replace

import pytest
from model_sizes import GIB, LARGE, MIB, MODEL, SMALL

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.models.quantization import QuantizationScheme
from chairlift.models.shape import ModelShape
from chairlift.runner.memory.precision import ROOM, Bf16Products, Precision, decide, torch_weight_bytes, weight_bytes
from chairlift.runner.tensor_parallel.split import part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirShape(ModelShape):
    """A model that there is no code of ours for."""

    kv_specs = ()
    num_weights = 1


def decided(
    available: int = 10**12, dtype: str | None = "float32", model=MODEL, blocks: tuple[int, int] = (0, 0), **settings: str
) -> Precision:
    return decide(EngineConfig(**{"device": "cpu"} | settings), replace(model, dtype=dtype), available, blocks)


def reasons(precision: Precision) -> dict[str, str]:
    return {decision.what: f"{decision.value}: {decision.reason}" for decision in precision.decisions}


@pytest.mark.parametrize(
    ("checkpoint", "kept"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float32")]
)
def test_a_cpu_loses_nothing_of_weights_and_kv(checkpoint, kept):
    assert decided(dtype=checkpoint) == Precision(kept, "none", "float32")


def test_blocks_of_a_gguf_file_are_kept_as_they_are():
    kept = decided(blocks=(101 * MIB, 0))
    assert kept == Precision("blocks", "none", "float32")
    assert reasons(kept)["weights"] == "blocks: the checkpoint's own; 101 MiB of the 931.3 GiB of free memory"
    assert decided(blocks=(100 * MIB, MIB), quantization="int8") == Precision("blocks", "int8", "float32")
    assert decide(EngineConfig(device="cpu", dtype="float16"), MODEL, 10**12, (100 * MIB, MIB)) == Precision("float16", "none", "float32")


def test_what_was_asked_for_wins():
    assert decided(dtype="bfloat16", kv_cache_dtype="int8", quantization="int8") == Precision("bfloat16", "int8", "int8")
    tight = decided(0, kv_cache_dtype="float16", quantization="none")
    assert tight == Precision("float16", "none", "float16")
    assert decided(ROOM, dtype="bfloat16") == Precision("bfloat16", "int8", "float32")


def test_fast_math_has_8_bits_and_kv_in_16_bits():
    fast = decided(dtype="bfloat16", cpu_math="fast")
    assert fast == Precision("bfloat16", "int8", "float16")
    assert reasons(fast) == {
        "weights": "int8: --cpu-math says so",
        "arithmetic": "int8: activations of 8 bits, as the weights",
        "KV dtype": "float16: --cpu-math says so",
    }
    assert decided(dtype="bfloat16", cpu_math="fast", quantization="none", kv_cache_dtype="int8") == Precision("bfloat16", "none", "int8")


def test_fast_math_computes_attention_in_bfloat16_where_the_processor_multiplies_it():
    def fast(**settings) -> str:
        return decide(EngineConfig(device="cpu", cpu_math="fast", **settings), MODEL, 10**12, bf16="vectors").kv

    assert fast() == "bfloat16"
    assert fast(block_size=9) == "float16"
    assert fast(kv_cache_dtype="float16") == "float16"
    assert decide(EngineConfig(device="cpu"), MODEL, 10**12, bf16="vectors").kv == "float32"
    with pytest.raises(InvalidSetting, match="this instruction set does not multiply bfloat16; float16 takes as little"):
        decide(EngineConfig(device="cpu", kv_cache_dtype="bfloat16"), MODEL, 10**12)
    with pytest.raises(InvalidSetting, match="blocks must have an even size"):
        decide(EngineConfig(device="cpu", kv_cache_dtype="bfloat16", block_size=9), MODEL, 10**12, bf16="vectors")


def test_fast_math_multiplies_in_bfloat16_where_the_processor_has_matrix_tiles():
    def fast(checkpoint: str = "float16", available: int = 10**12, blocks: tuple[int, int] = (0, 0), **settings) -> Precision:
        model = replace(MODEL, dtype=checkpoint)
        return decide(EngineConfig(device="cpu", cpu_math="fast", **settings), model, available, blocks, bf16="tiles")

    assert fast() == Precision("bfloat16", "none", "bfloat16", "bfloat16")
    assert fast(blocks=(100 * MIB, MIB)) == Precision("blocks", "none", "bfloat16", "bfloat16")
    assert reasons(fast())["weights"] == "bfloat16: --cpu-math says so: products in bfloat16"
    assert fast(quantization="int8") == Precision("float16", "int8", "bfloat16")
    assert fast(available=ROOM) == Precision("float16", "int8", "bfloat16")
    assert fast(dtype="float32") == Precision("float32", "none", "bfloat16")


def with_byte_products(*, bf16: Bf16Products = "vectors", checkpoint: str = "float32", blocks=(100 * MIB, MIB), **settings) -> Precision:
    model = replace(MODEL, dtype=checkpoint)
    return decide(EngineConfig(device="cpu", **settings), model, 10**12, blocks, bf16=bf16, byte_products=True)


def test_blocks_are_multiplied_by_activations_of_16_bits_where_bytes_are_and_tiles_are_not():
    short = with_byte_products()
    assert short == Precision("blocks", "none", "float16", "int16")
    assert short.packed == "int16"
    assert reasons(short)["arithmetic"] == "int16: 16 bits of each activation, faster than 24 (--cpu-math exact)"
    assert with_byte_products(bf16="tiles") == Precision("blocks", "none", "float32")
    assert with_byte_products(blocks=(0, 0)) == Precision("float32", "none", "float32")
    assert with_byte_products(quantization="int8").packed == "int8"


def test_exact_math_rounds_nothing_and_a_dtype_prevails():
    exact = with_byte_products(cpu_math="exact")
    assert exact == Precision("blocks", "none", "float32")
    assert exact.packed == "kept"
    assert with_byte_products(dtype="float16") == Precision("float16", "none", "float32")
    assert with_byte_products(kv_cache_dtype="float32") == Precision("blocks", "none", "float32", "int16")


def test_16_bits_by_name_are_for_tiles_too():
    assert with_byte_products(bf16="tiles", cpu_math="int16") == Precision("blocks", "none", "float16", "int16")
    bf16 = with_byte_products(bf16="tiles", cpu_math="int16", checkpoint="bfloat16", blocks=(0, 0))
    assert bf16 == Precision("bfloat16", "none", "float16", "int16")
    vectors = with_byte_products(cpu_math="int16", checkpoint="bfloat16", blocks=(0, 0))
    assert vectors == Precision("bfloat16", "none", "float32")
    assert reasons(vectors)["arithmetic"].startswith("float32: no activation is rounded: --cpu-math int16 is for a GGUF file's blocks")
    with pytest.raises(InvalidSetting, match="--cpu-math int16: this instruction set does not multiply bytes"):
        decided(cpu_math="int16")
    for other in ({"quantization": "int8"}, {"dtype": "float32"}):
        with pytest.raises(InvalidSetting, match="leave out --quantization and --dtype"):
            with_byte_products(cpu_math="int16", **other)


def test_the_help_names_the_arithmetic_that_changes_the_kv():
    text = next(field.metadata["help"] for field in fields(EngineConfig) if field.name == "kv_cache_dtype")
    assert with_byte_products(cpu_math="exact").kv == "float32"
    for arithmetic in ("int16", "fast"):
        assert with_byte_products(cpu_math=arithmetic).kv in ("float16", "bfloat16")
        assert f"'{arithmetic}'" in text


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16"])
def test_a_form_that_was_asked_for_is_not_quantised_for_want_of_memory(form):
    config = EngineConfig(device="cpu", dtype=form)
    assert decide(config, MODEL, 0) == Precision(form, "none", "float32")


def test_weights_are_quantised_where_they_would_not_fit_otherwise():
    whole, half = weight_bytes(LARGE, "float32"), weight_bytes(LARGE, "float16")
    assert decided(whole + ROOM, model=LARGE) == Precision("float32", "none", "float32")
    assert decided(whole + ROOM - 1, model=LARGE) == Precision("float16", "none", "float32")
    assert decided(half + ROOM, model=LARGE).quantization == "none"
    short = decided(half + ROOM - 1, model=LARGE)
    assert short.quantization == "int8"
    assert reasons(short)["weights"] == "int8: in float16 the weights would take 15.0 GiB, and 15.5 GiB of memory are free"


def test_a_gguf_file_of_mixed_types_is_counted_as_what_it_becomes():
    mixed = (GIB, 29 * GIB)
    assert decided(30 * GIB + ROOM, model=LARGE, blocks=mixed) == Precision("blocks", "none", "float32")
    assert "float32 where it has other types, 29.0 GiB of it; 30.0 GiB of" in reasons(decided(model=LARGE, blocks=mixed))["weights"]
    assert decided(30 * GIB, model=LARGE, blocks=mixed).quantization == "int8"


def test_what_fits_in_no_form_is_refused():
    with pytest.raises(InvalidSetting, match=r"the weights take 15.0 GiB, in int8 7.9 GiB, and 7.8 GiB of memory are free"):
        decided(int(7.8 * GIB), model=LARGE)
    assert decided(0, model=LARGE, quantization="int8").quantization == "int8"


def test_weights_are_counted():
    # 8.03 billion numbers, as the model's card says.
    numbers = weight_bytes(LARGE, "float16") // 2
    assert numbers == 8_030_261_248
    assert weight_bytes(LARGE, "float32") == 4 * numbers
    assert weight_bytes(LARGE, "int8") == numbers + numbers // 32 * 2
    tied = replace(LARGE, tie_word_embeddings=True)
    assert weight_bytes(LARGE, "float16") - weight_bytes(tied, "float16") == 2 * 128_256 * 4096


def test_reasons_say_what_it_costs():
    assert reasons(decided(3 * GIB)) == {
        "weights": "float32: as in the checkpoint; float16 takes half the memory and traffic (--dtype); "
        "0 MiB of the 3.0 GiB of free memory",
        "arithmetic": "float32: no activation is rounded",
        "KV dtype": "float32: exact; float16 takes half as much memory, int8 a bit more than a quarter (--kv-cache-dtype)",
    }
    requested = reasons(decided(dtype="bfloat16", quantization="int8", kv_cache_dtype="int8"))
    assert requested == {
        "weights": "int8: --quantization says so",
        "arithmetic": "int8: activations of 8 bits, as the weights",
        "KV dtype": "int8: --kv-cache-dtype says so",
    }
    large = decide(EngineConfig(device="cpu", dtype="float32"), LARGE, 700 * MIB)
    assert reasons(large)["weights"] == "float32: --dtype says so; 29.9 GiB, though 0.7 GiB of memory are free"


@pytest.mark.parametrize(
    ("checkpoint", "kept"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), (None, "bfloat16")]
)
def test_a_cuda_device_keeps_all_as_the_checkpoint_does(checkpoint, kept):
    assert decided(dtype=checkpoint, device="cuda") == Precision(kept, "none", kept, kept)


SQUARED = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "ArceeForCausalLM"])
def test_activations_that_exceed_float16_are_in_bfloat16(architecture):
    model = ModelConfig.parse(SMALL | SQUARED) if architecture in SQUARED["architectures"] else replace(MODEL, architecture=architecture)
    for quantization, settings in ((None, {"device": "cuda"}), ("gptq", {"device": "cuda"}), ("gptq", {"device": "cpu"})):
        found = in_torch(model=replace(model, dtype="float16", quantization=quantization), **settings)
        assert (found.compute, found.kv) == ("bfloat16", "bfloat16")
    assert (
        reasons(decided(dtype="float16", device="cuda", model=model))["weights"] == "bfloat16: activations exceed float16's largest number"
    )
    for device in ("cuda", "cpu"):
        with pytest.raises(
            InvalidSetting, match=f"--dtype float16: activations of {architecture} exceed its largest number; take bfloat16"
        ):
            in_torch(model=model, device=device, dtype="float16")
    # Rust computes activations in float32.
    assert decide(EngineConfig(device="cpu", dtype="float16"), model, 10**12).weights == "float16"


def test_a_cuda_device_multiplies_a_gguf_file_out_to_16_bits():
    found = decide(EngineConfig(device="cuda"), MODEL, 10**12, is_gguf=True)
    assert found == Precision("bfloat16", "none", "bfloat16", "bfloat16")
    assert reasons(found)["weights"].startswith("bfloat16: a GGUF file's numbers, multiplied out; float32 rounds none")
    assert decide(EngineConfig(device="cuda", dtype="float32"), MODEL, 10**12, is_gguf=True).compute == "float32"
    assert decide(EngineConfig(device="cpu"), MODEL, 10**12, in_torch=True, is_gguf=True).compute == "float32"


def test_a_cuda_device_keeps_one_form_but_may_have_kv_in_8_bits():
    config = EngineConfig(device="cuda", dtype="float16", kv_cache_dtype="float16", quantization="none")
    assert decide(config, MODEL, 0) == Precision("float16", "none", "float16", "float16")
    assert decided(dtype="bfloat16", device="cuda", kv_cache_dtype="fp8") == Precision("bfloat16", "none", "fp8", "bfloat16")
    with pytest.raises(InvalidSetting, match=r"--kv-cache-dtype int8: torch stores KV in the weights' dtype, float32, or .* in fp8"):
        decided(device="cuda", kv_cache_dtype="int8")
    with pytest.raises(InvalidSetting, match="fp8 is for CUDA devices: int8 takes as little on a CPU"):
        decided(kv_cache_dtype="fp8")


def in_torch(available: int = 10**12, model=MODEL, **settings: str) -> Precision:
    return decide(EngineConfig(**{"device": "cpu"} | settings), model, available, in_torch=True)


def test_torch_on_a_cpu_has_fp32_where_it_fits():
    assert in_torch(model=replace(MODEL, dtype="bfloat16")) == Precision("float32", "none", "float32")
    whole, half = weight_bytes(LARGE, "float32"), weight_bytes(LARGE, "bfloat16")
    assert in_torch(whole + ROOM, LARGE).weights == "float32"
    short = in_torch(whole + ROOM - 1, LARGE)
    assert short == Precision("bfloat16", "none", "bfloat16", "bfloat16")
    assert reasons(short)["weights"].startswith("bfloat16: slower and less exact; in float32 they would take 29.9 GiB, and 30.4 GiB")
    with pytest.raises(InvalidSetting, match=r"the weights take 29.9 GiB, in bfloat16 15.0 GiB, and"):
        in_torch(half - 1, LARGE)
    assert in_torch(0, LARGE, dtype="float16") == Precision("float16", "none", "float16", "float16")


def test_torch_on_a_cpu_does_not_do_what_rust_does():
    for form in ("int8", "float16", "fp8"):
        with pytest.raises(InvalidSetting, match=f"--kv-cache-dtype {form}: torch stores KV in the weights' dtype, float32"):
            in_torch(kv_cache_dtype=form)


def test_torch_keeps_the_weights_of_layers_in_8_bits():
    half = replace(MODEL, dtype="float16")
    there = decided(dtype="float16", device="cuda", quantization="int8")
    assert there == Precision("float16", "int8", "float16", "float16")
    assert reasons(there) == {
        "weights": "int8, in float16: --quantization says so",
        "arithmetic": "float16: the dtype of activations",
        "KV dtype": "float16: the compute dtype",
    }
    assert in_torch(model=half, quantization="int8") == Precision("float32", "int8", "float32", "float32")
    # Products of fp8 are in bfloat16, whatever the checkpoint is in.
    both = decided(dtype="float16", device="cuda", quantization="fp8", kv_cache_dtype="fp8", model=LARGE)
    assert both == Precision("bfloat16", "fp8", "fp8", "bfloat16")
    # What is computed in on a CPU follows from what the weights take so.
    whole = torch_weight_bytes(LARGE, "int8", "float32")
    assert in_torch(whole + ROOM, LARGE, quantization="int8").compute == "float32"
    assert in_torch(whole + ROOM - 1, LARGE, quantization="int8").compute == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({}, replace(LARGE, intermediate_size=14340), "multiples of 16, not of 14340: take int8"),
        ({"dtype": "float16"}, LARGE, "computes in bfloat16, and not in float16: leave --dtype out"),
        ({}, replace(LARGE, quantization="gptq"), "the checkpoint is quantised already, with gptq"),
    ],
)
def test_what_fp8_cannot_be_is_refused(settings, model, message):
    with pytest.raises(InvalidSetting, match=f"--quantization fp8.* {message}"):
        decide(EngineConfig(device="cuda", quantization="fp8", **settings), model, 10**12)


def test_fp8_needs_a_device_that_multiplies_it():
    for device in (decided, in_torch):
        with pytest.raises(InvalidSetting, match="--quantization fp8 is for CUDA devices"):
            device(quantization="fp8", model=LARGE)
    with pytest.raises(
        InvalidSetting, match=r"--kv-cache-dtype fp8 needs a device of compute capability 8.9, and this one has 8.6: leave it out"
    ):
        decide(EngineConfig(device="cuda", kv_cache_dtype="fp8"), LARGE, 10**12, capability=(8, 6))
    with pytest.raises(InvalidSetting, match=r"needs a device of compute capability 8.9, and this one has 8.6: take int8"):
        decide(EngineConfig(device="cuda", quantization="fp8"), LARGE, 10**12, capability=(8, 6))
    assert decided(device="cuda", quantization="fp8", model=LARGE).quantization == "fp8"


def test_a_checkpoint_made_for_activations_in_fp8_gets_them_where_they_are_multiplied():
    scheme = QuantizationScheme("compressed-tensors", 8, per_token=True)
    model = replace(LARGE, dtype="bfloat16", quantization=scheme.name, scheme=scheme)

    def rounds(model, capability=(8, 9), **settings):
        return decide(EngineConfig(**{"device": "cuda"} | settings), model, 10**12, in_torch=True, capability=capability).rounds_activations

    assert rounds(model)
    # A part has 3600 inner columns.
    assert rounds(part_of(replace(model, intermediate_size=14400), 4), tensor_parallel_size=4)
    assert not rounds(model, (8, 6))
    assert not rounds(model, dtype="float16")
    assert not rounds(model, device="cpu")
    assert rounds(replace(model, intermediate_size=14352))
    assert not rounds(part_of(replace(model, intermediate_size=14352), 2), tensor_parallel_size=2)
    assert not rounds(replace(model, scheme=replace(scheme, per_token=False)))


def test_weights_of_8_bits_are_for_models_of_ours():
    names = [field.name for field in fields(ModelShape)]
    theirs = TheirShape(**{name: getattr(MODEL, name) for name in names})
    for form in ("int8", "fp8"):
        with pytest.raises(InvalidSetting, match=f"--quantization {form} is for Chairlift's own models"):
            decide(EngineConfig(device="cuda", quantization=form), theirs, 10**12)


def test_weights_in_torch_are_counted():
    # 8.03 billion numbers, of which 6.98 billion are in matrices of layers, and those have 1.3 million rows.
    matrices, rows = 32 * 4096 * (6144 + 4096 + 3 * 14336), 32 * (6144 + 4096 + 2 * 14336 + 4096)
    others = 8_030_261_248 - matrices
    assert torch_weight_bytes(LARGE, "bfloat16") == weight_bytes(LARGE, "bfloat16")
    assert torch_weight_bytes(LARGE, "int8") == torch_weight_bytes(LARGE, "fp8") == matrices + 4 * rows + 2 * others
    assert torch_weight_bytes(LARGE, "int8", "float32") == matrices + 4 * rows + 4 * others


MIXTURE = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def test_quantised_experts_are_counted_as_a_device_keeps_them():
    model = ModelConfig.parse(MIXTURE)
    # Two layers of eight experts, each with three matrices of 48 x 32.
    numbers, rows = 2 * 8 * 3 * 48 * 32, 2 * 8 * (48 + 48 + 32)
    saved = torch_weight_bytes(model, "int8") - torch_weight_bytes(model, "int8", packs_experts=True)
    assert saved == numbers - 4 * rows
    assert torch_weight_bytes(model, "bfloat16", packs_experts=True) == torch_weight_bytes(model, "bfloat16")
    scheme = QuantizationScheme("gptq", 4, group=16)
    packed = replace(model, quantization=scheme.name, scheme=scheme)
    saved = torch_weight_bytes(packed, scheme.name) - torch_weight_bytes(packed, scheme.name, packs_experts=True)
    # Half a byte a number, and three bytes for each 16.
    assert saved == 2 * numbers - numbers // 2 - numbers // 16 * 3
    oss = ModelConfig.parse(
        SMALL
        | {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    )
    numbers = 2 * 8 * 3 * 64 * 32
    assert torch_weight_bytes(oss, "bfloat16") - torch_weight_bytes(oss, "bfloat16", packs_experts=True) == 2 * numbers - numbers * 17 // 32


def test_layers_with_experts_have_no_other_mlp():
    model = ModelConfig.parse(MIXTURE)
    wide = replace(model, intermediate_size=14340)
    for form in ("bfloat16", "int8"):
        assert torch_weight_bytes(wide, form, packs_experts=True) == torch_weight_bytes(model, form, packs_experts=True)
    assert decide(EngineConfig(device="cuda", quantization="fp8"), wide, 10**12, in_torch=True, capability=(8, 9)).quantization == "fp8"


def test_experts_are_rounded_on_a_device_alone():
    model = ModelConfig.parse(MIXTURE)
    assert decide(EngineConfig(device="cuda", quantization="fp8"), model, 10**12, in_torch=True, capability=(8, 9)).quantization == "fp8"
    with pytest.raises(InvalidSetting, match="torch computes the experts of Qwen3MoeForCausalLM in 16 bits"):
        in_torch(quantization="int8", model=model)


def test_a_quantised_checkpoint_is_computed_with_in_its_own_dtype():
    model = replace(MODEL, quantization="gptq", dtype="float16")
    for device in ("cpu", "cuda"):
        kept = in_torch(0, model, device=device)
        assert kept == Precision("float16", "gptq", "float16", "float16")
        assert reasons(kept) == {
            "weights": "gptq, in float16: as in the checkpoint",
            "arithmetic": "float16: the dtype of activations",
            "KV dtype": "float16: the compute dtype",
        }
    # Random weights are not quantised.
    assert in_torch(10**12, model, load_format="dummy") == Precision("float32", "none", "float32")
