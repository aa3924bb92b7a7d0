"""Speculative decoding by prompt lookup: on and off in turn, in one process. Writes benches/results/drafts.md.

    python benches/drafts.py [--repeats 3] [--streams 1 4 16 64] [--models MODEL ...] [--step-times FILE]

Needs cargo, for what the drafter takes.

The prompts are natural text, in TASKS: with random tokens nothing could be learned. CPU time is the process's own, so that other
load on the machine changes it little. The column "gain, counted" has no timing: the scheduler and the drafter run again
with the answers, and a step takes what STEP says. Another model's steps, such as one of 1B parameters, come from a file of
`chairlift calibrate`: one more column says what that model would gain if it accepted the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scheduler import machine

from chairlift import LLM, SamplingParams, _core
from chairlift.config import DEFAULT_MODEL
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.sim.devices import Profile
from chairlift.sim.steps import Load, StepTime

ROOT = Path(__file__).parent.parent
STREAMS = (1, 4, 16, 64)
FEW = 16
"""More streams are run once: their times differ less, and a run takes half a minute."""
OUTPUT = 128
DRAFT_TOKENS = 8
MODEL_LEN = 1024
STEP = StepTime(((0, 8930), (1, 10_000)))
"""A step's time by its tokens: in this proportion SmolLM2-135M was measured with 3 and 7 drafted tokens, and with 16 sequences."""

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

SCHEMAS = {
    "extraction": {
        "type": "object",
        "properties": {
            "opened": {"type": "integer"},
            "address": {"type": "string", "maxLength": 60},
            "floors": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 3, "maxItems": 3},
            "hours": {"type": "string", "maxLength": 60},
            "events": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 2, "maxItems": 2},
        },
        "required": ["opened", "address", "floors", "hours", "events"],
        "additionalProperties": False,
    }
}
"""The JSON schemas that answers follow."""


@dataclass(frozen=True)
class Cost:
    """What a run took: seconds of wall clock and of CPU, and steps."""

    wall: float
    cpu: float
    steps: int


def run(llm: LLM, task: str, prompt: list[int], streams: int) -> tuple[Cost, list[list[int]]]:
    """Answers one task's prompt `streams` times, with another seed each, at temperature 0.2."""
    form: dict[str, Any] = {"structured_output": SCHEMAS[task]} if task in SCHEMAS else {"ignore_eos": True}
    params = [SamplingParams(temperature=0.2, top_p=0.9, seed=seed, max_tokens=OUTPUT, **form) for seed in range(streams)]
    steps, wall, cpu = llm.engine.stats()["steps"], time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt] * streams, params, progress=False)
    cost = Cost(time.perf_counter() - wall, time.process_time() - cpu, llm.engine.stats()["steps"] - steps)
    return cost, [output.token_ids for output in outputs]


@dataclass(frozen=True)
class Counts:
    """What answers took by count: microseconds without the prompts, steps, and computed tokens without the prompts."""

    time: float
    steps: int
    computed: int


def replay(prompt: list[int], answers: list[list[int]], draft_tokens: int, step: StepTime = STEP) -> Counts:
    """Serves recorded answers together, with the scheduler and the drafter, and steps that take what `step` says of their tokens."""
    streams, max_tokens, blocks = len(answers), 2048, MODEL_LEN // 16
    layout = {
        "num_blocks": streams * blocks + 1,
        "block_size": 16,
        "max_seqs": streams,
        "max_tokens": max_tokens,
        "max_model_len": MODEL_LEN,
    }
    core = _core.Scheduler(draft_tokens=draft_tokens, **layout)
    buffers = StepBuffers(Layout(max_tokens, streams, blocks))
    views, now, counts = _core.StepBuffers(**buffers.arrays()), 0, Counts(0.0, 0, 0)
    texts = [[*prompt, *answer] for answer in answers]
    for tag, text in enumerate(texts):
        core.add(tag, np.array(prompt, dtype=np.int32), len(text) - len(prompt), [], now, draft=True)
    slots: dict[int, int] = {}
    ended = 0
    while ended < streams:
        plan = core.plan(views, now)
        assert plan is not None
        slots |= {slot: tag for slot, _, tag, *_ in plan.admitted}
        now += int(step(Load(plan.num_tokens - plan.num_samples, plan.num_samples, 0, 0)))
        # Prompts cost the same with and without drafts.
        took = float(step(Load(0, plan.num_samples, 0, 0)))
        counts = Counts(counts.time + took, counts.steps + 1, counts.computed + plan.num_samples)
        positions = buffers.positions[buffers.sample_at[: plan.num_samples]]
        owners = (texts[slots[slot]] for slot in buffers.sample_slots[: plan.num_samples].tolist())
        sampled = [text[min(at + 1, len(text) - 1)] for text, at in zip(owners, positions.tolist(), strict=True)]
        ended += len(core.commit(plan, np.array(sampled, dtype=np.int32), now).ended)
    return counts


