"""Times the engine on a GPU from prompts to answers, beside transformers, vLLM and the device's roofline; takes up to twelve minutes.

A Llama of the shape of 3.1-8B (of 3.2-3B on a card of 24 GB) with random weights, bf16, greedy, prompts of token ids, ends of text
ignored, no prefix cache. transformers' `generate` (static cache) and `generate_batch` (continuous batching) run afterwards with the same
weights, then vLLM, where it is installed, with random weights. Each case is a part of its own. The floor of a step is reading weights and
KV once at the bandwidth of a copy, or multiplying at the rate of a large product where that takes longer; both are measured in the same
run. First a model of the shape of SmolLM2-135M at batch 64: is the host's time hidden behind the device's?
"""

from __future__ import annotations

import inspect
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import mixtures
import numpy as np
import peer_vllm

VLLM_SECONDS = 200
"""Most seconds of vLLM, which compiles a model when it loads it."""
PROFILED = 50
"""Steps that the profiler sees."""
THROUGHPUT, STEPS, IDLE = "Tokens a second", "Steps beside the roofline", "Host and device"


@dataclass
class Shape:
    """What a step of a model must move and multiply at least."""

    config: dict[str, Any]

    @property
    def layer_numbers(self) -> int:
        """Weights of all layers."""
        c = self.config
        heads = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        return int(c["num_hidden_layers"] * c["hidden_size"] * (heads + 3 * c["intermediate_size"]))

    @property
    def head_numbers(self) -> int:
        """Weights of the head."""
        return int(self.config["hidden_size"] * self.config["vocab_size"])

    def decode_floor(self, batch: int, context: float, copied: float, computed: float) -> float:
        """Seconds of a step of `batch` sequences of one token each."""
        numbers, c = self.layer_numbers + self.head_numbers, self.config
        kv = 2 * 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * batch * context
        return max(2 * numbers / copied, 2 * numbers * batch / computed) + kv / copied

    def prefill_floor(self, tokens: int, computed: float) -> float:
        """Seconds for a prompt: products of its layers, and what the causal mask leaves of its attention."""
        c = self.config
        attention = 2 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"] * tokens**2
        return (2 * self.layer_numbers * tokens + attention) / computed


@dataclass
class Clock:
    """Notes an engine's steps: the time from the end of the one before, how much of it was waiting for the device, and tokens given.

    From step `profile_from` on the torch profiler sees PROFILED of them.
    """

    llm: Any
    profile_from: int | None = None
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    profiler: Any = None
    span: float = math.nan
    busy: float = math.nan

    def __enter__(self) -> Clock:
        engine = self.llm.engine
        runner, step, collect = engine.runner, engine.step, engine.runner.collect
        waited, ended = 0.0, time.perf_counter()

        def collected(*given: Any) -> Any:
            nonlocal waited
            start = time.perf_counter()
            found = collect(*given)
            waited += time.perf_counter() - start
            return found

        def stepped() -> Any:
            nonlocal waited, ended
            if self.profile_from is not None and len(self.steps) == self.profile_from:
                self._start()
            waited, before = 0.0, ended
            report = step()
            ended = time.perf_counter()
            if report is not None:
                self.steps.append((ended - before, waited, len(report.tags) // 8))
            if self.profiler is not None and len(self.steps) == (self.profile_from or 0) + PROFILED:
                self._stop()
            return report

        engine.step, runner.collect = stepped, collected
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm.engine.step, self.llm.engine.runner.collect
        if self.profiler is not None:
            self._stop()

    def _start(self) -> None:
        import torch

        kind = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[kind.CUDA if torch.cuda.is_available() else kind.CPU])
        self.profiler.__enter__()

    def _stop(self) -> None:
        """The time from the first to the last of what the device did, and how much of it something was under way, in seconds."""
        import torch

        profiler, self.profiler = self.profiler, None
        profiler.__exit__(None, None, None)
        found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        ranges = sorted((event.time_range.start, event.time_range.end) for event in found)
        if not ranges:
            return
        busy, reached = 0.0, ranges[0][0]
        for start, end in ranges:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        self.span, self.busy = (reached - ranges[0][0]) / 1e6, busy / 1e6

    def decode(self, batch: int) -> list[tuple[float, float]]:
        """Seconds, and those waited, of the steps that gave all sequences a token; without the first, which others overlap."""
        return [(whole, waited) for whole, waited, tokens in self.steps if tokens == batch][1:]


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()


def load(run: common.Run, directory: Path, **settings: Any) -> Any:
    """The engine with random weights."""
    from chairlift import LLM

    more = {"device": run.device, "dtype": "float32" if run.dry else "bfloat16", "load_format": "dummy"}
    more |= {"enable_prefix_caching": False} | settings
    if run.dry:
        with common.steps_overlap(True):
            return LLM(str(directory), **more)
    return LLM(str(directory), **more)


def timed(llm: Any, token_ids: list[list[int]], answer: int) -> tuple[float, list[list[int]]]:
    """Seconds until all answers are there, and the answers."""
    from chairlift import SamplingParams

    began = time.perf_counter()
    outputs = llm.generate(token_ids, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True), progress=False)
    return time.perf_counter() - began, [output.token_ids for output in outputs]


