"""Times decodes of a mixture of experts with random weights in a real shape, beside the memory's bandwidth.

    python benches/mixture.py                      Qwen3-30B-A3B with 4 of its 48 layers, Q4_K_M
    python benches/mixture.py --layers 48 --keep qwen3-30b-a3b.gguf

The file is made of random blocks in the types of llama.cpp's Q4_K_M. A token's active weights are those of its experts, of attention
and of the head; several streams touch N (1 - (1 - k / N)^streams) of N experts. Prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from peers.machine import describe, peaks
from random_gguf import Q4, Q6, Tensors, write

from chairlift.checkpoint.gguf import convert
from chairlift.config import EngineConfig
from chairlift.models.config import ModelConfig
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import open_weights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, USED, INNER, VOCABULARY = 2048, 32, 4, 128, 128, 8, 768, 151936
LAYERS = 48
STREAMS = (1, 2, 4, 8, 16)
BLOCK, CONTEXT = 16, 128
STEPS, ROUNDS = 10, 3


def tensors(layers: int) -> Tensors:
    """The tensors of the file."""
    queries, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: Tensors = {
        "token_embd.weight": ((VOCABULARY, HIDDEN), Q4),
        "output.weight": ((VOCABULARY, HIDDEN), Q6),
        "output_norm.weight": ((HIDDEN,), None),
    }
    for layer in range(layers):
        # Half of the layers have more bits for these.
        more = Q6 if layer % 2 else Q4
        matrices = {"attn_q": ((queries, HIDDEN), Q4), "attn_k": ((kv, HIDDEN), Q4), "attn_v": ((kv, HIDDEN), more)}
        matrices |= {"attn_output": ((HIDDEN, queries), Q4), "ffn_gate_exps": ((EXPERTS, INNER, HIDDEN), Q4)}
        matrices |= {"ffn_up_exps": ((EXPERTS, INNER, HIDDEN), Q4), "ffn_down_exps": ((EXPERTS, HIDDEN, INNER), more)}
        plain = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        plain |= {"ffn_gate_inp": (EXPERTS, HIDDEN)}
        found |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in matrices.items()}
        found |= {f"blk.{layer}.{name}.weight": (shape, None) for name, shape in plain.items()}
    return found


def metadata(layers: int) -> dict[str, int | float]:
    """The metadata of the file."""
    sizes = {"context_length": 40960, "embedding_length": HIDDEN, "block_count": layers, "feed_forward_length": 6144}
    heads = {"head_count": HEADS, "head_count_kv": KV_HEADS, "key_length": HEAD_DIM, "value_length": HEAD_DIM}
    experts = {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": INNER}
    attention = {f"attention.{name}": value for name, value in {**heads, "layer_norm_rms_epsilon": 1e-6}.items()}
    return {**sizes, **attention, "rope.freq_base": 1e6, **experts}


def active_bytes(layers: int, streams: int) -> int:
    """Bytes of the weights that a step reads."""
    touched = 1 - (1 - USED / EXPERTS) ** streams
    total = 0.0
    for name, (shape, kind) in tensors(layers).items():
        elements, size = (1, 4) if kind is None else gguf.GGML_QUANT_SIZES[kind]
        share = touched if "_exps" in name else 0 if name.startswith("token_embd") else 1
        total += share * int(np.prod(shape)) / elements * size
    return int(total)


def seconds(executor: CpuExecutor, streams: int) -> float:
    """The median of the steps in which each stream decodes a token."""
    each = CONTEXT // BLOCK
    tables = np.arange(streams * each, dtype=np.int32).reshape(streams, each)
    random, times = np.random.default_rng(1), []
    for _ in range(ROUNDS):
        for position in range(STEPS):
            ids = random.integers(0, VOCABULARY, streams).astype(np.int32)
            slots = tables[:, position // BLOCK] * BLOCK + position % BLOCK
            began = time.perf_counter()
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
            times.append(time.perf_counter() - began)
    return float(np.median(times))


def main() -> None:
    """Makes the file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where the file is made, and used again if it is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = args.keep or Path(temporary) / "mixture.gguf"
        if not path.exists():
            write(path, "qwen3moe", metadata(args.layers), tensors(args.layers))
        convert(path, Path(temporary) / "model")
        config = EngineConfig(device="cpu", threads=args.threads)
        directory = Path(temporary) / "model"
        model = ModelConfig.load(directory)
        executor = CpuExecutor.load(config, open_weights(config, directory), model, Precision("blocks", "none", "float32"))
        executor.allocate(max(STREAMS) * CONTEXT // BLOCK, BLOCK, 0)
        bandwidth = peaks()["read_gb_s"]
        print(f"{describe()['cpu']}, {args.threads} threads, {bandwidth:.1f} GB/s read; {args.layers} of {LAYERS} layers\n")
        print("| streams | ms | tokens/s | active GB | share of the bandwidth |\n|---|---|---|---|---|")
        for streams in STREAMS:
            took, size = seconds(executor, streams), active_bytes(args.layers, streams) / 1e9
            print(f"| {streams} | {took * 1e3:.1f} | {streams / took:.1f} | {size:.2f} | {size / took / bandwidth:.2f} |")


if __name__ == "__main__":
    main()