def drafter_lines() -> list[str]:
    """The table of what the drafter costs, from `benches/drafter.rs`."""
    command = ["cargo", "bench", "-q", "-p", "chairlift-core", "--bench", "drafter"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [f"| {' | '.join(line.split())} |" for line in output.splitlines()]
    title = "What the drafter takes for each sequence and step, in microseconds, with 2,000 tokens of context:"
    return ["", title, "", "| streams | new text | repeated text | text of chance |", "|---|---|---|---|", *rows]


def rows(model: str, streams: Sequence[int], repeats: int, steps: Mapping[str, StepTime]) -> Iterator[str]:
    """Measures every task at every number of streams: the lines of a model's table. `steps` are those that are counted with."""
    engines = {
        "off": LLM(model, max_model_len=MODEL_LEN, speculative_config={"method": "off"}),
        "on": LLM(model, max_model_len=MODEL_LEN, speculative_config={"method": "auto", "num_speculative_tokens": DRAFT_TOKENS}),
    }
    titles = ["task", "streams", "steps, off", "steps, on", "accepted", "gain, CPU time", "gain, wall clock", *steps]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for task, text in TASKS.items():
        tokenizer = engines["off"].tokenizer
        chats = tokenizer.template_source is not None
        prompt = tokenizer.chat([{"role": "user", "content": text}]) if chats else tokenizer.encode(text + "\n\n")
        for count in streams:
            costs: dict[str, list[Cost]] = {name: [] for name in engines}
            before = engines["on"].engine.stats()
            for _ in range(repeats if count <= FEW else 1):
                answers = []
                for name, llm in engines.items():
                    cost, tokens = run(llm, task, prompt, count)
                    costs[name].append(cost)
                    answers.append(tokens)
                assert answers[0] == answers[1], f"{task}: the answers differ"
            after = engines["on"].engine.stats()
            drafted = after["draft_tokens"] - before["draft_tokens"]
            accepted = (after["accepted_draft_tokens"] - before["accepted_draft_tokens"]) / drafted if drafted else 0.0
            cells = [task, count, *(round(statistics.median(cost.steps for cost in found)) for found in costs.values()), f"{accepted:.0%}"]
            for key in ("cpu", "wall"):
                gains = (getattr(off, key) / getattr(on, key) for off, on in zip(costs["off"], costs["on"], strict=True))
                cells.append(f"{statistics.median(gains):.2f}")
            for step in steps.values():
                gain = replay(prompt, answers[0], 0, step).time / replay(prompt, answers[0], DRAFT_TOKENS, step).time
                cells.append(f"{gain:.2f}")
            yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measures every model and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--models", nargs="+", default=[DEFAULT_MODEL])
    parser.add_argument("--step-times", metavar="FILE", help="file of 'chairlift calibrate', to count with that model's steps too")
    arguments = parser.parse_args()
    steps = {"counted": STEP}
    if arguments.step_times:
        profile = Profile.load(arguments.step_times)
        steps[f"counted, {profile.name}"] = profile.step
    lines = [
        "# Speculative decoding by prompt lookup",
        "",
        f"{machine()}. {OUTPUT} tokens an answer, temperature 0.2, one prompt for all streams,",
        f"{arguments.repeats} runs of each (of more than {FEW} streams one), on and off in turn; medians. Gain is off over on.",
        "The answers were equal in every run. Answers of the extraction follow a JSON schema, and end with it.",
        "A model without a chat template continues the prompt.",
        "Counted: the answers replayed, with steps of 8.93 ms and 1.07 ms a token, or those of the model that is named;",
        "the drafter begins without experience, and knows no schema.",
    ]
    for model in arguments.models:
        lines += ["", f"## {Path(model).name}", ""]
        for line in rows(model, arguments.streams, arguments.repeats, steps):
            lines.append(line)
            print(line, flush=True)
        (ROOT / "benches/results/drafts.md").write_text("\n".join(lines) + "\n")  # in case that the next model is interrupted
    lines += drafter_lines()
    (ROOT / "benches/results/drafts.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
