"""The examples of search on live sequences: the same answers as plain requests with the prefix cache, for at most half the tokens."""

import importlib.util
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "The lift carries people up the mountain. It has forty chairs, and each of them"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.fixture
def make(byte_model):
    def llm():
        sizes = {"num_kv_blocks": 256, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 256}
        return LLM(byte_model, load_format="dummy", **sizes)

    return llm


def computed(llm):
    return llm.engine.stats().computed_tokens


def plain_beam_search(llm, prompt, width, length):
    likeliest = SamplingParams(max_tokens=1, temperature=0.0, logprobs=width, ignore_eos=True)
    tokens = llm.tokenizer.encode(prompt)
    beams = [(0.0, tokens)]
    for _ in range(length):
        outputs = llm.generate([beam for _, beam in beams], likeliest)
        candidates = [
            (score + logprob, [*beam, token])
            for (score, beam), output in zip(beams, outputs, strict=True)
            for token, logprob in output.logprobs[0].top
        ]
        beams = sorted(candidates, key=lambda candidate: candidate[0], reverse=True)[:width]
    return [(score, beam[len(tokens) :]) for score, beam in beams]


def plain_tree_of_thoughts(llm, prompt, depth, branches, keep, tokens):
    level = [(llm.tokenizer.encode(prompt), [])]
    for number in range(depth):
        step = llm.tokenizer.encode(f"\nStep {number + 1}:", add_special_tokens=False)
        paths = [([*path, *step], logprobs) for path, logprobs in level for _ in range(branches)]
        params = [SamplingParams(max_tokens=tokens, stop=("\n",), temperature=0.8, seed=seed, logprobs=0) for seed in range(len(paths))]
        outputs = llm.generate([path for path, _ in paths], params)
        thoughts = [
            ([*path, *output.token_ids], [*logprobs, *(one.logprob for one in output.logprobs)])
            for (path, logprobs), output in zip(paths, outputs, strict=True)
        ]
        thoughts.sort(key=lambda thought: sum(thought[1]) / len(thought[1]), reverse=True)
        level = thoughts[:keep]
    return [path for path, _ in level]


@pytest.mark.parametrize(
    ("name", "plain", "sizes"),
    [
        ("beam_search", plain_beam_search, {"width": 3, "length": 20}),
        ("tree_of_thoughts", plain_tree_of_thoughts, {"depth": 5, "branches": 6, "keep": 2, "tokens": 2}),
    ],
)
def test_a_search_computes_at_most_half_the_tokens_and_finds_the_same(make, name, plain, sizes):
    with make() as llm:
        found, tokens = example(name)(llm, PROMPT, **sizes), computed(llm)
        assert llm.engine.usage()["tenants"][""]["held"] == 0
    with make() as llm:
        expected, plain_tokens = plain(llm, PROMPT, **sizes), computed(llm)
    assert found == expected
    assert tokens <= plain_tokens / 2, (tokens, plain_tokens)


def test_best_of_n_drops_everything(make):
    with make() as llm:
        free = llm.engine.stats().free_blocks
        score, text = example("best_of_n")(llm, PROMPT, count=8, rounds=3, tokens=5)
        assert score < 0
        assert text
        assert llm.engine.stats().free_blocks == free
