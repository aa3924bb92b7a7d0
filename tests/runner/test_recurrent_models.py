"""Hybrid models: their GGUF files, their states in steps and in an engine, and what is refused."""

from pathlib import Path

import gguf_recurrent
import numpy as np
import pytest
import tiny_models
import torch
from cpu_logits import EXACT, logits
from gguf_recurrent import NAMES

from chairlift import LLM, SamplingParams
from chairlift.checkpoint.gguf import convert
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidSetting, OutOfMemory, UnsupportedModel
from chairlift.models.config import ModelConfig, load_shape
from chairlift.outputs import RequestOutput
from chairlift.runner.buffers import StepSizes
from chairlift.runner.build import build_runner
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.tensor_parallel.split import part_of
from chairlift.runner.weights import open_weights

TABLE = [1, 2, 3, 4, 5]
"""The blocks of all sequences: their keys and values are equal, or behind those of the sequence that is tested."""


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.slow
def test_a_file_gives_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    model = gguf_recurrent.rounded_model(kind)
    gguf_recurrent.write(model, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    with torch.inference_mode():
        expected = model(torch.arange(11)[None] * 7 % 300).logits[0].numpy()
    assert np.abs(logits(tmp_path / "converted") - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("qwen3_5_text", "blk.2.ssm_a"),
        ("granitemoehybrid_dense", "blk.2.ssm_conv1d.weight"),
        ("nemotron_h", "blk.0.ssm_dt.bias"),
    ],
)
def test_a_file_without_a_tensor_of_a_convolution_or_a_state_is_refused_by_name(tmp_path: Path, kind: str, tensor: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), tmp_path / "tiny.gguf", without=tensor)
    with pytest.raises(UnsupportedModel, match=rf"tensor model\.layers\.{tensor[4]}\..* is missing"):
        load(converted(tmp_path))


@pytest.mark.parametrize(("listed", "reason"), [([True, False], "has 2 entries for 3 layers"), ([0, 1, 5], "recurrent_layers must be")])
def test_a_file_whose_list_of_recurrent_layers_does_not_fit_is_refused(tmp_path: Path, listed: list[int], reason: str) -> None:
    replaced = {"attention.recurrent_layers": listed}
    gguf_recurrent.write(gguf_recurrent.rounded_model("qwen3_5_text"), tmp_path / "tiny.gguf", replaced=replaced)
    with pytest.raises(UnsupportedModel, match=f"tiny.gguf: .*{reason}"):
        converted(tmp_path)


def converted(directory: Path) -> Path:
    """The directory that is made of tiny.gguf."""
    convert(directory / "tiny.gguf", directory / "converted")
    return directory / "converted"


def load(directory: Path) -> CpuExecutor:
    """A model with 12 blocks of 16 tokens and 8 slots."""
    config, shape = EngineConfig(device="cpu", threads=2), ModelConfig.load(directory)
    executor = CpuExecutor.load(config, open_weights(config, directory), shape, EXACT)
    executor.allocate(12, 16, 0)
    executor.allocate_states(8)
    assert executor.recurrent_states is not None
    assert executor.recurrent_states.slot_bytes == shape.state_bytes
    return executor


