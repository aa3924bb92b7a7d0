"""Speculative decoding by prompt lookup: on and off in turn, in one process. Writes benches/results/drafts.md.

    python benches/drafts.py [--rounds 4] [--streams 1 4 16 64] [--models MODEL ...] [--step-times FILE]

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
from pages import RESULTS, ROOT, machine, write

from chairlift import LLM, SamplingParams, _core
from chairlift.config import DEFAULT_MODEL
from chairlift.engine.engine_request import EngineRequest
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.sim.devices import Profile
from chairlift.sim.steps import Load, StepTime

STREAMS = (1, 4, 16, 64)
OUTPUT = 128
FEW, SHORT = 4, 48
"""Answers of more than `FEW` streams have `SHORT` tokens instead: a step takes long, and hardly anything is drafted."""
SLICE = 8
"""Tokens an answer between two changes from one engine to the other."""
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

SCHEMA = {
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
FORMS = {"extraction": {"json": SCHEMA, "disable_any_whitespace": False}, "extraction, compact": {"json": SCHEMA}}
"""The forms that answers have."""
PROMPTS = {**TASKS, "extraction, compact": TASKS["extraction"]}
"""The prompts of the table's rows."""


def output_of(streams: int) -> int:
    """Tokens an answer."""
    return OUTPUT if streams <= FEW else SHORT


class Run:
    """One engine's answers to a prompt, computed in slices. Each answer has another seed, at temperature 0.2."""

    def __init__(self, llm: LLM, task: str, prompt: list[int], streams: int) -> None:
        form: dict[str, Any] = {"structured_output": FORMS[task]} if task in FORMS else {"ignore_eos": True}
        self.engine, self.steps, self.count = llm.engine, 0, 0
        self.answers: list[list[int]] = [[] for _ in range(streams)]
        for tag in range(streams):
            self.engine.add(
                EngineRequest.of(tag, prompt, SamplingParams(temperature=0.2, top_p=0.9, seed=tag, max_tokens=output_of(streams), **form))
            )

    def advance(self, count: int) -> tuple[float, float]:
        """Runs steps until there are `count` tokens, or all answers have ended. Returns the seconds of CPU and of wall clock."""
        wall, cpu = time.perf_counter(), time.process_time()
        while self.count < count and self.engine.has_work:
            step = self.engine.step()
            assert step is not None
            self.steps += 1
            tags, tokens = np.frombuffer(step.tags, dtype=np.uint64).tolist(), np.frombuffer(step.tokens, dtype=np.int32).tolist()
            self.count += len(tokens)
            for tag, token in zip(tags, tokens, strict=True):
                self.answers[tag].append(token)
        return time.process_time() - cpu, time.perf_counter() - wall


