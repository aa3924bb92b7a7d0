import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from chairlift.runner.philox import philox, uniforms
from chairlift.runner.sampler import Sampler
from chairlift.sampling import SamplingParams

DRAWS = 4000
ROUNDS = (100, 350)
"""Candidates of the first rounds here: few enough that a small vocabulary needs all of them, and a third."""


def empty() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


def sampler(*params: SamplingParams, seeds: tuple[int, ...] = ()) -> Sampler:
    made = Sampler(max(len(params), 1), torch.device("cpu"))
    for row, one in enumerate(params):
        made.seat(row, one, empty(), 0, seeds[row] if seeds else row)
    return made


def draws(logits: torch.Tensor, count: int = DRAWS, **settings: float) -> np.ndarray:
    """What one row of logits gives at many positions."""
    made = sampler(SamplingParams(**settings), seeds=(123,))
    rows = np.zeros(count, dtype=np.int32)
    return made.sample(logits.expand(count, -1).clone(), rows, np.arange(count))


def reference(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The distribution to draw from, by sorting everything."""
    ordered, tokens = (logits.double() / temperature).sort(descending=True, stable=True)
    p = ordered.softmax(-1)
    if top_k:
        p[top_k:] = 0
    p /= p.sum()
    p[p.cumsum(0) - p >= top_p] = 0
    p[p < min_p * p[0]] = 0
    return torch.zeros_like(p).index_copy(0, tokens, p / p.sum())


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 400, "temperature": 2.0},
    {"top_k": 200, "temperature": 3.0},
    {"top_k": 300, "top_p": 0.7, "temperature": 4.0},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 4.0},
    {"min_p": 0.1},
    {"min_p": 0.001, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.parametrize("vocabulary", [50, 700])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_draws_follow_the_distribution(settings, vocabulary, monkeypatch):
    monkeypatch.setattr("chairlift.runner.sampler.CANDIDATES", ROUNDS)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference(logits, **settings).numpy()
    counts = np.bincount(draws(logits, **settings), minlength=vocabulary)
    assert not counts[expected == 0].any()
    # The seed is fixed, so this either holds or not: five standard deviations for each token, and for the tail together.
    assert (np.abs(counts - DRAWS * expected) <= 5 * np.sqrt(DRAWS * expected * (1 - expected)) + 2).all()
    tail = np.argsort(-expected)[ROUNDS[0] :]
    mass = expected[tail].sum()
    assert abs(counts[tail].sum() - DRAWS * mass) <= 5 * np.sqrt(DRAWS * mass) + 1e-9


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 9.0]])
    made = sampler(*[SamplingParams(temperature=0.0)] * 3)
    found = made.sample(logits, np.arange(3), np.zeros(3))
    assert found.dtype == np.int32
    assert found.tolist() == [1, 0, 3]


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert set(draws(logits, 50, temperature=1e-300)) == {int(logits.argmax())}


def test_equal_seeds_draw_equally_whatever_the_batch():
    generator = torch.Generator().manual_seed(0)
    params = [SamplingParams(**{"temperature": 1.3} | CASES[i % len(CASES)]) for i in range(20)]
    params[3] = params[11] = SamplingParams(temperature=0.0)
    logits = torch.randn(20, 5000, generator=generator) * 1.5
    made = sampler(*params, seeds=tuple(range(100, 120)))
    together = made.sample(logits.clone(), np.arange(20), np.arange(20) * 7)
    order = np.random.default_rng(0).permutation(20)
    shuffled = made.sample(logits[torch.from_numpy(order)], order, order * 7)
    assert shuffled.tolist() == together[order].tolist()
    for row in range(20):
        alone = made.sample(logits[row : row + 1].clone(), np.array([row]), np.array([row * 7]))
        assert alone.tolist() == [together[row]]


def test_seeds_and_positions_change_the_draw():
    logits = torch.zeros(64, 1000)
    made = sampler(*[SamplingParams()] * 64)
    first, second = made.sample(logits.clone(), np.arange(64), np.full(64, 5)), made.sample(logits.clone(), np.arange(64), np.full(64, 6))
    assert len(set(first)) > 50
    assert (first != second).sum() > 55


def test_rows_that_are_not_finite_fail_and_harm_nobody():
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=float(row % 2), repetition_penalty=1.1, presence_penalty=0.5) for row in range(6)]
    healthy = sampler(*params).sample(logits.clone(), np.arange(6), np.arange(6))
    logits[0, 17] = logits[1, 300] = float("nan")
    logits[3, 5] = float("inf")
    logits[4] = float("-inf")
    made = sampler(*params)
    assert made.sample(logits, np.arange(6), np.arange(6)).tolist() == [-1, -1, healthy[2], -1, -1, healthy[5]]


def test_repetition_penalty_is_that_of_transformers():
    tokens = np.array([3, 9, 9, 4, 11], dtype=np.int32)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens.tolist()]), logits)
    made = sampler()
    made.seat(0, SamplingParams(temperature=0.0, repetition_penalty=1.7), tokens, 3, 0)
    found = logits.clone()
    made.penalties[0].apply(found[0])
    assert torch.equal(found, expected)
    made.penalties[0].add(20)
    made.penalties[0].apply(logits[0])
    assert torch.equal((logits != expected).nonzero(), torch.tensor([[0, 20]]))


def test_presence_and_frequency_count_the_output_alone():
    made = sampler()
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    made.seat(0, params, np.array([1, 2, 3, 3], dtype=np.int32), 2, 0)
    logits = torch.zeros(10)
    made.penalties[0].apply(logits)
    assert logits.tolist() == [0, 0, 0, -1.0, 0, 0, 0, 0, 0, 0]


def test_sampled_tokens_join_the_output_until_the_row_is_seated_anew():
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.8]])
    made = sampler(SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert [made.sample(logits.clone(), np.array([0]), np.array([i])).item() for i in range(4)] == [1, 2, 3, 1]
    made.seat(0, SamplingParams(temperature=0.0), empty(), 0, 0)
    assert made.sample(logits, np.array([0]), np.array([0])).item() == 1
    assert not made.penalties


def test_tokens_of_ranked_rows_have_their_log_probability_in_the_penalised_logits():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)) * 3
    ranked = {"n": 1, "best_of": 2}
    made = sampler(
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=5, **ranked),
        SamplingParams(temperature=0.0, **ranked),
        SamplingParams(presence_penalty=2.0, **ranked),
    )
    repeated = int(logits[3].argmax())
    made.penalties[3].add(repeated)
    tokens = made.sample(logits.clone(), np.arange(4), np.arange(4))
    logits[3, repeated] -= 2.0
    expected = logits.double().log_softmax(-1).gather(1, torch.from_numpy(tokens).long().unsqueeze(1)).squeeze(1)
    assert made.logprobs.dtype == np.float32
    assert made.logprobs[0] == 0
    assert np.abs(made.logprobs[1:] - expected[1:].numpy()).max() < 1e-5
    made.sample(logits[:1].clone(), np.array([0]), np.array([9]))
    assert made.logprobs.size == 0
    made.seat(2, SamplingParams(), empty(), 0, 0)
    made.sample(logits[2:3].clone(), np.array([2]), np.array([9]))
    assert made.logprobs.size == 0


def test_philox_gives_the_published_words():
    zero, ones = np.zeros(1, dtype=np.uint64), np.full(1, 2**64 - 1, dtype=np.uint64)
    assert [f"{word:08x}" for word in philox(zero, zero)[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    found = uniforms(np.repeat(ones, 1000), np.arange(1000))
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(found.mean() - 0.5) < 0.05
