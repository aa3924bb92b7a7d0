"""What each form of weights and KV costs in quality, on the default model and a text of English prose; measured in docs/arithmetic.md."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import chairlift.runner  # noqa: F401, before torch computes anything
from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.runner.build import build_runner
from chairlift.runner.executor import Loader
from chairlift.runner.memory.precision import Precision
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TOKENS = int(os.environ.get("QUALITY_TOKENS", 512))
EXACT, INT16 = (1e-5, 0.998, 1e-9), (1e-4, 0.997, 3e-6)
SHORT = _core.byte_products("auto")
"""Whether this processor has activations of 16 bits; with matrix tiles not by default."""


@pytest.fixture(scope="module")
def ids(model_dir: Path) -> list[int]:
    return Tokenizer(model_dir).encode((Path(__file__).parent / "data" / "lift.txt").read_text())[:TOKENS]


@dataclass(frozen=True)
class Reference:
    """What transformers gives in fp32. Logarithms of 50 million probabilities in doubles take seconds: some rows show the divergence."""

    likeliest: torch.Tensor
    perplexity: float
    rows: slice
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def reference(hf_model_dir: Path, ids: list[int]) -> Reference:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(hf_model_dir, dtype=torch.float32).eval()(torch.tensor([ids])).logits[0]
    rows = slice(None, None, 4)
    return Reference(logits.argmax(-1), perplexity(logits, ids), rows, logits[rows].double().log_softmax(-1))


def logits(model_dir: Path, ids: list[int], *, in_torch: str | None = None, **settings: str) -> torch.Tensor:
    """Our own, of one step; with the weights of layers in a form of 8 bits for torch."""
    count = len(ids)
    config = EngineConfig(device="cpu", max_model_len=1024, num_kv_blocks=65, max_num_seqs=1, max_num_batched_tokens=1024, **settings)
    runner = build_runner(config, model_dir, make_backend=partial(TorchBackend, load=with_quantization(in_torch)) if in_torch else None)
    buffers, places = runner.buffers[0], np.arange(count)
    buffers.input_ids[:count], buffers.positions[:count] = ids, places
    buffers.block_tables[0, :64] = np.arange(1, 65)
    buffers.slot_mapping[:count] = 16 + places
    buffers.query_starts[1] = buffers.context_lens[0] = count
    if in_torch:
        buffers.on_device.load(buffers.index, 0)
    runner.model.forward(buffers, count, 1)
    return torch.as_tensor(runner.model.logits(places))


def with_quantization(form: str) -> Loader:
    """Loads the model in torch, in fp32, as a CUDA device would be asked to keep its weights."""
    precision = Precision("float32", form, "float32")
    return lambda config, directory, model, _: TorchExecutor.load(config, directory, model, precision)


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    return float(losses.double().mean().exp())


@pytest.mark.parametrize(
    ("settings", "relative", "agreeing", "most_kl"),
    [
        ({}, *(INT16 if SHORT and _core.bf16_products("auto") != "tiles" else EXACT)),
        ({"cpu_math": "exact"}, *EXACT),
        ({"dtype": "float32"}, *EXACT),
        ({"dtype": "float16"}, 2e-4, 0.997, 1e-5),
        ({"dtype": "bfloat16"}, 5e-3, 0.98, 2e-4),
        ({"quantization": "int8"}, 1e-2, 0.95, 6e-3),
        ({"cpu_math": "fast"}, *((3e-3, 0.98, 1e-3) if _core.bf16_products("auto") == "tiles" else (1e-2, 0.95, 6e-3))),
        ({"in_torch": "int8"}, 1e-2, 0.95, 6e-3),
        ({"in_torch": "fp8"}, 2e-2, 0.86, 5e-2),
        ({"cpu_math": "exact", "kv_cache_dtype": "float16"}, 1e-4, 0.997, 2e-6),
        ({"kv_cache_dtype": "int8"}, 1.5e-3, 0.98, 5e-4),
    ]
    + [({"cpu_math": "int16", "kv_cache_dtype": "float32"}, 1e-4, 0.998, 1e-6)] * SHORT
    + [({"kv_cache_dtype": "bfloat16"}, 1e-3, 0.98, 1e-4)] * (_core.bf16_products("auto") != "none"),
    ids=lambda value: "-".join(f"{name}-{form}" for name, form in value.items()) or "default" if isinstance(value, dict) else None,
)
def test_perplexity_and_the_likeliest_tokens_are_those_of_transformers(
    model_dir: Path, ids: list[int], reference: Reference, settings: dict[str, str], relative: float, agreeing: float, most_kl: float
) -> None:
    found = logits(model_dir, ids, **settings)
    off = perplexity(found, ids) / reference.perplexity - 1
    agreement = float((found.argmax(-1) == reference.likeliest).double().mean())
    ours = found[reference.rows].double().log_softmax(-1)
    divergence = float(torch.nn.functional.kl_div(ours, reference.logprobs, log_target=True, reduction="batchmean"))
    print(f"{settings}: perplexity {reference.perplexity:.3f} {off:+.1e}, top-1 {agreement:.4f}, KL {divergence:.1e}, {len(ids)} tokens")
    assert abs(off) <= relative
    assert agreement >= agreeing
    assert 0 <= divergence <= most_kl
