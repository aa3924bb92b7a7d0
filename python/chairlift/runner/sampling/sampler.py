"""Samples the next tokens of a step: logit changes and log-probabilities here, the draw on the host or on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from chairlift.runner.buffers import PendingResult, StepBuffers
from chairlift.runner.executor import Logits
from chairlift.runner.sampling import bias, logprobs
from chairlift.runner.sampling.bias import Bias
from chairlift.runner.sampling.matcher import Masks, MatchedRows, Matcher, accept, masks, matched_rows

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph
    from chairlift.runner.interface import NewSequence

FAILED = -1
"""The result for a row whose logits are not finite or that has no allowed token."""
LOWEST_TEMPERATURE = 1e-5
"""Lower temperatures are raised to this: all weight is on the most likely token, and fp32 divisions would overflow."""
NONE_REQUESTED = -1

T = TypeVar("T")


class OutputTracker(Protocol):
    """State that depends on a sequence's output."""

    def add(self, token: int) -> None:
        """Adds the next token of the output."""


class Scored(NamedTuple):
    """Samples of a step whose log-probabilities are needed."""

    at: np.ndarray
    """Indices of the samples."""
    logits: Logits
    """Their logits, as the model computed them."""
    num_top: int
    """Top tokens per sample."""


class Drawn(NamedTuple):
    """Results of `TokenSampler.draw`."""

    tokens: PendingResult
    lines: PendingResult | None
    """Lines of `logprobs.score` for the scored samples, if any."""
    trackers: Sequence[tuple[int, OutputTracker]]
    """State that must learn the sampled tokens, by sample index."""


