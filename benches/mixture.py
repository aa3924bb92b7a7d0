"""Times mixtures of experts, and Gemma 4 E4B, with random weights in real shapes: decodes beside the memory's bandwidth, or a server
beside llama.cpp.

    python benches/mixture.py                      Qwen3-30B-A3B with 4 of its 48 layers, Q4_K_M
    python benches/mixture.py --model GLM-4.7-Flash       or gpt-oss-20b, or gemma-4-E4B
    python benches/mixture.py --layers 48 --keep qwen3-30b-a3b.gguf
    python benches/mixture.py --llama-server PATH  a prompt of 4,000 tokens, one stream and 16, in CPU seconds (see hybrid.py)

With --threads 1, times are the CPU seconds of that thread, the bandwidth's too, so that a busy machine disturbs them less.

The file is made of random blocks in the types of llama.cpp's Q4_K_M, that of gpt-oss in MXFP4 and Q8_0. A token's active weights are
those of its experts, of attention and of the head; several streams touch N (1 - (1 - k / N)^streams) of N experts. Prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import hybrid
import numpy as np
from peers.machine import clock_of, describe, read_speed
from random_gguf import MXFP4, Q4, Q6, Q8, Tensors, attention_tensors, expert_tensors, mlp_tensors, write

from chairlift.checkpoint.gguf import convert
from chairlift.config import EngineConfig
from chairlift.machine import available_memory
from chairlift.models.config import ModelConfig
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.rust_backend import RustBackend

STREAMS = (1, 2, 4, 8, 16)
BLOCK, CONTEXT = 16, 128
STEPS, ROUNDS = 10, 3


class Model(NamedTuple):
    """A model: its architecture, its numbers of layers, of experts and of experts for a token, and the file for a number of layers.

    A dense model has one expert.
    """

    kind: str
    layers: int
    experts: int
    used: int
    metadata: Callable[[int], dict[str, Any]]
    tensors: Callable[[int], Tensors]


def _top(hidden: int, vocabulary: int) -> Tensors:
    matrices: Tensors = {"token_embd.weight": ((vocabulary, hidden), Q4), "output.weight": ((vocabulary, hidden), Q6)}
    return matrices | {"output_norm.weight": ((hidden,), None)}


def _sizes(layers: int, hidden: int, inner: int, attention: dict[str, int], experts: dict[str, Any]) -> dict[str, Any]:
    sizes = {"context_length": 40960, "embedding_length": hidden, "block_count": layers, "feed_forward_length": inner}
    heads = {f"attention.{name}": value for name, value in {**attention, "layer_norm_rms_epsilon": 1e-6}.items()}
    return {**sizes, **heads, "rope.freq_base": 1e6} | {f"expert_{name}": value for name, value in experts.items()}


def _qwen_metadata(layers: int) -> dict[str, Any]:
    heads = {"head_count": 32, "head_count_kv": 4, "key_length": 128, "value_length": 128}
    return _sizes(layers, 2048, 6144, heads, {"count": 128, "used_count": 8, "feed_forward_length": 768})


def _qwen_tensors(layers: int) -> Tensors:
    hidden, found = 2048, _top(2048, 151936)
    for layer in range(layers):
        # Half of the layers have more bits for these.
        more = Q6 if layer % 2 else Q4
        parts = attention_tensors(hidden, (32, 4, 128)) | {"attn_v.weight": ((512, hidden), more)} | expert_tensors(hidden, 128, 768, more)
        parts |= {"attn_norm.weight": ((hidden,), None), "ffn_norm.weight": ((hidden,), None)}
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found


def _glm_metadata(layers: int) -> dict[str, Any]:
    heads = {"head_count": 20, "head_count_kv": 1, "key_length": 576, "value_length": 512, "key_length_mla": 256, "value_length_mla": 256}
    experts = {"count": 64, "used_count": 4, "feed_forward_length": 1536, "shared_count": 1, "gating_func": 2, "weights_norm": True}
    found = _sizes(layers, 2048, 10240, heads | {"q_lora_rank": 768, "kv_lora_rank": 512}, experts | {"weights_scale": 1.8})
    return found | {"rope.dimension_count": 64, "leading_dense_block_count": 1, "vocab_size": 154880}


def _glm_tensors(layers: int) -> Tensors:
    hidden, heads, found = 2048, 20, _top(2048, 154880)
    for layer in range(layers):
        parts: Tensors = {"attn_q_a.weight": ((768, hidden), Q4), "attn_q_b.weight": ((heads * 256, 768), Q4)}
        parts |= {"attn_kv_a_mqa.weight": ((576, hidden), Q4), "attn_output.weight": ((hidden, heads * 256), Q4)}
        # Rows of 192 numbers are no whole blocks of Q4_K.
        parts |= {"attn_k_b.weight": ((heads, 512, 192), Q8), "attn_v_b.weight": ((heads, 256, 512), Q8)}
        if layer == 0:
            parts |= mlp_tensors(hidden, 10240)
        else:
            parts |= expert_tensors(hidden, 64, 1536, Q6 if layer % 2 else Q4) | {"exp_probs_b.bias": ((64,), None)}
            parts |= mlp_tensors(hidden, 1536, "_shexp")
        norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_a_norm": 768, "attn_kv_a_norm": 512}
        parts |= {f"{name}.weight": ((size,), None) for name, size in norms.items()}
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found


def _gpt_oss_metadata(layers: int) -> dict[str, Any]:
    heads = {"head_count": 64, "head_count_kv": 8, "key_length": 64, "value_length": 64, "sliding_window": 128}
    found = _sizes(layers, 2880, 2880, heads, {"count": 32, "used_count": 4, "feed_forward_length": 2880})
    yarn = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    return found | {"rope.freq_base": 150000.0} | {f"rope.scaling.{name}": value for name, value in yarn.items()}


def _gpt_oss_tensors(layers: int) -> Tensors:
    hidden, experts, vocabulary, queries, kv = 2880, 32, 201088, 4096, 512
    found: Tensors = {f"{name}.weight": ((vocabulary, hidden), Q8) for name in ("token_embd", "output")}
    found |= {"output_norm.weight": ((hidden,), None)}
    for layer in range(layers):
        outs = {"q": (queries, hidden), "k": (kv, hidden), "v": (kv, hidden), "output": (hidden, queries)}
        parts: Tensors = {f"attn_{name}.weight": (shape, Q8) for name, shape in outs.items()}
        parts |= {f"attn_{name}.bias": (shape[:1], None) for name, shape in outs.items()}
        for name in ("gate", "up", "down"):
            parts |= {f"ffn_{name}_exps.weight": ((experts, hidden, hidden), MXFP4)}
            parts |= {f"ffn_{name}_exps.bias": ((experts, hidden), None)}
        parts |= {"ffn_gate_inp.weight": ((experts, hidden), None), "ffn_gate_inp.bias": ((experts,), None)}
        parts |= {"attn_sinks.weight": ((64,), None)}
        parts |= {f"{name}.weight": ((hidden,), None) for name in ("attn_norm", "post_attention_norm")}
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found


def _gemma_is_full(layer: int) -> bool:
    return layer % 6 == 5


def _gemma_shared(layers: int) -> int:
    """The number of layers that use the keys and values of earlier ones. llama.cpp wants the last of the others to be a full one."""
    return 6 * round(layers / 14)


def _gemma_metadata(layers: int) -> dict[str, Any]:
    heads: dict[str, Any] = {"head_count": 8, "head_count_kv": 2, "key_length": 512, "value_length": 512}
    heads |= {"key_length_swa": 256, "value_length_swa": 256, "sliding_window": 512, "shared_kv_layers": _gemma_shared(layers)}
    heads |= {"sliding_window_pattern": [not _gemma_is_full(layer) for layer in range(layers)]}
    found = _sizes(layers, 2560, 10240, heads, {}) | {"rope.dimension_count": 512, "rope.dimension_count_swa": 256}
    return found | {"embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0}


def _gemma_tensors(layers: int) -> Tensors:
    hidden, vocabulary, own = 2560, 262144, 256
    found: Tensors = {"token_embd.weight": ((vocabulary, hidden), Q6), "output_norm.weight": ((hidden,), None)}
    found |= {"per_layer_token_embd.weight": ((vocabulary, layers * own), Q4), "rope_freqs.weight": ((256,), None)}
    found |= {"per_layer_model_proj.weight": ((layers * own, hidden), Q4), "per_layer_proj_norm.weight": ((own,), None)}
    for layer in range(layers):
        size = 512 if _gemma_is_full(layer) else 256
        parts = attention_tensors(hidden, (8, 2, size)) | mlp_tensors(hidden, 10240)
        if layer >= layers - _gemma_shared(layers):
            parts = {name: tensor for name, tensor in parts.items() if not name.startswith(("attn_k", "attn_v"))}
        parts |= {"inp_gate.weight": ((own, hidden), Q4), "proj.weight": ((hidden, own), Q4), "layer_output_scale.weight": ((1,), None)}
        names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        parts |= {f"{name}.weight": ((hidden,), None) for name in names}
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found


MODELS = {
    "Qwen3-30B-A3B": Model("qwen3moe", 48, 128, 8, _qwen_metadata, _qwen_tensors),
    "GLM-4.7-Flash": Model("deepseek2", 47, 64, 4, _glm_metadata, _glm_tensors),
    "gpt-oss-20b": Model("gpt-oss", 24, 32, 4, _gpt_oss_metadata, _gpt_oss_tensors),
    "gemma-4-E4B": Model("gemma4", 42, 1, 1, _gemma_metadata, _gemma_tensors),
}


def active_bytes(model: Model, layers: int, streams: int) -> int:
    """Bytes of the weights that a step reads."""
    touched = 1 - (1 - model.used / model.experts) ** streams
    total, tensors = 0.0, model.tensors(layers)
    tables = ("per_layer_token_embd", "token_embd") if "output.weight" in tensors else ("per_layer_token_embd",)
    for name, (shape, kind) in tensors.items():
        elements, size = (1, 4) if kind is None else gguf.GGML_QUANT_SIZES[kind]
        share = touched if "_exps" in name else 0 if name.startswith(tables) else 1
        total += share * int(np.prod(shape)) / elements * size
    return int(total)


def seconds(executor: CpuExecutor, streams: int, clock: Callable[[], float]) -> float:
    """The median of the steps in which each stream decodes a token."""
    each = CONTEXT // BLOCK
    tables = np.arange(streams * each, dtype=np.int32).reshape(streams, each)
    random, times = np.random.default_rng(1), []
    for _ in range(ROUNDS):
        for position in range(STEPS):
            ids = random.integers(0, executor.config.vocab_size, streams).astype(np.int32)
            slots = tables[:, position // BLOCK] * BLOCK + position % BLOCK
            began = clock()
            executor.decoder.forward(
                executor.cache,
                input_ids=ids,
                positions=np.full(streams, position, np.int32),
                slot_mapping=slots.astype(np.int32),
                query_starts=np.arange(streams + 1, dtype=np.int32),
                context_lens=np.full(streams, position + 1, np.int32),
                batch_slots=np.arange(streams, dtype=np.int32),
                block_tables=tables,
            )
            executor.logits(np.arange(streams))
            times.append(clock() - began)
    return float(np.median(times))


def print_decodes(model: Model, path: Path, layers: int, threads: int) -> None:
    """Prints the times of steps that only decode."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        convert(path, directory)
        config, shape = EngineConfig(device="cpu", threads=threads), ModelConfig.load(directory)
        backend = RustBackend(config, directory, shape, 0)
        executor = backend.load(backend.decide(available_memory()))
        assert isinstance(executor, CpuExecutor)
        executor.allocate(max(STREAMS) * CONTEXT // BLOCK, BLOCK, 0)
        bandwidth, clock = read_speed(threads=threads), clock_of(threads)
        print(f"{describe()['cpu']}, {threads} threads, {bandwidth:.1f} GB/s read; {layers} of {model.layers} layers\n")
        print("| streams | ms | tokens/s | active GB | share of the bandwidth |\n|---|---|---|---|---|")
        for streams in STREAMS:
            took, size = seconds(executor, streams, clock), active_bytes(model, layers, streams) / 1e9
            print(f"| {streams} | {took * 1e3:.1f} | {streams / took:.1f} | {size:.2f} | {size / took / bandwidth:.2f} |")


def main() -> None:
    """Makes the file and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="without --llama-server, beside which there is one")
    parser.add_argument("--keep", type=Path, help="where the file is made, and used again if it is there")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with --llama-server")
    args = parser.parse_args()
    model = MODELS[args.model]
    with tempfile.TemporaryDirectory() as temporary:
        path = args.keep or Path(temporary) / "mixture.gguf"
        if not path.exists():
            write(path, model.kind, model.metadata(args.layers), model.tensors(args.layers))
        if args.llama_server:
            hybrid.print_head(args.rounds)
            hybrid.compare(f"{args.model}, {args.layers} of {model.layers} layers", path, args.llama_server, args.rounds)
        else:
            print_decodes(model, path, args.layers, args.threads)


if __name__ == "__main__":
    main()
