"""The sampling kernels in Triton's interpreter, against `reference`: run by test_sampling.py in a process of its own."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compile_gate import FULL

from chairlift import _core
from chairlift.kernels.sampling import gumbel, logprobs, penalties, reference, sample, threshold
from chairlift.kernels.sampling.settings import Settings

LOWEST = torch.iinfo(torch.int32).min


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a small vocabulary has several."""
    for module in (gumbel, logprobs, penalties, threshold):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(threshold, "BLOCKS", 2)


def settings(count: int, **columns: object) -> Settings:
    """Settings of so many rows: greedy, unless told otherwise."""
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    kinds = {"top_k": torch.int32, "slot": torch.int32, "seed": torch.int64}
    values = {name: columns.get(name, default) for name, default in (off | {"slot": -1}).items()}
    return Settings(
        **{name: torch.as_tensor(value, dtype=kinds.get(name, torch.float32)).expand(count).clone() for name, value in values.items()}
    )


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


@triton.jit
def noise_kernel(words_ptr, noise_ptr, seed_ptr, position, first, block: tl.constexpr):
    words = gumbel.words(tl.load(seed_ptr), position, first, block)
    tl.store(words_ptr + tl.arange(0, block), words.to(tl.int64))
    tl.store(noise_ptr + tl.arange(0, block), gumbel.gumbel(words))


@pytest.mark.parametrize(("seed", "position", "first"), [(0, 0, 0), (-1, 3, 64), (1 << 62, 2**31 - 1, 128_000), (-(1 << 63) + 5, 77, 4)])
def test_words_are_those_of_the_reference_bit_for_bit(seed, position, first):
    words, noise = torch.empty(64, dtype=torch.int64), torch.empty(64)
    noise_kernel[(1,)](words, noise, torch.tensor([seed]), position, first, block=64)
    expected = reference.words(torch.tensor([seed]), torch.tensor([position]), first + 64)[0, first:]
    assert torch.equal(words, expected)
    torch.testing.assert_close(noise, reference.gumbel(expected), rtol=1e-6, atol=1e-6)