def step(
    executor: CpuExecutor, chunks: list[tuple[list[int], int, int, list[int]]], saves: list[tuple[int, int, int]] = ()
) -> list[np.ndarray]:
    """Computes chunks (tokens, first position, slot, blocks) and returns the logits of each."""
    positions = [np.arange(start, start + len(tokens)) for tokens, start, _, _ in chunks]
    places = [np.array(table)[at // 16] * 16 + at % 16 for at, (_, _, _, table) in zip(positions, chunks, strict=True)]
    starts = np.cumsum([0, *map(len, positions)])
    arrays = {
        "input_ids": np.concatenate([tokens for tokens, *_ in chunks]),
        "positions": np.concatenate(positions),
        "slot_mapping": np.concatenate(places),
        "query_starts": starts,
        "context_lens": np.array([at[-1] + 1 for at in positions]),
        "batch_slots": np.arange(len(chunks)),
        "block_tables": np.array([table for *_, table in chunks]),
        "state_slots": np.array([slot for _, _, slot, _ in chunks]),
        "state_saves": np.array(saves).reshape(-1),
    }
    executor.decoder.forward(
        executor.cache, states=executor.recurrent_states, **{name: array.astype(np.int32) for name, array in arrays.items()}
    )
    return np.split(executor.logits(np.arange(starts[-1])).copy(), starts[1:-1])


@pytest.mark.parametrize("name", ["lfm2-moe", "qwen3-next", "granite4-hybrid"])
@pytest.mark.slow
def test_chunks_company_saves_and_copies_change_no_bit(tmp_path: Path, name: str) -> None:
    tiny_models.write(name, tmp_path)
    executor = load(tmp_path)
    tokens, others = (np.random.default_rng(seed).integers(0, 199, 70).tolist() for seed in (1, 2))
    (whole,) = step(executor, [(tokens, 0, 0, TABLE)])
    for size in (1, 7):
        parts = [step(executor, [(tokens[at : at + size], at, 1, TABLE)])[0] for at in range(0, 70, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    company = [(others[:33], 0, 2, [6, 7, 8, 8, 8]), (tokens[:33], 0, 3, TABLE), (others[:5], 0, 4, [9] * 5)]
    found = step(executor, company, saves=[(1, 33, 7), (1, 16, 5), (0, 20, 6), (1, 20, 1)])
    np.testing.assert_array_equal(found[1], whole[:33])
    # From each of the states that were saved, and from copies of them.
    np.testing.assert_array_equal(step(executor, [(tokens[16:], 16, 5, TABLE)])[0], whole[16:])
    executor.copy_states(np.array([[7, 0], [1, 5]]))
    for slot, start in ((0, 33), (5, 20), (1, 20)):
        np.testing.assert_array_equal(step(executor, [(tokens[start:], start, slot, TABLE)])[0], whole[start:])
    with pytest.raises(ValueError, match="sequence 0 goes on after 20 tokens, and the state in slot 7 has seen 33"):
        step(executor, [(tokens[20:], 20, 7, TABLE)])


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
@pytest.mark.slow
def test_an_engine_gives_the_same_tokens_with_caches_forks_and_little_memory(tmp_path: Path, kind: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), tmp_path / "tiny.gguf")
    prompts = [np.random.default_rng(seed).integers(0, 256, 40 + seed).tolist() for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    small = {"device": "cpu", "threads": 1, "block_size": 8, "cache_dir": str(tmp_path / "cache"), "speculative_config": {"method": "off"}}
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=1, num_kv_blocks=40, enable_prefix_caching=False) as llm:
        expected = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
        alone = llm.info.num_bytes
    turns = [prompt + answer[:12] for prompt, answer in zip(prompts, expected, strict=True)]
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=4, num_kv_blocks=60, max_num_batched_tokens=24) as llm:
        for found in (0, 32):
            outputs = llm.generate(prompts, greedy)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert all(found <= output.cached_tokens <= found + 8 for output in outputs)
        outputs = llm.generate(turns, greedy)
        assert [output.outputs[0].token_ids[:8] for output in outputs] == [answer[12:] for answer in expected]
        assert [output.cached_tokens for output in outputs] == [48] * 4
        large = llm.info.num_bytes
        several = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, n=2)
        assert [one.token_ids for one in llm.generate([prompts[0]], several)[0].outputs] == [expected[0]] * 2
    # Room for the blocks of little more than two of the four sequences.
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=4, num_kv_blocks=20, max_num_batched_tokens=24) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)] == expected
        assert llm.engine.stats().preemptions > 0
        # The two have 24 slots instead of 6, and 40 blocks on average, as the first one.
        assert (llm.info.num_bytes + large) / 2 - alone == 18 * llm.engine.runner.model_config.state_bytes


def bits(answer: RequestOutput) -> tuple[list[int], list[tuple[int, float]]]:
    """An answer's tokens, and the log-probability of each."""
    return list(answer.token_ids), [(one.token, one.logprob) for one in answer.logprobs or ()]


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
@pytest.mark.slow
def test_chunks_hits_swaps_forks_and_rewinds_change_no_bit(tmp_path: Path, kind: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), tmp_path / "tiny.gguf")
    prompts = [np.random.default_rng(seed).integers(0, 256, 37 + seed).tolist() for seed in range(4)]
    greedy, more = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1), [7, 8, 9]
    off = {"speculative_config": {"method": "off"}}
    small = {"device": "cpu", "threads": 1, "block_size": 8, "max_model_len": 128, "cache_dir": str(tmp_path / "cache"), **off}
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=1, num_kv_blocks=60, enable_prefix_caching=False) as llm:
        alone = [bits(llm.generate([prompt], greedy)[0].outputs[0]) for prompt in prompts]
        rewound = [
            bits(llm.generate([prompt + tokens[:9] + more], greedy)[0].outputs[0])
            for prompt, (tokens, _) in zip(prompts, alone, strict=True)
        ]
    for chunk in (2, 5, 13):
        with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=min(chunk, 4), num_kv_blocks=90, max_num_batched_tokens=chunk) as llm:
            for cached in (0, 32):
                outputs = llm.generate(prompts[:2], greedy)
                assert [bits(output.outputs[0]) for output in outputs] == alone[:2], (chunk, cached)
                assert min(output.cached_tokens for output in outputs) == cached
    for swap_space in (0, 1 << 22):
        sizes = {"max_num_seqs": 4, "num_kv_blocks": 20, "max_num_batched_tokens": 24, "swap_space": swap_space}
        with LLM(str(tmp_path / "tiny.gguf"), **small, **sizes) as llm:
            assert [bits(output.outputs[0]) for output in llm.generate(prompts, greedy)] == alone
            assert llm.engine.stats().preemptions > 0
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=4, num_kv_blocks=90) as llm:
        for prompt, whole, tail in zip(prompts[:2], alone, rewound, strict=False):
            with llm.open(prompt) as sequence:
                assert bits(sequence.generate(greedy)) == whole
                (fork,) = sequence.fork()
                for one in (fork, sequence):
                    one.rewind(11)
                    one.append(more)
                    assert bits(one.generate(greedy)) == tail
                fork.drop()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