@dataclass
class Case:
    """A workload: so many prompts at once."""

    count: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.count} x ({self.prompt} in, {self.answer} out)"

    @property
    def short(self) -> str:
        """For the names of parts."""
        return f"{self.count}x{self.prompt}+{self.answer}"


class Engine:
    """An engine with random weights that is loaded when a part needs it."""

    def __init__(self, run: common.Run, directory: Path, **settings: Any) -> None:
        self._run, self._directory, self._settings = run, directory, settings
        self._llm: Any = None

    def __call__(self) -> Any:
        """The engine."""
        if self._llm is None:
            began = time.perf_counter()
            self._llm = load(self._run, self._directory, **self._settings)
            decisions = dict(decision[:2] for decision in self._llm.info.decisions)
            graphs = decisions.get("CUDA graphs", "none on this device")
            self._run.say(f"Loaded in {time.perf_counter() - began:.1f} s. CUDA graphs: {graphs}.")
        return self._llm

    def close(self) -> None:
        """Gives its memory back."""
        self._llm = None
        common.free()


def ours(run: common.Run, engine: Engine, shape: Shape, case: Case, ceilings: tuple[float, float]) -> None:
    """The engine on a case; keeps its tokens a second and the first tokens of its answers for peers."""
    vocabulary, (copied, computed) = shape.config["vocab_size"], ceilings
    llm, token_ids = engine(), prompts(case.count, case.prompt, vocabulary)
    timed(llm, token_ids, min(2, case.answer))  # what is compiled for this shape is compiled
    with Clock(llm) as clock:
        seconds, answers = timed(llm, token_ids, case.answer)
    rate = case.count * case.answer / seconds
    run.row(THROUGHPUT, {"engine": "chairlift", "case": case.name, "s": seconds, "tokens/s": rate})
    row: dict[str, Any] = {"case": case.name}
    if case.answer == 1:
        floor, step = case.count * shape.prefill_floor(case.prompt, computed), seconds
    else:
        steps = [whole for whole, _ in clock.decode(case.count)]
        floor = shape.decode_floor(case.count, case.prompt + case.answer / 2, copied, computed)
        step = statistics.median(steps) if steps else math.nan
    run.row(STEPS, row | {"ms/step": step * 1e3, "floor ms": floor * 1e3, "of the floor": floor / step})
    run.keep(**{case.name: (rate, [answer[:8] for answer in answers])})


