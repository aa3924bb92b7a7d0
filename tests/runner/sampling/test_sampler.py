import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from chairlift import _core
from chairlift.errors import InvalidRequest, OutOfMemory
from chairlift.outputs import TokenLogprobs
from chairlift.runner.interface import NewSequence
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.runner.sampling.host import HostSampler
from chairlift.runner.sampling.matcher import MatchedRows, accept, masks
from chairlift.runner.sampling.sampler import FAILED, Sampler
from chairlift.sampling import SamplingParams

DRAWS = 4000
HEAD = 100
"""The likeliest tokens, beyond which few are drawn."""
VOCABULARY = 600
"""Where penalties meet the device's way."""


def empty() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


class AtOnce(Sampler):
    """Takes tokens as soon as they are asked for."""

    there = False
    inputs: list[int] | None = None
    """The tokens that the rows follow, if they matter."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        on_host = HostSampler(max_seqs, _core.ThreadPool(2))
        super().__init__(max_seqs, DeviceSampler(max_seqs, VOCABULARY, device) if self.there else on_host)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        ours, places = (torch.from_numpy(values.astype(np.int32)) for values in (rows, positions))
        at = np.arange(len(rows))
        step = SimpleNamespace(sample_at=torch.from_numpy(at), sample_slots=ours, positions=places - 1)
        where = logits if self.there else logits.numpy()
        inputs = np.zeros(len(rows), dtype=np.int32) if self.inputs is None else np.array(self.inputs, dtype=np.int32)
        buffers = SimpleNamespace(on_device=step, input_ids=inputs, sample_at=at, sample_slots=rows, positions=places.numpy() - 1)
        tokens, self.logprobs, self.details, self.refusals = self.take(self.draw(where, buffers))
        return tokens


def sampler(*params: SamplingParams, seeds: tuple[int, ...] = ()) -> Sampler:
    made = AtOnce(max(len(params), 1), torch.device("cpu"))
    for row, one in enumerate(params):
        made.add_request(row, NewSequence(one, empty(), 0, seeds[row] if seeds else row))
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


@pytest.fixture(params=[False, True], ids=["host", "device"])
def chooser(request, monkeypatch):
    """Each way in which tokens are chosen: that of the host, and that of devices."""
    monkeypatch.setattr(AtOnce, "there", request.param)


@pytest.mark.usefixtures("chooser")
@pytest.mark.parametrize("vocabulary", [50, 700])
@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.slow
def test_draws_follow_the_distribution(settings, vocabulary):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference(logits, **settings).numpy()
    counts = np.bincount(draws(logits, **settings), minlength=vocabulary)
    assert not counts[expected == 0].any()
    # The seed is fixed, so this either holds or not: five standard deviations for each token, and for the tail together.
    assert (np.abs(counts - DRAWS * expected) <= 5 * np.sqrt(DRAWS * expected * (1 - expected)) + 2).all()
    tail = np.argsort(-expected)[HEAD:]
    mass = expected[tail].sum()
    assert abs(counts[tail].sum() - DRAWS * mass) <= 5 * np.sqrt(DRAWS * mass) + 1e-9


@pytest.mark.usefixtures("chooser")
def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 9.0]])
    made = sampler(*[SamplingParams(temperature=0.0)] * 3)
    found = made.sample(logits, np.arange(3), np.zeros(3))
    assert found.dtype == np.int32
    assert found.tolist() == [1, 0, 3]


@pytest.mark.usefixtures("chooser")
def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert set(draws(logits, 50, temperature=1e-300)) == {int(logits.argmax())}


@pytest.mark.usefixtures("chooser")
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


@pytest.mark.usefixtures("chooser")
def test_seeds_and_positions_change_the_draw():
    logits = torch.zeros(64, 1000)
    made = sampler(*[SamplingParams()] * 64)
    first, second = made.sample(logits.clone(), np.arange(64), np.full(64, 5)), made.sample(logits.clone(), np.arange(64), np.full(64, 6))
    assert len(set(first)) > 50
    assert (first != second).sum() > 55


@pytest.mark.usefixtures("chooser")
def test_rows_that_are_not_finite_fail_and_harm_nobody():
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
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
    made.add_request(0, NewSequence(SamplingParams(temperature=0.0, repetition_penalty=1.7), tokens, 3, 0))
    found = logits.clone()
    made.tokens.penalties[0].apply(found[0].numpy())
    assert torch.equal(found, expected)
    made.tokens.penalties[0].add(20)
    made.tokens.penalties[0].apply(logits[0].numpy())
    assert torch.equal((logits != expected).nonzero(), torch.tensor([[0, 20]]))


def test_presence_and_frequency_count_the_output_alone():
    made = sampler()
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    made.add_request(0, NewSequence(params, np.array([1, 2, 3, 3], dtype=np.int32), 2, 0))
    logits = torch.zeros(10)
    made.tokens.penalties[0].apply(logits.numpy())
    assert logits.tolist() == [0, 0, 0, -1.0, 0, 0, 0, 0, 0, 0]


def test_sampled_tokens_join_the_output_until_the_slot_is_assigned_anew():
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.8]])
    made = sampler(SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert [made.sample(logits.clone(), np.array([0]), np.array([i])).item() for i in range(4)] == [1, 2, 3, 1]
    made.add_request(0, NewSequence(SamplingParams(temperature=0.0), empty(), 0, 0))
    assert made.sample(logits, np.array([0]), np.array([0])).item() == 1
    assert not made.tokens.penalties


def test_ranked_rows_have_the_log_probability_of_their_tokens_before_anything_was_changed():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)) * 3
    ranked = {"n": 1, "best_of": 2}
    made = sampler(
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=5, **ranked),
        SamplingParams(temperature=0.0, **ranked),
        SamplingParams(presence_penalty=2.0, logit_bias={5: 50.0}, **ranked),
    )
    made.tokens.penalties[3].add(int(logits[3].argmax()))
    tokens = made.sample(logits.clone(), np.arange(4), np.arange(4))
    expected = logits.double().log_softmax(-1).gather(1, torch.from_numpy(tokens).long().unsqueeze(1)).squeeze(1)
    assert tokens[3] == 5
    assert made.logprobs.dtype == np.float32
    assert made.logprobs[0] == 0
    assert np.abs(made.logprobs[1:] - expected[1:].numpy()).max() < 1e-5
    assert not made.details
    made.sample(logits[:1].clone(), np.array([0]), np.array([9]))
    assert made.logprobs.size == 0
    made.add_request(2, NewSequence(SamplingParams(), empty(), 0, 0))
    made.sample(logits[2:3].clone(), np.array([2]), np.array([9]))
    assert made.logprobs.size == 0


def test_rows_that_ask_get_as_many_of_the_likeliest_as_they_asked_for():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    raw = logits.log_softmax(-1)
    made = sampler(SamplingParams(temperature=5.0, logprobs=4, allowed_token_ids=(40, 41)), SamplingParams(), SamplingParams(logprobs=0))
    tokens = made.sample(logits.clone(), np.arange(3), np.arange(3)).tolist()
    assert sorted(made.details) == [0, 2]
    (found,) = TokenLogprobs.read(made.details[0], 4)
    values, likeliest = raw[0].topk(4)
    assert found.token == tokens[0] in (40, 41)
    assert found.rank == 1 + int((raw[0] > raw[0, tokens[0]]).sum())
    assert [token for token, _ in found.top] == likeliest.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert found.logprob == pytest.approx(raw[0, tokens[0]].item(), abs=1e-5)
    (other,) = TokenLogprobs.read(made.details[2], 0)
    assert (other.token, other.top) == (tokens[2], ())


class Alternating:
    """A matcher that wants tokens of the right remainder: even, odd, even, and then nothing."""

    def __init__(self, length: int = 3) -> None:
        self.taken: list[int] = []
        self.length = length

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        if len(self.taken) < self.length:
            bitmask[index] = -0x5555_5556 if len(self.taken) % 2 else 0x5555_5555  # the first is 0xAAAAAAAA, as an int32

    def accept(self, token: int) -> None:
        if token % 2 != len(self.taken) % 2:
            raise ValueError("out of turn")
        self.taken.append(token)

    def copy(self) -> "Alternating":
        other = type(self)(self.length)
        other.taken = self.taken.copy()
        return other

    def forced(self) -> list[int]:
        return [6] if not self.taken else []


class Maskless(Alternating):
    def mask(self, bitmask: np.ndarray, index: int) -> None:
        super().mask(bitmask, index)
        raise RuntimeError("no mask")


class Deaf(Alternating):
    def accept(self, token: int) -> None:
        raise RuntimeError("no token")


@pytest.mark.usefixtures("chooser")
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("vocabulary", [50, 64, 4999])
def test_matchers_bound_what_is_drawn_and_hear_of_it(temperature, vocabulary):
    made = AtOnce(4, torch.device("cpu"))
    one, seated_again = Alternating(), Alternating()
    for row, matcher, tokens in ((0, None, []), (1, one, []), (2, seated_again, [9, 4])):
        prompt_len, params = min(1, len(tokens)), SamplingParams(temperature=temperature)
        made.add_request(row, NewSequence(params, np.array(tokens, dtype=np.int32), prompt_len, row, matcher=matcher))
    assert seated_again.taken == [4]
    generator, drawn = torch.Generator().manual_seed(0), []
    for step in range(4):
        logits = torch.randn(3, vocabulary, generator=generator)
        drawn.append(made.sample(logits, np.array([2, 0, 1]), np.full(3, step)).tolist())
    assert [pair[2] % 2 for pair in drawn[:3]] == [0, 1, 0]
    assert [pair[0] % 2 for pair in drawn[:2]] == [1, 0]
    assert drawn[2][0] == drawn[3][0] == drawn[3][2] == FAILED
    assert all(pair[1] != FAILED for pair in drawn)
    assert one.taken == [pair[2] for pair in drawn[:3]]
    made.add_request(1, NewSequence(SamplingParams(temperature=0.0), empty(), 0, 0))
    assert made.sample(torch.ones(1, vocabulary), np.array([1]), np.array([0])).tolist() == [0]


def test_a_matcher_sees_drafted_tokens_as_far_as_they_are_drawn():
    made, matchers = AtOnce(4, torch.device("cpu")), [Alternating(9) for _ in range(4)]
    for slot, matcher in enumerate(matchers):
        made.add_request(slot, NewSequence(SamplingParams(temperature=0.0), empty(), 0, 0, matcher=matcher))
    # Slot 0 has the draft 6, 1, 4, slot 1 none, slot 2 the draft 3, which its grammar does not allow, and slot 3 the draft 8, 8.
    slots, made.inputs = np.array([0, 0, 0, 0, 1, 2, 2, 3, 3, 3]), [0, 6, 1, 4, 0, 0, 3, 0, 8, 8]
    logits = torch.zeros(10, 70)
    for row, token in enumerate([6, 1, 2, 5, 2, 3, 5, 8, 9, 8]):
        logits[row, token] = 9.0
    found = made.sample(logits, slots, np.arange(10)).tolist()
    assert found[:3] == [6, 1, 2], "token 2 is not the drafted 4"
    assert matchers[0].taken == [6, 1, 2]
    assert matchers[1].taken == [2]
    assert found[5] % 2 == 0, "its grammar does not allow the drafted 3, though its logit is the highest"
    assert matchers[2].taken == [found[5]]
    assert (matchers[3].taken, found[7:9]) == ([8, 9], [8, 9])
    assert made.forced_tokens() == []
    made.add_request(2, NewSequence(SamplingParams(temperature=0.0), empty(), 0, 0, matcher=Alternating()))
    assert made.forced_tokens() == [(2, [6])]


class Tiring(Alternating):
    """Refuses to go on after one token."""

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        if self.taken:
            raise InvalidRequest("no time is left")
        super().mask(bitmask, index)


@pytest.mark.parametrize(("drawn", "reasons"), [(6, {1: "no time is left"}), (8, {})])
def test_a_grammar_that_refuses_to_go_on_after_a_drafted_token_says_why(drawn, reasons):
    matched = [MatchedRows(0, Tiring(), [6, 1])]
    bits = np.unpackbits(masks(matched, 50).octets, axis=1, bitorder="little")
    assert bits.any(axis=1).tolist() == [True, False, False]
    chosen = np.array([drawn, FAILED, FAILED])
    assert {row: str(error) for row, error in accept(matched, chosen, FAILED).items()} == reasons
    assert matched[0].matcher.taken == [drawn]


class Watched(Alternating):
    """Tells when its mask begins and ends, and waits for `go` in between."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), False

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        self.begun.set()
        assert self.go.wait(60)
        time.sleep(0.01)  # whoever does not wait for it goes on meanwhile
        super().mask(bitmask, index)
        self.ended = True


