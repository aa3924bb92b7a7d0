"""Hybrid models with random weights in real shapes, served beside llama.cpp; CPU seconds of one thread each.

    python benches/hybrid.py [--llama-server PATH] [--only NAME] [--keep FOLDER] [--answers]

Each model has some of its layers, in Q4_K. Both servers read the same file and run one thread each, one after the other in turns: CPU
seconds say what they compute even if the machine is busy. Prints a table of a prompt of 4,000 tokens, one stream, 16 streams, and eight
turns of a conversation that begins with these 4,000 tokens and grows by 200 each, with caches on. Turns lack the answers before them, as
where a template drops what an assistant thought; with --answers they have them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from peers.engines import chairlift_server
from peers.machine import describe, session_seconds
from random_gguf import Q4, Tensors, attention_tensors, expert_tensors, mlp_tensors, write
from servers import server

PROMPT, TURN, ANSWER, TURNS, STREAMS, ROUNDS = 4000, 200, 32, 8, 16, 3


class Shape(NamedTuple):
    """A model: its architecture, metadata and tensors, and how many of its layers the file has."""

    kind: str
    metadata: dict[str, Any]
    tensors: Tensors
    layers: str


def _common(hidden: int, layers: int, vocabulary: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    queries, _, size = heads
    return {
        "context_length": 32768,
        "embedding_length": hidden,
        "block_count": layers,
        "vocab_size": vocabulary,
        "attention.head_count": queries,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }


def _top(hidden: int, vocabulary: int, norm: str = "output_norm") -> Tensors:
    return {"token_embd.weight": ((vocabulary, hidden), Q4), f"{norm}.weight": ((hidden,), None)}


def lfm2() -> Shape:
    """LFM2-8B-A1B."""
    hidden, layers, vocabulary, heads = 2048, 12, 65536, (32, 8, 64)
    attention = [layer % 4 == 2 for layer in range(layers)]
    tensors = _top(hidden, vocabulary, "token_embd_norm")
    for layer in range(layers):
        parts: Tensors = {"attn_norm.weight": ((hidden,), None), "ffn_norm.weight": ((hidden,), None)}
        if attention[layer]:
            parts |= attention_tensors(hidden, heads)
        else:
            parts |= {"shortconv.in_proj.weight": ((3 * hidden, hidden), Q4), "shortconv.out_proj.weight": ((hidden, hidden), Q4)}
            parts |= {"shortconv.conv.weight": ((hidden, 3), None)}
        parts |= mlp_tensors(hidden, 7168) if layer < 2 else expert_tensors(hidden, 32, 1792) | {"exp_probs_b.bias": ((32,), None)}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    metadata = _common(hidden, layers, vocabulary, heads) | {"feed_forward_length": 7168, "shortconv.l_cache": 3}
    metadata |= {"attention.head_count_kv": [heads[1] if entry else 0 for entry in attention], "leading_dense_block_count": 2}
    metadata |= {"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 1792, "expert_gating_func": 2}
    return Shape("lfm2moe", metadata, tensors, f"{layers} of 24")


QWEN_INNER = 32 * 128
"""Sizes of all value heads of a layer with the delta rule, in Qwen3.5-4B and Qwen3.6-35B-A3B."""
QWEN_VOCABULARY = 248320


def _qwen_mixer(layer: int, hidden: int, heads: tuple[int, int, int]) -> Tensors:
    """The tensors of a layer of Qwen 3.5 or 3.6 before its MLP or experts: each fourth layer has attention."""
    parts: Tensors = {"attn_norm.weight": ((hidden,), None), "post_attention_norm.weight": ((hidden,), None)}
    if layer % 4 == 3:
        return parts | attention_tensors(hidden, heads, gated=True)
    channels = 2 * 16 * 128 + QWEN_INNER
    parts |= {"attn_qkv.weight": ((channels, hidden), Q4), "attn_gate.weight": ((QWEN_INNER, hidden), Q4)}
    parts |= {"ssm_beta.weight": ((32, hidden), None), "ssm_alpha.weight": ((32, hidden), None), "ssm_norm.weight": ((128,), None)}
    parts |= {"ssm_conv1d.weight": ((channels, 4), None), "ssm_dt.bias": ((32,), None), "ssm_a": ((32,), None)}
    return parts | {"ssm_out.weight": ((hidden, QWEN_INNER), Q4)}


def _qwen_metadata(hidden: int, layers: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    metadata = _common(hidden, layers, QWEN_VOCABULARY, heads) | {"attention.head_count_kv": heads[1], "full_attention_interval": 4}
    metadata |= {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]}
    metadata |= {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16}
    return metadata | {"ssm.time_step_rank": 32, "ssm.inner_size": QWEN_INNER}


def qwen() -> Shape:
    """Qwen3.5-4B."""
    hidden, layers, heads = 2560, 8, (16, 4, 256)
    tensors = _top(hidden, QWEN_VOCABULARY)
    for layer in range(layers):
        parts = _qwen_mixer(layer, hidden, heads) | mlp_tensors(hidden, 9216)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    return Shape("qwen35", _qwen_metadata(hidden, layers, heads) | {"feed_forward_length": 9216}, tensors, f"{layers} of 32")


def qwen_moe() -> Shape:
    """Qwen3.6-35B-A3B."""
    hidden, layers, heads = 2048, 8, (16, 2, 256)
    tensors = _top(hidden, QWEN_VOCABULARY)
    for layer in range(layers):
        parts = _qwen_mixer(layer, hidden, heads) | expert_tensors(hidden, 256, 512) | mlp_tensors(hidden, 512, "_shexp")
        parts |= {"ffn_gate_inp_shexp.weight": ((hidden,), None)}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    metadata = _qwen_metadata(hidden, layers, heads) | {"expert_count": 256, "expert_used_count": 8}
    metadata |= {"expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512}
    return Shape("qwen35moe", metadata, tensors, f"{layers} of 40")


def granite() -> Shape:
    """Granite-4-H-tiny."""
    hidden, layers, vocabulary, heads = 1536, 10, 100352, (12, 4, 128)
    inner, channels = 48 * 64, 48 * 64 + 2 * 128
    tensors = _top(hidden, vocabulary)
    for layer in range(layers):
        parts: Tensors = {"attn_norm.weight": ((hidden,), None), "ffn_norm.weight": ((hidden,), None)}
        if layer == 5:
            parts |= attention_tensors(hidden, heads, norms=False)
        else:
            parts |= {"ssm_in.weight": ((inner + channels + 48, hidden), Q4), "ssm_out.weight": ((hidden, inner), Q4)}
            parts |= {"ssm_conv1d.weight": ((channels, 4), None), "ssm_conv1d.bias": ((channels,), None), "ssm_dt.bias": ((48,), None)}
            parts |= {"ssm_a": ((48, 1), None), "ssm_d": ((48, 1), None), "ssm_norm.weight": ((1, inner), None)}
        parts |= expert_tensors(hidden, 64, 512) | mlp_tensors(hidden, 1024, "_shexp")
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    metadata = _common(hidden, layers, vocabulary, heads) | {"feed_forward_length": 512, "expert_count": 64, "expert_used_count": 6}
    metadata |= {"attention.head_count_kv": [heads[1] if layer == 5 else 0 for layer in range(layers)]}
    metadata |= {"expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 1024, "rope.scaling.finetuned": False}
    metadata |= {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
    metadata |= {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.time_step_rank": 48, "ssm.inner_size": inner}
    return Shape("granitehybrid", metadata, tensors, f"{layers} of 40")


MODELS = {"LFM2-8B-A1B": lfm2, "Qwen3.5-4B": qwen, "Qwen3.6-35B-A3B": qwen_moe, "Granite-4-H-tiny": granite}


class Server:
    """A server's port and session."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.session = port, process.pid

    def cpu(self) -> float:
        """CPU seconds of the process and its children."""
        return session_seconds(self.session)

    def ask(self, prompt: list[int], count: int) -> tuple[float, int, list[int]]:
        """CPU seconds until the first of `count` tokens, the tokens of the prompt that were cached, and the answer's."""
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "n_predict": count, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "cache_prompt": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1200)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response, first, cached, text = connection.getresponse(), 0.0, 0, ""
        if response.status != 200:
            raise SystemExit(f"/v1/completions: {response.status} {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                first = first or self.cpu()
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        connection.close()
        return first, cached, token_ids(text)


def token_ids(text: str) -> list[int]:
    """The tokens of a text, which `random_gguf` names by their numbers."""
    return [int(number) + 2 for number in re.findall(r"t(\d+)", text)]


def measure(served: Server, seed: int, *, answers: bool) -> dict[str, float]:
    """CPU seconds of each case. `answers` is whether a conversation's turns have the answers before them."""
    numbers = random.Random(seed)
    found: dict[str, float] = {}

    def draw(count: int) -> list[int]:
        return [numbers.randrange(1000, 60000) for _ in range(count)]

    def timed(name: str, prompts: list[list[int]], count: int) -> None:
        before = served.cpu()
        threads = [threading.Thread(target=served.ask, args=(prompt, count)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[name] = served.cpu() - before

    timed("warm", [draw(64)], 8)
    timed("one", [draw(8)], 64)
    timed("streams", [draw(8) for _ in range(STREAMS)], 32)
    prompt, firsts, cached, findable = draw(PROMPT), [], 0, 0
    for turn in range(TURNS):
        before = served.cpu()
        first, hit, answer = served.ask(prompt, ANSWER)
        firsts.append(first - before)
        if turn:
            cached, findable = cached + hit, findable + len(prompt) - TURN - 1
        if answers and len(answer) != ANSWER:
            raise SystemExit(f"an answer of {ANSWER} tokens was read as {len(answer)}")
        prompt = prompt + (answer if answers else []) + draw(TURN)
    found |= {"prompt": firsts[0], "turn": statistics.median(firsts[1:]), "found": cached / findable}
    return found


def print_head(rounds: int) -> None:
    """Prints the head of a table of `compare`."""
    print(f"{describe()['cpu']}, one thread, CPU seconds, median of {rounds}\n")
    columns = ("model", "server", "prompt of 4,000", "one stream, tokens/s", "16 streams, tokens/s", "first token of a later turn", "found")
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|---|", flush=True)


def compare(name: str, path: Path, llama_server: Path | None, rounds: int, *, answers: bool = False) -> None:
    """Measures the servers with a file in turns, and prints their rows."""
    # Random weights repeat themselves: drafts would gain what no text gains.
    ours = chairlift_server(path, "Q4_K", "8 bit", ["--threads", "1", "--speculative-config", '{"method": "off"}'])
    theirs = [str(llama_server), "--model", str(path), "--no-ui", "--log-disable", "--threads", "1", "--threads-batch", "1"]
    theirs += ["--parallel", str(STREAMS), "--ctx-size", str(STREAMS * 6144), "--port", "{port}"]
    commands = {"chairlift": ours.command} | ({"llama.cpp": theirs} if llama_server else {})
    results: dict[str, list[dict[str, float]]] = {which: [] for which in commands}
    for seed in range(rounds):
        for which, command in commands.items():
            with server(command, "/health", Path(os.devnull), environ=ours.environ) as started:
                results[which].append(measure(Server(*started), seed, answers=answers))
    for which, measured in results.items():
        at = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        print(
            f"| {name} | {which} | {at['prompt']:.1f} | {64 / at['one']:.1f} |"
            f" {STREAMS * 32 / at['streams']:.1f} | {at['turn']:.2f} | {at['found']:.0%} |",
            flush=True,
        )


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--answers", action="store_true", help="turns have the answers before them")
    parser.add_argument("--keep", type=Path, help="a folder where files are made, and used again")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    print_head(args.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        for name in [args.only] if args.only else MODELS:
            shape, path = MODELS[name](), (args.keep or Path(temporary)) / f"{name}.gguf"
            if not path.exists():
                write(path, shape.kind, shape.metadata, shape.tensors)
            compare(f"{name}, {shape.layers} layers", path, args.llama_server, args.rounds, answers=args.answers)


if __name__ == "__main__":
    main()
