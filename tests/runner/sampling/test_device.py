import numpy as np
import pytest
import torch
from lazy_device import META, LazyCopyStream, LazyDevice
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

from chairlift.kernels.sampling import reference
from chairlift.runner.copy_stream import PAGEABLE
from chairlift.runner.interface import NewSequence
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.runner.sampling.host import Penalties
from chairlift.sampling import SamplingParams

WORDS = 2**32 - 1


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def sampler(*params: SamplingParams, vocabulary: int = 100, rows: int = 0) -> DeviceSampler:
    made = DeviceSampler(max(rows, len(params)), vocabulary, torch.device("cpu"))
    for row, one in enumerate(params):
        made.add_request(row, NewSequence(one, np.zeros(0, dtype=np.int32), 0, row))
    return made


def sample(made: DeviceSampler, logits: torch.Tensor, rows: list[int], positions: list[int] | None = None) -> list[int]:
    tier = made.prepare(np.array(rows, dtype=np.int32))
    return made.sample(logits.clone(), ints(rows), ints(positions or [0] * len(rows)), tier).tolist()


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORDS, WORDS), (WORDS,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(key, counter, expected):
    found = reference.philox(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
    assert " ".join(f"{word:08x}" for word in found) == expected


def test_noise_is_that_of_a_gumbel_distribution():
    words = reference.words(torch.arange(20), torch.arange(20) * 1000, 20_000)
    noise = reference.gumbel(words).double().flatten().sort().values
    # Kolmogorov and Smirnov's distance; 1.63 over the root of the count is exceeded once in a hundred.
    expected = torch.exp(-torch.exp(-noise))
    distance = (expected - torch.arange(1, len(noise) + 1) / len(noise)).abs().max()
    assert distance < 1.63 / len(noise) ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.slow
def test_draws_are_those_of_the_softmax(temperature):
    count, vocabulary = 40_000, 40
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    made = sampler(SamplingParams(temperature=temperature), vocabulary=vocabulary)
    drawn = sample(made, logits.expand(count, -1), [0] * count, list(range(count)))
    expected = (logits.double() / temperature).softmax(0).numpy() * count
    likely = expected >= 5
    counts = np.bincount(drawn, minlength=vocabulary)
    squares = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    squares += (counts - expected)[~likely].sum() ** 2 / max(expected[~likely].sum(), 1)
    freedom = likely.sum()
    # Above this lies one in a thousand (Wilson and Hilferty's approximation).
    assert squares < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_noise_is_fine_where_unlikely_tokens_need_it():
    words = torch.tensor([0, 1, 2, 127, 2**20, 2**31, 3 * 2**30])
    v = (words.double() + 0.5) / 2**32
    torch.testing.assert_close(reference.gumbel(words).double(), -(-(-v).log1p()).log(), rtol=1e-6, atol=1e-6)
    assert reference.gumbel(torch.tensor([2**32 - 1])).isfinite()


@pytest.mark.slow
def test_seeds_and_positions_are_independent():
    # Of 1000 equally likely tokens, two draws are equal one time in a thousand.
    made = DeviceSampler(3, 1000, torch.device("cpu"))
    for row, seed in enumerate((5, 6, 5 + 2**32)):
        made.add_request(row, NewSequence(SamplingParams(), np.zeros(0, dtype=np.int32), 0, seed))
    logits = torch.zeros(4000, 1000)
    draws = [np.array(sample(made, logits, [row] * 4000, list(range(at, at + 4000)))) for row, at in ((0, 0), (1, 0), (2, 0), (0, 4000))]
    draws.append(np.roll(draws[0], 1))
    for i, one in enumerate(draws):
        assert abs(one.mean() - 499.5) < 5 * 289 / 4000**0.5
        for other in draws[:i]:
            assert (one == other).sum() < 4 + 5 * 2


def test_what_does_not_concern_a_row_does_not_change_its_draw():
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    ways = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"presence_penalty": 1.0}, {"min_p": 0.2}, {"temperature": 3.0}]
    made = sampler(*(SamplingParams(**way) for way in ways))
    assert made.prepare(np.arange(6)) == (True, 4)
    assert made.prepare(np.array([0, 1, 5])) == (False, 0)
    together = sample(made, logits, [*range(6)], [7] * 6)
    made = sampler(*(SamplingParams(**way) for way in ways))
    assert [sample(made, logits[[row]], [row], [7])[0] for row in range(6)] == together
    assert made.last_token[:6].tolist() == together


def test_the_first_of_equals_is_drawn_where_only_one_is_left():
    made = sampler(SamplingParams(top_k=1), SamplingParams(top_k=2))
    logits = torch.zeros(60, 100)
    logits[:, [40, 41]] = 1.0
    assert set(sample(made, logits, [0] * 60, list(range(60)))) == {40}
    assert set(sample(made, logits, [1] * 60, list(range(60)))) == {40, 41}
    assert not made.prepare(np.zeros(1, int)).truncated


def test_no_rows_have_no_tokens():
    made = sampler(SamplingParams(top_k=5, presence_penalty=1.0))
    assert sample(made, torch.zeros(0, 100), []) == []