@pytest.mark.parametrize("fails", [False, True])
def test_masks_are_computed_beside_the_forward_pass_and_have_ended_after_it(fails):
    made, matcher = AtOnce(2, torch.device("cpu")), Watched()
    made.add_request(1, NewSequence(SamplingParams(temperature=0.0), empty(), 0, 0, matcher=matcher))
    buffers = SimpleNamespace(input_ids=np.zeros(2, dtype=np.int32), sample_at=np.arange(2))

    def forward() -> str:
        assert matcher.begun.wait(60)
        matcher.go.set()
        if fails:
            raise OutOfMemory("no room")
        return "passed"

    with pytest.raises(OutOfMemory) if fails else contextlib.nullcontext():
        passed, computed = made.beside_masks(forward, np.array([0, 1]), buffers, 50)
        assert (passed, computed.octets.tolist()) == ("passed", masks(computed.matched, 50).octets.tolist())
        assert [list(one.rows) for one in computed.matched] == [[1]]
    assert matcher.ended
    made.close()


def test_a_matcher_that_raises_ends_its_own_row_only():
    made = AtOnce(4, torch.device("cpu"))
    for row, matcher in enumerate((Maskless(), None, Deaf(), Alternating())):
        made.add_request(row, NewSequence(SamplingParams(), empty(), 0, row, matcher=matcher))
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    alone = sampler(SamplingParams(), seeds=(1,)).sample(logits[1:2].clone(), np.array([0]), np.array([7]))
    found = made.sample(logits, np.arange(4), np.full(4, 7))
    assert (found[0], found[1], found[2]) == (FAILED, alone[0], FAILED)
    assert found[3] % 2 == 0
    with pytest.raises(RuntimeError, match="no token"):
        made.add_request(0, NewSequence(SamplingParams(), np.array([1, 2], dtype=np.int32), 1, 0, matcher=Deaf()))