class Cell:
    """What one task took with one number of streams, with and without drafts, in all rounds."""

    def __init__(self) -> None:
        self.slices: list[np.ndarray] = []
        """Of each slice: the seconds of CPU and of wall clock [2], off and on [2]."""
        self.steps: list[tuple[int, int]] = []
        self.drafted = self.accepted = 0
        self.answers: list[list[int]] = []

    def run(self, engines: Sequence[LLM], task: str, prompt: list[int], streams: int) -> None:
        """Computes the answers without and with drafts, in slices of `SLICE` tokens an answer: off and on, on and off, and so on.

        Slices are short, so that other load on the machine and the processor's clock are the same for both.
        """
        before = engines[1].engine.stats()
        runs = [Run(llm, task, prompt, streams) for llm in engines]
        for at in range(output_of(streams) // SLICE):
            order = (0, 1) if (at + len(self.steps)) % 2 == 0 else (1, 0)
            took = {side: runs[side].advance(SLICE * streams * (at + 1)) for side in order}
            self.slices.append(np.array([took[0], took[1]]).T)
        after = engines[1].engine.stats()
        assert runs[0].answers == runs[1].answers, f"{task}: the answers differ"
        self.answers = runs[0].answers
        self.steps.append((runs[0].steps, runs[1].steps))
        self.drafted += after.draft_tokens - before.draft_tokens
        self.accepted += after.accepted_draft_tokens - before.accepted_draft_tokens

    def gain(self, clock: int) -> str:
        """Time off over on by a clock, with its 95 % confidence interval: that of a ratio of two sums of slices.

        The same slice of different rounds has the same content, so only what differs between rounds is chance.
        """
        rounds = len(self.steps)
        off, on = np.moveaxis(np.array(self.slices)[:, clock].reshape(rounds, -1, 2), -1, 0)
        gain = off.sum() / on.sum()
        residuals = off - gain * on
        variance = ((residuals - residuals.mean(axis=0)) ** 2).sum() * rounds / (rounds - 1)
        return f"{gain:.3f} ± {1.96 * np.sqrt(variance) / on.sum():.3f}"


@dataclass(frozen=True)
class Counts:
    """What answers took by count: microseconds without the prompts, steps, and computed tokens without the prompts."""

    time: float
    steps: int
    computed: int


def replay(prompt: list[int], answers: list[list[int]], draft_tokens: int, step: StepTime = STEP) -> Counts:
    """Serves recorded answers together, with the scheduler and the drafter, and steps that take what `step` says of their tokens."""
    streams, max_tokens, blocks = len(answers), 2048, MODEL_LEN // 16
    layout: dict[str, Any] = {
        "num_kv_blocks": streams * blocks + 1,
        "block_size": 16,
        "max_num_seqs": streams,
        "max_num_batched_tokens": max_tokens,
        "max_model_len": MODEL_LEN,
    }
    core = _core.Scheduler(draft_tokens=draft_tokens, **layout)
    buffers = StepBuffers(Layout(max_tokens, streams, blocks))
    views, now, counts = _core.StepBuffers(**buffers.arrays()), 0, Counts(0.0, 0, 0)
    texts = [[*prompt, *answer] for answer in answers]
    for tag, text in enumerate(texts):
        core.add(EngineRequest.of(tag, prompt, SamplingParams(max_tokens=len(text) - len(prompt), ignore_eos=True)), now)
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
    command = ["cargo", "bench", "-q", "-p", "chairlift-benches", "--bench", "drafter"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [f"| {' | '.join(line.split())} |" for line in output.splitlines()]
    title = "What the drafter takes for each sequence and step, in microseconds, with 2,000 tokens of context:"
    return ["", title, "", "| streams | new text | repeated text | text of chance |", "|---|---|---|---|", *rows]


def rows(model: str, streams: Sequence[int], rounds: int, steps: Mapping[str, StepTime]) -> Iterator[str]:
    """Measures every task at every number of streams: the lines of a model's table. `steps` are those that are counted with.

    Each round runs all cells, so that the drafter comes to each from another number of streams.
    """
    configs: list[dict[str, str | int]] = [{"method": "off"}, {"method": "auto", "num_speculative_tokens": DRAFT_TOKENS}]
    engines = [LLM(model, max_model_len=MODEL_LEN, speculative_config=config) for config in configs]
    tokenizer, prompts = engines[0].tokenizer, {}
    for task, text in PROMPTS.items():
        chats = tokenizer.template_source is not None
        prompts[task] = tokenizer.chat([{"role": "user", "content": text}]) if chats else tokenizer.encode(text + "\n\n")
    cells = {(task, count): Cell() for task in PROMPTS for count in streams}
    for _ in range(rounds):
        for (task, count), cell in cells.items():
            cell.run(engines, task, prompts[task], count)
    titles = ["task", "streams", "steps, off", "steps, on", "accepted", "gain, CPU time", "gain, wall clock", *steps]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for (task, count), cell in cells.items():
        medians = [round(statistics.median(counts)) for counts in zip(*cell.steps, strict=True)]
        accepted = f"{cell.accepted} of {cell.drafted}"
        fields = [task, count, *medians, accepted, cell.gain(0), cell.gain(1)]
        for step in steps.values():
            gain = replay(prompts[task], cell.answers, 0, step).time / replay(prompts[task], cell.answers, DRAFT_TOKENS, step).time
            fields.append(f"{gain:.2f}")
        yield f"| {' | '.join(map(str, fields))} |"


def main() -> None:
    """Measures every model and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="runs of each row, at least 2")
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
        f"{machine()}. {OUTPUT} tokens an answer ({SHORT} of more than {FEW} streams), temperature 0.2,",
        f"one prompt for all streams, {arguments.rounds} rounds of all rows. Off and on change after every {SLICE} tokens an answer, in",
        "alternating order. Gain is off over on, with its 95 % confidence interval. The answers were equal in every round.",
        "Answers of the extraction follow a JSON schema, and end with it; compact ones have no whitespace between JSON tokens.",
        "A model without a chat template continues the prompt.",
        "Counted: the answers replayed, with steps of 8.93 ms and 1.07 ms a token, or those of the model that is named;",
        "the drafter begins without experience, and knows no schema.",
    ]
    for model in arguments.models:
        lines += ["", f"## {Path(model).name}", ""]
        for line in rows(model, arguments.streams, arguments.rounds, steps):
            lines.append(line)
            print(line, flush=True)
        (RESULTS / "drafts.md").write_text("\n".join(lines) + "\n")  # in case that the next model is interrupted
    write("drafts.md", lines + drafter_lines())


if __name__ == "__main__":
    main()