def test_penalties_are_those_of_the_host_and_count_what_was_drawn():
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    tokens = np.array([3, 9, 9, 4, 11, 4], dtype=np.int32)
    made, host = DeviceSampler(3, 30, torch.device("cpu")), Penalties(params, tokens, 3)
    made.add_request(1, NewSequence(params, tokens, 3, 0))
    for step in range(20):
        logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(step)) * 0.3
        expected = logits.clone()
        host.apply(expected[0].numpy())
        found = logits.clone()
        token = made.sample(found, ints([1]), ints([step]), made.prepare(np.array([1])))
        assert torch.equal(found, expected)
        assert token.item() == expected.argmax()
        host.add(int(token))


def test_the_repetition_penalty_is_that_of_transformers():
    tokens = np.array([3, 9, 9, 4, 11], dtype=np.int32)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    made = DeviceSampler(1, 30, torch.device("cpu"))
    made.add_request(0, NewSequence(SamplingParams(repetition_penalty=1.7), tokens, 3, 0))
    found = logits.clone()
    made.sample(found, ints([0]), ints([0]), made.prepare(np.zeros(1, int)))
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens.tolist()]), logits))


def test_rows_take_each_others_place():
    rows = 12
    made = sampler(rows=rows, vocabulary=20)
    said = [np.array([row], dtype=np.int32) for row in range(rows)]
    for row in range(rows):
        made.add_request(row, NewSequence(SamplingParams(temperature=0, frequency_penalty=2.0), said[row], 0, 0))
    assert made.prepare(np.arange(rows)).count_rows == 16
    logits = torch.zeros(rows, 20)
    logits[:, :rows] = torch.eye(rows)
    # Each takes the first of all others in place of its own, which it has said.
    assert sample(made, logits, [*range(rows)]) == [1] + [0] * (rows - 1)
    for row in range(rows):
        made.add_request(row, NewSequence(SamplingParams(temperature=0, frequency_penalty=2.0), said[rows - 1 - row], 1, 0))
    assert made.prepare(np.arange(rows)).count_rows == 16
    assert sample(made, logits, [*range(rows)]) == [*range(rows)]
    assert sample(made, logits, [*range(rows)]) == [1] + [0] * (rows - 1)
    made.add_request(0, NewSequence(SamplingParams(temperature=0), said[0], 1, 0))
    assert sample(made, logits[:1], [0]) == [0]
    assert made.prepare(np.zeros(1, int)).count_rows == 0


def test_lines_that_could_not_be_filled_are_free_again(monkeypatch):
    made, params = sampler(rows=4), SamplingParams(presence_penalty=1.0)

    def lacking(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(made, "send", lacking)
            with pytest.raises(torch.OutOfMemoryError):
                made.add_request(0, NewSequence(params, np.ones(1, dtype=np.int32), 1, 0))
    for row in range(4):
        made.add_request(row, NewSequence(params, np.ones(1, dtype=np.int32), 1, 0))
    assert made.prepare(np.arange(4)).count_rows == 4


def test_failed_rows_leave_token_0_behind_and_count_nothing():
    made = sampler(*[SamplingParams(presence_penalty=1.0)] * 2, vocabulary=5)
    made.last_token.fill_(9)
    logits = torch.full((2, 5), float("nan"))
    logits[1] = torch.tensor([0.0, 0.0, 99.0, 0.0, 0.0])
    assert sample(made, logits, [0, 1]) == [-1, 2]
    assert made.last_token[:2].tolist() == [0, 2]
    # The penalty is 1: token 0 was not counted in the first row, token 2 was in the second.
    assert sample(made, torch.tensor([[0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.2, 0]]), [0, 1]) == [0, 3]


class NothingWaits(TorchDispatchMode):
    """Refuses what has the host wait for a device: to read a number, or a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    with NothingWaits(), pytest.raises(AssertionError):
        torch.ones(1).item()
    made = DeviceSampler(4, 50, torch.device("cpu"))
    logits = torch.randn(4, 50)
    with NothingWaits():
        for row, way in enumerate(({}, {"top_k": 3}, {"frequency_penalty": 1.0}, {"temperature": 0.0})):
            made.add_request(row, NewSequence(SamplingParams(**way), np.array([1, 2, 2], dtype=np.int32), 1, row))
        tokens = made.sample(logits, ints([0, 1, 2, 3]), ints([3] * 4), made.prepare(np.arange(4)))
        made.score_rows(logits, torch.tensor([1, 3]), tokens, 4)


@pytest.mark.parametrize("rows", [3, 90])
def test_masks_of_any_size_are_copied_without_waiting_for_the_device(rows):
    vocabulary = 10_000
    octets = np.random.default_rng(0).integers(0, 256, (rows, vocabulary // 8), dtype=np.uint8)
    assert (octets.nbytes > PAGEABLE) == (rows == 90)
    expected = np.unpackbits(octets, axis=1, bitorder="little").astype(bool)
    # The device refuses large copies from pageable memory, and does its work only at the end.
    with LazyDevice() as lazy:
        made = DeviceSampler(rows, vocabulary, META, LazyCopyStream(lazy))
        logits = lazy.make((rows, vocabulary), torch.float32, lambda: torch.zeros(rows, vocabulary))
        made.mask(logits, np.arange(rows), octets)
        octets.fill(0)
        lazy.wait()
    assert np.array_equal(logits.box.value.numpy() == 0, expected)