def greedy(made: Sampler, logits: torch.Tensor, row: int = 0) -> int:
    return made.sample(logits.unsqueeze(0).clone(), np.array([row]), np.array([0])).item()


def biased(tokens: list[int] = (), prompt_len: int = 0, ends: tuple[int, ...] = (), **settings) -> Sampler:
    made = sampler(SamplingParams())
    params = SamplingParams(temperature=0.0, **settings)
    made.add_request(0, NewSequence(params, np.array(tokens, dtype=np.int32), prompt_len, 0, ends=ends))
    return made


FALLING = torch.arange(9.0, -1.0, -1.0)


def test_a_bias_is_added_and_only_what_is_allowed_is_drawn():
    assert greedy(biased(logit_bias={3: 7.5, 0: -3.0}), FALLING) == 3
    assert greedy(biased(logit_bias={3: 2.5}), FALLING) == 0
    assert greedy(biased(allowed_token_ids=(7, 4, 4)), FALLING) == 4
    assert greedy(biased(allowed_token_ids=(7, 4), logit_bias={7: 4.0, 0: 99.0}), FALLING) == 7
    assert greedy(biased(allowed_token_ids=(4,), bad_words=((4,),)), FALLING) == FAILED


def test_bad_words_are_never_completed():
    words = ((0,), (1, 2), (5, 6, 1, 1))
    assert greedy(biased(bad_words=words), FALLING) == 1
    made = biased([2, 1], 1, bad_words=words)
    assert [greedy(made, FALLING + (torch.arange(10) == 2) * 20) for _ in range(2)] == [1, 1]
    # What the prompt ends with does not count, what was said before a new slot does.
    likely = FALLING + (torch.arange(10) == 2) * 20
    assert greedy(biased([1], 1, bad_words=words), likely) == 2
    assert greedy(biased([9, 1], 1, bad_words=words), likely) == 1
    assert greedy(biased([9, 5, 6, 1], 1, bad_words=words), FALLING) == 3
    assert greedy(biased([9, 6, 6, 1], 1, bad_words=words), FALLING) == 1


