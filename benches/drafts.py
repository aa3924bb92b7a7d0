"""Speculative decoding by prompt lookup: on and off in turn, in one process. Writes benches/results/drafts.md.

    python benches/drafts.py [--repeats 3] [--streams 1 4 16 64] [--model MODEL]

Needs cargo, for what the drafter takes.

The prompts are natural text, in TASKS: with random tokens nothing could be learned. CPU time is the process's own, so that other
load on the machine changes it little.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from scheduler import machine

from chairlift import LLM, SamplingParams
from chairlift.config import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
STREAMS = (1, 4, 16, 64)
OUTPUT = 128

ARTICLE = """\
The town library opened in 1921 in two rooms above the fire station. In 1954 it moved into the old mill on River Street, where \
it still is. The mill has three floors. The ground floor holds the children's books and a reading room with forty seats. The \
first floor holds fiction, and the second floor holds local history, maps and newspapers since 1870. The library lends about \
ninety thousand items a year, of which a third are electronic. It is open from Tuesday to Saturday from ten to six. Since 2015 \
volunteers have run a repair cafe there on the first Saturday of each month, and a homework club on Wednesday afternoons."""

CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""

TASKS = {
    "editing": f"Rename the parameter amount to value in this Python class. Write the whole class again, with no other change.\n\n{CODE}",
    "summary": f"Summarise this text in three sentences, in its own words.\n\n{ARTICLE}",
    "extraction": f'Write the facts of this text as JSON with the keys "opened", "address", "floors", "hours" and "events".\n\n{ARTICLE}',
    "answer": f"{ARTICLE}\n\nQuote the sentences of this text that say what is on the ground floor, the first floor and the second floor.",
    "chat": "What should I think about before I adopt a dog? I live in a small flat and work from home.",
}


@dataclass(frozen=True)
class Cost:
    """What a run took: seconds of wall clock and of CPU, and steps."""

    wall: float
    cpu: float
    steps: int


def run(llm: LLM, prompt: list[int], streams: int) -> tuple[Cost, list[list[int]]]:
    """Answers one prompt `streams` times, with another seed each, at temperature 0.2."""
    params = [SamplingParams(temperature=0.2, top_p=0.9, seed=seed, max_tokens=OUTPUT, ignore_eos=True) for seed in range(streams)]
    steps, wall, cpu = llm.engine.stats()["steps"], time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt] * streams, params, progress=False)
    cost = Cost(time.perf_counter() - wall, time.process_time() - cpu, llm.engine.stats()["steps"] - steps)
    return cost, [output.token_ids for output in outputs]


def drafter_lines() -> list[str]:
    """The table of what the drafter costs, from `benches/drafter.rs`."""
    command = ["cargo", "bench", "-q", "-p", "chairlift-core", "--bench", "drafter"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [f"| {' | '.join(line.split())} |" for line in output.splitlines()]
    title = "What the drafter takes for each sequence and step, in microseconds, with 2,000 tokens of context:"
    return ["", title, "", "| streams | new text | repeated text |", "|---|---|---|", *rows]


def main() -> None:
    """Measures every task at every number of streams, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    arguments = parser.parse_args()
    engines = {
        "off": LLM(arguments.model, max_model_len=1024),
        "on": LLM(arguments.model, max_model_len=1024, speculative_config={"method": "ngram", "num_speculative_tokens": 8}),
    }
    lines = [
        "# Speculative decoding by prompt lookup",
        "",
        f"{machine()}. {arguments.model}, {OUTPUT} tokens an answer, temperature 0.2, one prompt for all streams,",
        f"{arguments.repeats} runs of each, on and off in turn; medians. Gain is off over on. The answers were equal in every run.",
        "",
        "| task | streams | steps, off | steps, on | accepted | gain, CPU time | gain, wall clock |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, text in TASKS.items():
        prompt = engines["off"].tokenizer.chat([{"role": "user", "content": text}])
        for streams in arguments.streams:
            costs: dict[str, list[Cost]] = {name: [] for name in engines}
            before = engines["on"].engine.stats()
            for _ in range(arguments.repeats):
                answers = []
                for name, llm in engines.items():
                    cost, tokens = run(llm, prompt, streams)
                    costs[name].append(cost)
                    answers.append(tokens)
                assert answers[0] == answers[1], f"{task}: the answers differ"
            after = engines["on"].engine.stats()
            drafted = after["draft_tokens"] - before["draft_tokens"]
            accepted = (after["accepted_draft_tokens"] - before["accepted_draft_tokens"]) / drafted if drafted else 0.0
            gain = {
                key: statistics.median(getattr(off, key) / getattr(on, key) for off, on in zip(costs["off"], costs["on"], strict=True))
                for key in ("cpu", "wall")
            }
            steps = {name: round(statistics.median(cost.steps for cost in found)) for name, found in costs.items()}
            lines.append(
                f"| {task} | {streams} | {steps['off']} | {steps['on']} | {accepted:.0%} | {gain['cpu']:.2f} | {gain['wall']:.2f} |"
            )
            print(lines[-1], flush=True)
    lines += drafter_lines()
    (ROOT / "benches/results/drafts.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