def idle(run: common.Run, name: str, llm: Any, batch: int, prompt: int, vocabulary: int) -> None:
    """How much of 50 decode steps the device does nothing, and what the host does meanwhile; without the profiler, and with it."""
    wanted = 4 if run.dry else 2 * PROFILED
    token_ids = prompts(batch, prompt, vocabulary)
    timed(llm, token_ids, 2)
    with Clock(llm) as plain:
        timed(llm, token_ids, wanted)
    steps = plain.decode(batch)
    before = len(plain.steps) - len(steps)
    with Clock(llm, profile_from=before + 2) as seen:
        timed(llm, token_ids, wanted)
    step = statistics.median(whole for whole, _ in steps)
    host = statistics.median(whole - waited for whole, waited in steps)
    device = seen.busy / PROFILED
    row = {"model": name, "batch": batch, "context": prompt + wanted // 2, "ms/step": step * 1e3, "host ms/step": host * 1e3}
    row |= {"device ms/step": device * 1e3, "device busy": device / step, "idle under the profiler": 1 - seen.busy / seen.span}
    run.row(IDLE, row)


def same_weights(run: common.Run, llm: Any, config: dict[str, Any]) -> Any:
    """transformers' model with copies of the engine's tensors, which themselves are of inference mode: compilers refuse such."""
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    network = llm.engine.runner.model.network
    hf_config = transformers.LlamaConfig(**{**config, "dtype": network.embedding.dtype})
    hf_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config).to(network.embedding.dtype)

    def put(module: Any, weight: Any) -> None:
        module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)

    put(model.model.embed_tokens, network.embedding)
    put(model.lm_head, network.head.weight)
    queries = hf_config.num_attention_heads * hf_config.head_dim
    kv = hf_config.num_key_value_heads * hf_config.head_dim
    for theirs, mine in zip(model.model.layers, network.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        for module, weight in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj), mine.mixer.qkv.weight.split([queries, kv, kv]), strict=True
        ):
            put(module, weight)
        for module, weight in zip((mlp.gate_proj, mlp.up_proj), mine.feed.gate_up.weight.chunk(2), strict=True):
            put(module, weight)
        put(attention.o_proj, mine.mixer.output.weight)
        put(mlp.down_proj, mine.feed.down.weight)
        put(theirs.input_layernorm, mine.mixer.norm.weight)
        put(theirs.post_attention_layernorm, mine.feed.norm.weight)
    put(model.model.norm, network.norm.weight)
    model.model.rotary_emb = LlamaRotaryEmbedding(config=hf_config).to(run.device)
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.eval()


def peer(run: common.Run, name: str, generate: Any, case: Case, vocabulary: int, *, whole: bool = False) -> None:
    """One of transformers' ways on one case: after two tokens to warm up, whose time also tells how long a step is.

    What is made for a length of answers is warmed up with the `whole`; its milliseconds a step have the prompt in them.
    """
    token_ids, few = prompts(case.count, case.prompt, vocabulary), min(2, case.answer)
    generate(token_ids, case.answer if whole else few)
    seconds, answers = _timed(generate, token_ids, case.answer)
    short, steps = (0.0, case.answer) if whole else (_timed(generate, token_ids, few)[0], max(1, case.answer - few))
    rate, right = run.results.values[case.name]
    row = {"engine": name, "case": case.name, "s": seconds, "tokens/s": case.count * case.answer / seconds}
    row |= {"ms/step": (seconds - short) / steps * 1e3, "chairlift / this": rate * seconds / (case.count * case.answer)}
    # Not a proof: rounding differs, and a token that differs changes all after it.
    equal = [one[:8] == other for one, other in zip(answers, right, strict=True)]
    row["first 8 tokens equal"] = f"{sum(equal)} of {len(equal)}"
    run.row(THROUGHPUT, row)
    common.free()


def _timed(generate: Any, token_ids: list[list[int]], answer: int) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    answers = generate(token_ids, answer)
    return time.perf_counter() - began, answers


