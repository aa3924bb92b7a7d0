"""Engines on a device that works as late as it may, and scripts of requests to run on them."""

import json
import random
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lazy_device import BROKEN, CellModel, LazyCopyStream, LazyDevice

from chairlift import SamplingParams, Scheduling, _core
from chairlift.config import EngineConfig
from chairlift.engine import engine as engine_module
from chairlift.engine.choice import FINISH_REASONS
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.kernels.resolve_reference import resolve_reference
from chairlift.kernels.sampling import reference
from chairlift.runner.build import build_runner
from chairlift.runner.torch_backend import TorchBackend
from chairlift.sampling import StructuredOutput

VOCABULARY, EOS = 97, 5
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
}
LONGEST = 48
POLICIES = tuple(name for name, _ in _core.POLICIES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cells")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Microseconds, which pass by themselves at each look, and when a test lets them."""
    now = [1_000_000]

    def look() -> int:
        now[0] += 100
        return now[0]

    monkeypatch.setattr("chairlift.engine.clock.now", look)
    return now


@pytest.fixture
def lazy():
    with LazyDevice() as device:
        yield device


@pytest.fixture
def make(directory: Path, lazy: LazyDevice, monkeypatch: pytest.MonkeyPatch):
    """Makes engines on the lazy device, with steps that overlap and without."""
    monkeypatch.setattr("chairlift.runner.torch_runner.CopyStream", lambda device: LazyCopyStream(lazy))
    monkeypatch.setattr("chairlift.runner.build.time_swap", lambda model, blocks: 1)

    def sample(logits: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        return lazy.run(reference.sample, (len(logits),), logits, *rest, **more)

    def score(logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
        return lazy.run(reference.score, (len(places), 3 + 2 * count), logits, places, tokens, count)

    def resolve(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
        return lazy.run(resolve_reference, input_ids.shape, input_ids, last_token)

    monkeypatch.setattr("chairlift.runner.device_buffers.resolve_reference", resolve)
    # In the place of kernels, which are for CUDA alone.
    for name, kernel in (("sample", sample), ("logprobs", score)):
        monkeypatch.setitem(sys.modules, f"chairlift.kernels.sampling.{name}", SimpleNamespace(**{kernel.__name__: kernel}))

    def engine(overlaps: bool, **settings) -> Engine:
        def runner(config, directory, eos, on_phase):
            load = lambda *given: CellModel(lazy, VOCABULARY)  # noqa: E731
            return build_runner(config, directory, on_phase, partial(TorchBackend, load=load, overlaps=overlaps))

        monkeypatch.setattr(engine_module, "_build_runner", runner)
        small = {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": LONGEST}
        return Engine(EngineConfig(model=str(directory), load_format="dummy", device="cpu", **small | settings))

    return engine


class Form:
    """A grammar's matcher: which tokens may come depends on all so far, and after `length` of them only the end may."""

    def __init__(self, length: int, breaks_at: int) -> None:
        self.left, self.breaks_at, self.state, self.over = length, breaks_at, 1, False

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        assert not self.over, "a mask was asked for behind the end"
        allowed = [EOS] if not self.left else [token for token in range(VOCABULARY - 1) if token != EOS and (token + self.state) % 3]
        for token in allowed:
            bitmask[index, token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32)).item()

    def copy(self) -> "Form":
        raise AssertionError("no tokens are drafted where steps overlap")

    def forced(self) -> list[int]:
        return []

    def accept(self, token: int) -> None:
        assert not self.over
        assert not self.left if token == EOS else self.left and (token + self.state) % 3, "out of step"
        self.over, self.left, self.state = token == EOS, self.left - 1, self.state * 7 + token
        if self.left == self.breaks_at:
            raise ValueError("a grammar that fails on the way")


@dataclass
class ScriptedRequest:
    """A request of a script: when it is added, and after how many tokens its caller leaves, if it does."""

    tag: int
    prompt: list[int]
    params: SamplingParams
    scheduling: Scheduling
    after: int
    leaves: int | None
    form: tuple[int, int]

    def grammar(self) -> Future | None:
        if self.params.structured_output is None:
            return None
        future: Future = Future()
        future.set_result(SimpleNamespace(matcher=lambda budget, charge: Form(*self.form)))
        return future


def script(seed: int) -> list[ScriptedRequest]:
    source = random.Random(seed)
    requested = []
    for index in range(source.randint(4, 14)):
        stem = [(i * i + source.randrange(2) * (i // 5)) % 90 for i in range(source.randint(0, 22))]
        prompt = [*stem, *(source.randrange(90) for _ in range(source.randint(1, 6)))]
        if source.random() < 0.08:
            prompt[source.randrange(len(prompt))] = BROKEN
        settings: dict = {"max_tokens": source.randint(1, 20), "temperature": source.choice([0.0, 0.7, 2.0]), "seed": source.randrange(9)}

        def sometimes(share: float, settings: dict = settings, **values: object) -> None:
            if source.random() < share:
                settings |= values

        sometimes(0.2, top_k=source.randint(1, 9))
        sometimes(0.2, top_p=0.8)
        sometimes(0.1, min_p=0.1)
        sometimes(0.3, repetition_penalty=1.4)
        sometimes(0.3, presence_penalty=0.9, frequency_penalty=0.4)
        sometimes(0.2, logit_bias={3: 4.0, EOS: 3.0})
        sometimes(0.2, min_tokens=source.randint(1, settings["max_tokens"]))
        sometimes(0.2, bad_words=((3, 4), (9,), (3,)))
        sometimes(0.15, allowed_token_ids=tuple(range(0, 40)))
        sometimes(0.4, stop_token_ids=tuple(source.sample(range(90), 12)))
        sometimes(0.3, logprobs=source.randint(0, 4))
        sometimes(0.2, prompt_logprobs=source.randint(0, 3))
        sometimes(0.3, ignore_eos=True)
        sometimes(0.2, n=source.randint(2, 3))
        if source.random() < 0.3:
            settings = {name: settings[name] for name in ("max_tokens", "temperature", "seed")} | {
                "structured_output": StructuredOutput("regex", "x")
            }
        patience = source.randint(1, 30) if source.random() < 0.15 else 1e8
        scheduling = Scheduling(
            priority=source.randrange(3), tenant="ab"[source.randrange(2)], predicted_tokens=settings["max_tokens"], deadline_ms=patience
        )
        form = source.randint(0, 8), source.choice([-5, -5, -5, 2])
        leaves = source.choice([None, None, None, source.randint(1, 8)])
        requested.append(ScriptedRequest(100 * index, prompt, SamplingParams(**settings), scheduling, source.randint(0, 20), leaves, form))
    return requested


@dataclass
class Received:
    """Everything that the caller of one sequence got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    prompt: list[bytes] = field(default_factory=list)
    finish: str | None = None


def live(engine: Engine, requested: list[ScriptedRequest], clock: list[int]) -> dict[int, Received]:
    """Runs a script to its end: what each tag received. Requests come when so many tokens have, and callers leave likewise."""
    reported: dict[int, Received] = {}
    leaving, waiting, given = {}, sorted(requested, key=lambda one: one.after), 0
    while waiting or engine.has_work:
        while waiting and (waiting[0].after <= given or not engine.has_work):
            one = waiting.pop(0)
            engine.compile = lambda _, one=one: one.grammar()
            engine.add(EngineRequest.of(one.tag, one.prompt, one.params, one.scheduling))
            for tag in range(one.tag, one.tag + one.params.num_sequences):
                reported[tag], leaving[tag] = Received(), one.leaves
        clock[0] += 1000
        report = engine.step()
        engine.check()
        assert report is not None
        tags, tokens = np.frombuffer(report.tags, "<u8").tolist(), np.frombuffer(report.tokens, "<i4").tolist()
        logprobs = np.frombuffer(report.logprobs, "<f4") if report.logprobs else np.zeros(len(tags), "<f4")
        assert set(report.details) <= set(tags)
        for timeline in report.ended:
            if timeline["finish"] == "deadline":
                reported[timeline["tag"]].finish = "deadline"
        for tag, lines in report.prompts:
            reported[tag].prompt.append(lines)
        for tag, token, logprob, finish in zip(tags, tokens, logprobs, report.finishes, strict=True):
            given += 1
            one = reported[tag]
            assert one.finish is None, "a token behind the end"
            one.tokens.append(token)
            one.logprobs.append(logprob.tobytes())
            one.details.append(report.details.get(tag, b""))
            one.finish = FINISH_REASONS[finish]
            if one.finish is None and len(one.tokens) == leaving[tag]:
                one.finish = "left"
                assert engine.abort(tag, stopped=tag % 2 == 0)
        for tag in report.starved:
            assert reported[tag].finish is None
            reported[tag].finish = "starved"
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.swapped) == (0, 0, 0)
    assert (stats.free_blocks, stats.free_host_blocks) == (stats.total_blocks, stats.host_blocks)
    return {tag: Received(one.tokens, one.logprobs, one.details, [b"".join(one.prompt)], one.finish) for tag, one in reported.items()}


def compare(reported: list[dict[int, Received]]) -> None:
    """Whether two lives of a script are the same; how far a sequence came that ran out of time is a matter of time."""
    for tag in {tag for answers in reported for tag, one in answers.items() if one.finish == "deadline"}:
        one, two = (answers.pop(tag) for answers in reported)
        for first, second in ((one.tokens, two.tokens), (one.logprobs, two.logprobs), (one.details, two.details)):
            assert all(a == b for a, b in zip(first, second, strict=False))
    assert reported[0] == reported[1]