class Only:
    """A matcher that allows one token."""

    def __init__(self, token: int | None) -> None:
        self.token = token

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        if self.token is not None:
            bitmask[index, self.token // 32] = 1 << self.token % 32

    def accept(self, token: int) -> None:
        pass


@pytest.mark.parametrize(
    ("fields", "form", "names"),
    [
        ({"allowed_token_ids": (3, 40), "bad_words": ((3,), (40,))}, None, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": (2,), "min_tokens": 1, "bad_words": ((9,),)}, None, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": (3,), "min_tokens": 1}, Only(40), "allowed_token_ids and the structured output"),
        ({"bad_words": ((40,),), "min_tokens": 1}, Only(40), "bad_words and the structured output"),
        ({"allowed_token_ids": (3,)}, Only(3), None),
        ({"allowed_token_ids": (3,)}, Only(None), None),
        ({"min_tokens": 1}, None, None),
    ],
)
def test_fields_that_leave_no_token_are_named_and_logits_that_are_not_finite_are_no_fault_of_theirs(fields, form, names):
    made = sampler(SamplingParams())
    made.add_request(0, NewSequence(SamplingParams(**fields), empty(), 0, 0, ends=(2,), matcher=form))
    logits = torch.zeros(1, 50) if names else torch.full((1, 50), torch.nan)
    assert made.sample(logits, np.array([0]), np.array([5])).tolist() == [FAILED]
    refused = [InvalidRequest.unpacked(reason, None) for reason in made.refusals.values()]
    assert [str(one).partition(" together ")[0] for one in refused] == ([names] if names else [])