def ways(run: common.Run, model: Any) -> tuple[Any, Any, Any]:
    """`generate` with a static cache, the same compiled, and `generate_batch`: functions of prompts and the length of answers."""
    import torch
    from transformers import GenerationConfig

    def static(token_ids: list[list[int]], answer: int, compiled: bool = False) -> list[list[int]]:
        ids = torch.tensor(token_ids, device=run.device)
        config = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation="static")
        config.disable_compile = not compiled
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return [row[len(token_ids[0]) :] for row in found.tolist()]

    def continuous(token_ids: list[list[int]], answer: int) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig

        config = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
        known = inspect.signature(model.generate_batch).parameters
        more: dict[str, Any] = {"persistent_manager": True, "progress_bar": False}
        wanted = {"allow_block_sharing": False, "max_memory_percent": 0.6, "max_requests_per_batch": 256}
        if run.dry:
            wanted |= {"num_blocks": 16, "page_size": 32, "max_batch_tokens": 64}
        allowed = inspect.signature(ContinuousBatchingConfig.__init__).parameters
        more["continuous_batching_config"] = ContinuousBatchingConfig(**{key: value for key, value in wanted.items() if key in allowed})
        found = model.generate_batch(token_ids, config, **{key: value for key, value in more.items() if key in known})
        # Names of requests end with their number.
        ordered = sorted(found.values(), key=lambda output: int(str(output.request_id).rsplit("_", 1)[-1]))
        if any(output.error for output in ordered):
            raise RuntimeError(str(next(output.error for output in ordered if output.error)))
        return [list(output.generated_tokens) for output in ordered]

    return static, lambda token_ids, answer: static(token_ids, answer, compiled=True), continuous


def vllm(run: common.Run, python: str, order: dict[str, Any], cases: list[Case], vocabulary: int) -> None:
    """vLLM on the cases, with weights of its own: its answers are others."""
    given = [{"name": case.name, "answer": case.answer, "prompts": prompts(case.count, case.prompt, vocabulary)} for case in cases]
    engine, counts = "vLLM", {case.name: case.count * case.answer for case in cases}
    for reply in peer_vllm.replies(python, order | {"cases": given}, min(VLLM_SECONDS, run.left) - 10):
        if "vllm" in reply:
            engine = f"vLLM {reply['vllm']}"
            continue
        name, seconds = reply["case"], reply["seconds"]
        row = {"engine": engine, "case": name, "s": seconds, "tokens/s": counts[name] / seconds}
        run.row(THROUGHPUT, row | {"chairlift / this": run.results.values[name][0] * seconds / counts[name]})