@pytest.mark.slow
def test_torch_gives_the_same_tokens_and_finds_the_same_states(tmp_path: Path, kind: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), tmp_path / "tiny.gguf")
    prompts = [np.random.default_rng(seed).integers(0, 256, 30 + seed).tolist() for seed in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    small = {"device": "cpu", "threads": 1, "block_size": 8, "cache_dir": str(tmp_path / "cache"), "speculative_config": {"method": "off"}}
    found = []
    for runner in ("rust", "torch"):
        # Chunks end inside of prompts, and blocks are scarce.
        with LLM(str(tmp_path / "tiny.gguf"), **small, runner=runner, max_num_seqs=3, num_kv_blocks=17, max_num_batched_tokens=24) as llm:
            answers = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
            turns = [prompt + answer[:10] for prompt, answer in zip(prompts, answers, strict=True)]
            outputs = [llm.generate([turn], greedy)[0] for turn in turns]
            found.append((answers, [(output.outputs[0].token_ids, output.cached_tokens) for output in outputs]))
            assert llm.engine.stats().preemptions > 0
    assert found[0] == found[1]
    assert sum(cached for _, cached in found[0][1]) > 0


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "nemotron_h"])
@pytest.mark.slow
def test_drafts_change_no_token(tmp_path: Path, kind: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), tmp_path / "tiny.gguf")
    small = {"device": "cpu", "threads": 1, "block_size": 8, "cache_dir": str(tmp_path / "cache"), "num_kv_blocks": 90, "max_num_seqs": 4}
    prompts = [np.random.default_rng(seed).integers(0, 256, 30).tolist() for seed in range(4)]
    # The greedy answers are found among the finished texts. Others begin like one of them and part from it, which rejects drafts.
    cool = [SamplingParams(temperature=0.02 * at, seed=at, max_tokens=40, ignore_eos=True) for at in (0, 0, 1, 2)]
    found = []
    for settings in ({"speculative_config": {"method": "off"}}, {"draft_corpus_tokens": 2000}):
        with LLM(str(tmp_path / "tiny.gguf"), **small, **settings) as llm:
            llm.generate([[5] * 9], SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True, seed=1))
            outputs = [output for params in cool for output in llm.generate(prompts, params)]
            found.append([output.outputs[0].token_ids for output in outputs])
            llm.engine.check()
            stats = llm.engine.stats()
    assert found[0] == found[1]
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize(("seqs", "decision"), [(2, "up to 8 tokens"), (12, "none")])
def test_nothing_is_drafted_without_slots_for_the_states_before(tmp_path: Path, seqs: int, decision: str) -> None:
    gguf_recurrent.write(gguf_recurrent.rounded_model("lfm2"), tmp_path / "tiny.gguf")
    state = 4 * 2 * 2 * 64
    room = {"kv_cache_memory_bytes": 2 * 12 * state, "max_num_seqs": seqs, "cache_dir": str(tmp_path / "cache"), "block_size": 8}
    with LLM(str(tmp_path / "tiny.gguf"), device="cpu", threads=1, max_model_len=16, **room) as llm:
        assert ("speculative decoding", decision) in [tuple(entry[:2]) for entry in llm.info.decisions]


def test_a_step_that_moved_states_on_is_not_repeated_for_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.write("lfm2", tmp_path)
    config = EngineConfig(device="cpu", runner="torch", num_kv_blocks=4, block_size=8, max_num_seqs=2, max_num_batched_tokens=8)
    runner = build_runner(config, tmp_path)

    def forward(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner.model.network, "forward", forward)
    with pytest.raises(ChairliftError, match="recurrent layers ran out of memory: lower --gpu-memory-utilization") as raised:
        runner.launch(0, StepSizes(1, 1, 1))
    assert not isinstance(raised.value, OutOfMemory)


def test_a_model_without_a_tensor_of_its_states_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3.5", tmp_path)
    config = EngineConfig(device="cpu", threads=1)
    for missing in ("linear_attn.conv1d.weight", "linear_attn.dt_bias", "linear_attn.in_proj_a.weight"):
        state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(f"2.{missing}")}
        model.save_pretrained(tmp_path, state_dict=state)
        with pytest.raises(UnsupportedModel, match=f"no tensor model.layers.2.{missing}"):
            CpuExecutor.load(config, open_weights(config, tmp_path), ModelConfig.load(tmp_path), EXACT)
    with pytest.raises(InvalidSetting, match="the recurrent layers of Qwen3_5ForCausalLM cannot be split"):
        part_of(load_shape(tmp_path, in_torch=True), 2)