def test_the_end_waits_for_min_tokens():
    made = biased([7, 7, 7], 2, ends=(0, 1), min_tokens=3)
    assert [greedy(made, FALLING) for _ in range(3)] == [2, 2, 0]
    made = biased([7, 7, 7], 2, ends=(0, 1), min_tokens=1)
    assert greedy(made, FALLING) == 0


FEATURES = {
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": (3, 4)},
    "nothing allowed": {"allowed_token_ids": (3,), "bad_words": ((3,),)},
    "bad words": {"bad_words": ((1,), (2, 3))},
    "min tokens": {"min_tokens": 4},
    "logprobs": {"logprobs": 20},
    "grammar": {},
    "penalties": {"presence_penalty": 1.0},
}


@pytest.mark.usefixtures("chooser")
@pytest.mark.parametrize("name", FEATURES)
def test_a_neighbour_changes_nothing(name):
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
    plain = [SamplingParams(temperature=temperature) for temperature in (0.0, 1.0, 0.0, 1.0)]
    rows, positions = np.arange(4), np.arange(4)
    expected = sampler(*plain).sample(logits.clone(), rows, positions)
    for neighbour in (2, 3):
        made, own = sampler(*plain), logits.clone()
        params = SamplingParams(temperature=float(neighbour == 3), **FEATURES[name])
        matcher = Alternating() if name == "grammar" else None
        made.add_request(neighbour, NewSequence(params, empty(), 0, neighbour, ends=(0, 5), matcher=matcher))
        found = made.sample(own, rows, positions)
        others = rows[rows != neighbour]
        assert (found[others] == expected[others]).all()
        assert torch.equal(own[torch.from_numpy(others)], logits[torch.from_numpy(others)])
        assert (found[neighbour] == FAILED) == (name == "nothing allowed")