def large(run: common.Run, folder: Path, python: str | None) -> None:
    """The 8B shape, or the 3B shape on a card of 24 GB, then transformers with its weights, then vLLM if there is a Python for it."""
    size, shape_name = (4096, 14336, 32, 32, 8, 128_256), "8B"
    decodes = [Case(batch, 512, 256) for batch in (64, 1, 256, 32)]
    others = [Case(1, 8192, 1), Case(32, 1024, 1024)]
    step, blocks, length = 8192, 14_000, 8448
    if run.small:
        # Two copies of the weights take 13 GB, and these blocks 6 GB.
        size, shape_name = (3072, 8192, 28, 24, 8, 128_256), "3B"
        decodes, others, blocks = (
            [Case(32, 512, 256), Case(1, 512, 256), Case(64, 512, 256)],
            [Case(1, 8192, 1), Case(16, 1024, 1024)],
            3200,
        )
    if run.dry:
        size = (64, 96, 2, 4, 2, 512)
        decodes, others, step, blocks, length = [Case(3, 9, 4), Case(1, 9, 4)], [Case(1, 60, 1)], 64, 200, 128
    config = common.llama(*size)
    directory, shape = common.write_model(folder / "large", config), Shape(config)
    sizes = {
        "max_num_seqs": max(case.count for case in decodes),
        "max_num_batched_tokens": 256 if run.dry else step,
        "num_kv_blocks": blocks,
        "max_model_len": length,
    }
    engine, vocabulary, ceilings = Engine(run, directory, **sizes), config["vocab_size"], common.ceilings(run)
    timed_cases = []
    for case in (decodes[0], others[0], *decodes[1:], *others[1:]):
        if run.part(f"{shape_name}-{case.short}", partial(ours, run, engine, shape, case, ceilings), needs=25, most=120):
            timed_cases.append(case)
    batch, prompt = (3, 9) if run.dry else (64, 512)
    run.part(f"{shape_name}-idle", lambda: idle(run, shape_name, engine(), batch, prompt, vocabulary), needs=15, most=60)
    beside_transformers(run, engine, config, [case for case in decodes if case in timed_cases], vocabulary)
    engine.close()
    if python and timed_cases:
        settings = {name: sizes[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
        settings |= {"dtype": "float32" if run.dry else "bfloat16", "gpu_memory_utilization": 0.85}
        order = {"model": str(directory), "settings": settings}
        run.part("vllm", lambda: vllm(run, python, order, timed_cases, vocabulary), needs=90, most=VLLM_SECONDS)


def beside_transformers(run: common.Run, engine: Engine, config: dict[str, Any], cases: list[Case], vocabulary: int) -> None:
    """transformers' ways on the cases that they are for, with the engine's weights."""
    made: Any = None

    def model() -> Any:
        nonlocal made
        if made is None:
            made = same_weights(run, engine(), config)
            engine.close()
        return made

    def continuous(case: Case) -> None:
        peer(run, "transformers generate_batch", ways(run, model())[2], case, vocabulary, whole=True)
        # It is sized for the requests that it was made with.
        getattr(model(), "destroy_cached_continuous_batching_manager", lambda: None)()
        common.free()

    def static(case: Case, compiled: bool) -> None:
        name = f"transformers generate, static cache{', compiled' * compiled}"
        peer(run, name, ways(run, model())[compiled], case, vocabulary, whole=compiled)

    for case in [case for case in cases if case.count > 1][:2]:
        run.part(f"generate_batch-{case.short}", partial(continuous, case), needs=40, most=120)
    for case in cases[:2]:
        run.part(f"generate-{case.short}", partial(static, case, False), needs=25, most=60)
    if not run.dry:
        for case in cases[:2]:
            run.part(f"generate-compiled-{case.short}", partial(static, case, True), needs=70, most=150)


def small(run: common.Run, folder: Path) -> None:
    """The 135M shape at batch 64, with graphs and without: steps of a millisecond, where a host that is slow shows."""
    config = common.llama(*((64, 96, 2, 4, 2, 512) if run.dry else (576, 1536, 30, 9, 3, 49_152)), tie_word_embeddings=True)
    directory = common.write_model(folder / "small", config)
    batch, prompt = (4, 9) if run.dry else (64, 128)
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": 64 if run.dry else 4096, "num_kv_blocks": 300 if run.dry else 8000}
    for name, eager in (("135M", False), ("135M-eager", True)):
        engine = Engine(run, directory, **sizes, max_model_len=1024, enforce_eager=eager)
        run.part(name, lambda name=name, engine=engine: idle(run, name, engine(), batch, prompt, config["vocab_size"]), most=60)
        engine.close()


def several(run: common.Run, folder: Path) -> None:
    """Steps of mixtures of experts, in bf16 and in fp8."""
    shapes = mixtures.configs()
    if run.dry:
        tiny = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
        shapes = {"tiny": common.llama(64, 96, 2, 4, 2, 512, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **tiny)}
    for name, config in shapes.items():
        directory = common.write_model(folder / name, config)
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 64 if run.dry else 4096, "num_kv_blocks": 300 if run.dry else 4000}
        for kind, more in {"bf16": {}, "fp8": {"quantization": "fp8"}}.items():
            if kind == "fp8" and run.dry:
                continue  # a CPU has no products in fp8
            engine = Engine(run, directory, **sizes, max_model_len=128 if run.dry else 4096, **more)

            def timed_steps(name: str = f"{name}, {kind}", engine: Engine = engine, vocabulary: int = config["vocab_size"]) -> None:
                for batch in (2,) if run.dry else (1, 16, 64):
                    idle(run, name, engine(), batch, 9 if run.dry else 256, vocabulary)

            run.part(f"{name}-{kind}", timed_steps, needs=20, most=60)
            engine.close()


def main() -> int:
    """The small model first, for it takes seconds; the peers last."""
    run = common.begin("serve", __doc__ or "", 12.5, vllm="a Python that has vLLM, which is timed too (default: this one, if it has)")
    python = run.flags["vllm"] or sys.executable
    has_vllm = peer_vllm.has_vllm(python)
    if not has_vllm:
        print(f"not timed: vLLM, which {python} does not have", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small(run, folder)
        several(run, folder)
        large(run, folder, python if has_vllm else None)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