class TokenSampler(Protocol):
    """Draws tokens from logits where the logits are: `HostSampler` or `DeviceSampler`.

    The other sequences of a step never change a draw.
    """

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a slot to a sequence."""

    def remove_request(self, slot: int) -> None:
        """Frees a slot."""

    def send(self, array: np.ndarray) -> Any:
        """Brings an array to where the logits are, to index or to change them. The array may change when this returns."""

    def mask(self, logits: Logits, rows: np.ndarray, octets: np.ndarray) -> None:
        """Masks the tokens that `octets` of `matcher.Masks` do not allow in the rows [M] of logits [N, vocabulary]."""

    def keeps_logits(self, slots: np.ndarray) -> bool:
        """Whether `draw` leaves the logits of these slots unchanged."""

    def draw(self, logits: Logits, buffers: StepBuffers, graph: Graph | None, scored: Scored | None) -> Drawn:
        """Starts drawing a token per row of logits [N, vocabulary], which it may overwrite, for the step in `buffers`."""

    def score(self, logits: Logits, tokens: np.ndarray, count: int) -> PendingResult:
        """Starts computing lines of `logprobs.score` for tokens [M], given logits [M, vocabulary]."""


@dataclass(slots=True)
class PendingSample:
    """The sample of one step, from `Sampler.draw` to `Sampler.take`.

    It holds its sequences' matchers and trackers, because the slots may have new owners when the tokens arrive.
    """

    drawn: Drawn
    scored: np.ndarray
    """Indices of the samples with log-probabilities."""
    counts: np.ndarray
    """For each of them, the number of top tokens that its request wants, or NONE_REQUESTED."""
    masks: Masks
    biased: Sequence[tuple[int, Bias]]


class Sampler:
    """Sampling state of every batch slot.

    Logit biases and grammars change the logits here; `tokens` then draws.
    """

    def __init__(self, max_seqs: int, tokens: TokenSampler) -> None:
        self.tokens = tokens
        self.biases: dict[int, Bias] = {}
        self.matchers: dict[int, Matcher] = {}
        self.scored = np.full(max_seqs, NONE_REQUESTED)
        self.detailed = np.full(max_seqs, NONE_REQUESTED)
        self._mask_thread = ThreadPoolExecutor(1, "masks")

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns `slot` to a sequence. Its matcher accepts the output so far; the matcher's exceptions propagate."""
        params, output = sequence.params, sequence.tokens[sequence.prompt_len :].tolist()
        self.remove_request(slot)
        self.detailed[slot] = NONE_REQUESTED if params.logprobs is None else params.logprobs
        self.scored[slot] = max(self.detailed[slot], 0 if params.ranked else NONE_REQUESTED)
        self.tokens.add_request(slot, sequence)
        if Bias.needed(params):
            self.biases[slot] = Bias(params, output, sequence.ends)
        if (matcher := sequence.matcher) is not None:
            for token in output:
                matcher.accept(token)
            self.matchers[slot] = matcher

    def remove_request(self, slot: int) -> None:
        """Frees `slot`. A step that was planned before may still sample for it; the result is not used."""
        self.detailed[slot] = self.scored[slot] = NONE_REQUESTED
        self.biases.pop(slot, None)
        self.matchers.pop(slot, None)
        self.tokens.remove_request(slot)

    def beside_masks(self, forward: Callable[[], T], slots: np.ndarray, buffers: StepBuffers, vocabulary: int) -> tuple[T, Masks]:
        """Calls `forward`, and computes the masks of these slots [N] on another thread at the same time.

        `buffers` are those of the step, and the previous sample must have been taken. No mask is computed any more when this returns or
        raises.
        """
        if not (matched := self._matched(slots, buffers)):
            return forward(), Masks()
        pending = self._mask_thread.submit(masks, matched, vocabulary)
        try:
            result = forward()
        finally:
            wait([pending])
        return result, pending.result()

    def draw(self, logits: Logits, buffers: StepBuffers, graph: Graph | None = None, computed: Masks | None = None) -> PendingSample:
        """Starts sampling a token per row of logits [N, vocabulary], which it may overwrite, for the first N samples of a step.

        `buffers` are those of the step. If a `graph` computed the logits, they must still be at its address. `computed` are the masks, if
        they are computed already. The previous sample must have been taken.
        """
        slots = buffers.sample_slots[: len(logits)]
        at = np.flatnonzero(self.scored[slots] != NONE_REQUESTED)
        biased = entries_of(self.biases, slots)
        matched, octets = computed = masks(self._matched(slots, buffers), logits.shape[1]) if computed is None else computed
        scored = None
        if at.size:
            unchanged = at.size == len(slots) and not biased and not matched and self.tokens.keeps_logits(slots)
            original = logits if unchanged else logits[self.tokens.send(at)]
            scored = Scored(at, original, int(self.scored[slots[at]].max()))
        if biased:
            bias.apply(logits, biased, self.tokens.send)
        if matched:
            self.tokens.mask(logits, np.concatenate([one.rows for one in matched]), octets)
        drawn = self.tokens.draw(logits, buffers, graph, scored)
        return PendingSample(drawn, at, self.detailed[slots[at]], computed, biased)

    def take(self, sample: PendingSample) -> tuple[np.ndarray, np.ndarray, dict[int, bytes], dict[int, bytes]]:
        """Waits for a sample and updates its sequences' state. Returns the fields of `Sampled` but `prompts`."""
        chosen = sample.drawn.tokens.numpy()
        logprob = np.zeros(len(chosen) if sample.scored.size else 0, dtype=np.float32)
        details = {}
        if sample.drawn.lines is not None:
            lines = sample.drawn.lines.numpy()
            logprob[sample.scored] = logprobs.logprobs(lines)
            for line in np.flatnonzero(sample.counts != NONE_REQUESTED).tolist():
                details[int(sample.scored[line])] = logprobs.packed(lines[line : line + 1], int(sample.counts[line]))
        refusals = accept(sample.masks.matched, chosen, FAILED)
        for i, own in sample.biased:
            if chosen[i] == FAILED and i not in refusals and (refusal := own.refusal(sample.masks.octets_of(i))) is not None:
                refusals[i] = refusal
        for i, tracker in (*sample.biased, *sample.drawn.trackers):
            if chosen[i] != FAILED:
                tracker.add(int(chosen[i]))
        return chosen, logprob, details, {i: refusal.packed() for i, refusal in refusals.items()}

    def forced_tokens(self) -> list[tuple[int, Sequence[int]]]:
        """The slots whose grammar leaves no choice, each with its next tokens. The previous sample must have been taken."""
        forced = ((slot, matcher.forced()) for slot, matcher in self.matchers.items())
        return [(slot, tokens) for slot, tokens in forced if tokens]

    def close(self) -> None:
        """Ends the thread that computes masks."""
        self._mask_thread.shutdown()

    def _matched(self, slots: np.ndarray, buffers: StepBuffers) -> list[MatchedRows]:
        if not self.matchers:
            return []
        return matched_rows(self.matchers, slots, buffers.input_ids[buffers.sample_at[: len(slots)]])


def entries_of(by_slot: Mapping[int, T], slots: np.ndarray) -> list[tuple[int, T]]:
    """The entries of a step's slots, by index in the step."""
    return [(i, by_slot[slot]) for i, slot in enumerate(slots.tolist()) if slot in by_slot] if by_slot else []