@triton.jit
def gumbel_kernel(noise_ptr, words_ptr, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(noise_ptr + at, gumbel.gumbel(tl.load(words_ptr + at).to(tl.uint32)))


def test_noise_is_right_to_its_ends():
    words = torch.tensor([0, 1, 2, 127, 2**20, 2**31, 2**32 - 2, 2**32 - 1])
    noise = torch.empty(8)
    gumbel_kernel[(1,)](noise, words, block=8)
    torch.testing.assert_close(noise, reference.gumbel(words), rtol=1e-6, atol=1e-6)


def cases(count: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, Settings]:
    """Rows of many kinds (smooth, with ties, masked, flat, of both zeros, wide), and as many ways to cut them."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(count, vocabulary)).astype(np.float32)) * 3
    for row in range(count):
        match row % 6:
            case 1:
                logits[row] = logits[row].round()
            case 2:
                logits[row, torch.from_numpy(random.random(vocabulary) < 0.7)] = float("-inf")
                logits[row, random.integers(vocabulary)] = 1.0
            case 3:
                logits[row] = -2.5
            case 4:
                logits[row] = torch.from_numpy(random.choice([0.0, -0.0, 1.0], vocabulary).astype(np.float32))
            case 5:
                logits[row] *= 1e4
    return logits, settings(
        count,
        temperature=random.choice([0.0, 1e-5, 0.7, 1.0, 3.0], count, p=[0.1, 0.1, 0.2, 0.4, 0.2]),
        top_k=random.choice([0, 1, 2, vocabulary // 3 + 1, vocabulary - 1, vocabulary, vocabulary + 9], count).clip(0),
        top_p=random.choice([1.0, 0.99999, 0.9, 0.5, 1e-6, *random.random(3)], count),
        min_p=random.choice([0.0, 0.0, 0.05, 1.0, *random.random(2)], count),
        seed=random.integers(-(2**63), 2**63 - 1, count),
    )


@pytest.mark.parametrize(("count", "vocabulary"), [(24, 61), (6, 301), (12, 1), (12, 3)] + [(60, 61), (36, 128), (18, 301)] * FULL)
def test_what_is_left_is_what_sorting_leaves(count, vocabulary):
    logits, ways = cases(count, vocabulary, vocabulary)
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()
    found = threshold.thresholds(logits[rows], rows, ways)
    expected = reference.thresholds(logits[rows], *(column[rows] for column in ways[:4]))
    order = reference.ordered(logits[rows])
    assert torch.equal(order >= found.unsqueeze(1), order >= expected.unsqueeze(1))
    assert (order >= found.unsqueeze(1)).any(1).all()


def test_a_real_block_of_a_real_vocabulary(monkeypatch):
    monkeypatch.undo()
    logits, ways = cases(2, 40_003, 5)
    ways = ways._replace(temperature=torch.ones(2), top_k=ints([900, 0]), top_p=torch.tensor([0.9, 0.7]), min_p=torch.zeros(2))
    found = threshold.thresholds(logits, ints([0, 1]), ways)
    assert found.tolist() == reference.thresholds(logits, *ways[:4]).tolist()
    args = ints([0, 1]), ints([3, 4]), ways
    assert gumbel.draw(logits, *args, found, ints([0, 0]), None).tolist() == reference.draw(logits, *args, found).tolist()


def test_tokens_are_those_of_the_reference_alone_and_together():
    count, vocabulary = 24, 205
    logits, ways = cases(count, vocabulary, 1)
    slots = torch.full((count,), -1, dtype=torch.int32)
    slots[[4, 6, 13]] = ints([2, 0, 1])
    ways = ways._replace(slot=slots, repetition=torch.full((count,), 1.3), presence=torch.full((count,), 0.5), frequency=torch.ones(count))
    random = torch.Generator().manual_seed(0)
    said = torch.randint(0, 7, (3, vocabulary), generator=random).int() * (torch.rand(3, vocabulary, generator=random) < 0.2)
    rows, positions = torch.randperm(count, generator=random).int(), torch.randint(0, 9999, (count,), generator=random).int()

    def run(sampler, at: slice, **tier: object):
        mine, last, changed = said.clone(), torch.full((count,), -9, dtype=torch.int32), logits[rows][at]
        tokens = sampler(
            changed, rows[at], positions[at], ways, last, mine if tier.get("slots", True) else None, truncated=tier.get("truncated", True)
        )
        return tokens, last, mine, changed

    found, expected = run(sample.sample, slice(None)), run(reference.sample, slice(None))
    assert (expected[2] - said).sum() == 6
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for place, row in list(enumerate(rows.tolist()))[:: 1 if FULL else 5]:
        at = slice(place, place + 1)
        cut = bool((ways.top_k[row] > 0) | (ways.top_p[row] < 1) | (ways.min_p[row] > 0))
        tokens, *_ = run(sample.sample, at, slots=bool(slots[row] >= 0), truncated=cut)
        assert tokens.tolist() == found[0][at].tolist()


def test_logits_may_lie_apart():
    logits, ways = cases(4, 64, 3)
    ways = ways._replace(slot=ints([0, -1, -1, 1]), presence=torch.ones(4))
    wide = torch.full((4, 96), float("nan"))
    wide[:, :64] = logits
    said = torch.ones(2, 64, dtype=torch.int32)
    args = torch.arange(4).int(), ints([5, 5, 5, 5]), ways
    found = sample.sample(wide[:, :64], *args, ints([0] * 4), said.clone(), truncated=True)
    assert found.tolist() == reference.sample(logits, *args, ints([0] * 4), said, truncated=True).tolist()


def test_no_rows_have_no_tokens():
    nobody = ints([])
    found = sample.sample(torch.zeros(0, 70), nobody, nobody, settings(1), ints([0]), torch.zeros(1, 70, dtype=torch.int32), truncated=True)
    assert found.tolist() == []


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.zeros(3, 200)
    logits[0, [70, 130]] = 5.0
    logits[1, 199] = 1e-6
    logits[2, ::2] = -0.0
    last = ints([7, 7, 7])
    found = gumbel.draw(logits, ints([0, 1, 2]), ints([0, 0, 0]), settings(3), ints([LOWEST] * 3), last, None)
    assert found.tolist() == last.tolist() == [70, 199, 0]


@pytest.mark.parametrize("truncated", [False, True])
def test_rows_that_are_not_finite_fail_and_harm_nobody(truncated):
    logits = torch.randn(12, 200, generator=torch.Generator().manual_seed(0))
    ways = settings(12, temperature=[0.0, 1.0] * 6, top_k=5, top_p=0.9, min_p=0.1, slot=[*range(12)])
    args = torch.arange(12).int(), torch.arange(12).int(), ways
    healthy = reference.sample(logits.clone(), *args, ints([0] * 12), None, truncated=truncated)
    for i, value in enumerate((float("nan"), -float("nan"), float("inf"), float("nan"))):
        logits[[2 * i, 2 * i + 1], 199 - i] = value
    logits[8:10] = float("-inf")
    last, said = ints([7] * 12), torch.zeros(12, 200, dtype=torch.int32)
    found = sample.sample(logits, *args, last, said, truncated=truncated)
    assert found.tolist() == [-1] * 10 + healthy[10:].tolist()
    assert last.tolist() == [0] * 10 + healthy[10:].tolist()
    assert said.sum(1).tolist() == [0] * 10 + [2, 2]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("vocabulary", [5, 301])
def test_lines_are_those_of_the_cpu(count, vocabulary):
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
    logits[3:6] = logits[3:6].round()
    logits[5, 1:] = float("-inf")
    logits[6] += 1000
    places, tokens = torch.tensor([1, 5, 3, 4, 6]), torch.arange(8).int() % vocabulary
    tokens[3] = -1
    found = logprobs.score(logits, places, tokens, count)
    mine = tokens[places].clamp(min=0).numpy()
    lines = np.frombuffer(_core.ThreadPool(1).score(logits[places].numpy(), mine.astype(np.int64), count), dtype=np.int32)
    for result in (found, reference.score(logits, places, tokens, count)):
        one, other = result.numpy(), lines.reshape(5, -1)
        numbers = [1, *range(3 + count, 3 + 2 * count)]
        np.testing.assert_allclose(one[:, numbers].view(np.float32), other[:, numbers].view(np.float32), rtol=1e-5, atol=1e-5)
        assert np.delete(one, numbers, 1).tolist() == np.delete(other, numbers, 1).tolist()
    assert torch.equal(logprobs.score(logits, places[2:3], tokens, count), found[2:3])
