"""Draws tokens on the device. No call waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from chairlift.kernels.sampling import reference
from chairlift.kernels.sampling.settings import Settings
from chairlift.runner.buffers import PendingResult, StepBuffers
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.sampling.bias import NEVER
from chairlift.runner.sampling.sampler import LOWEST_TEMPERATURE, Drawn, Scored

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph
    from chairlift.runner.interface import NewSequence

_BITS = np.array([1 << bit for bit in range(8)], dtype=np.uint8)


class SamplingVariant(NamedTuple):
    """The kernels that a step needs. Steps of one variant run the same kernels on the same memory, and so can share a graph."""

    truncated: bool
    """Whether any slot has top-k, top-p or min-p."""
    count_rows: int
    """Rows of the table of token counts, 0 if no slot has penalties."""


class DeviceSampler:
    """A `TokenSampler` that keeps the sampling parameters of every slot on the device.

    A draw is the largest of logit / temperature + Gumbel noise. Philox makes the noise from (seed, position, token). All work goes to
    the current stream, and host arrays are copied before a call returns.

    Behind the batch slots is a padding slot, for which padding rows are sampled.
    """

    def __init__(self, max_seqs: int, vocabulary: int, device: torch.device, copy_stream: CopyStream | None = None) -> None:
        self.vocabulary, self.device = vocabulary, device
        self._copy_stream = copy_stream or CopyStream(device)
        # One table, so that one copy brings it to the device. Seeds take two rows.
        self._host = torch.zeros(10, max_seqs + 1, dtype=torch.int32)
        self._table = torch.zeros(10, max_seqs + 1, dtype=torch.int32, device=device)
        self._settings = {name: values.numpy() for name, values in _settings(self._host)._asdict().items()}
        self._settings["slot"].fill(-1)
        self._truncated = np.zeros(max_seqs, dtype=bool)
        self._changed = True
        self.settings = _settings(self._table)
        self._counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        self._free_rows: list[int] = []
        self.last_token = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        """int32 [max_seqs + 1]: the last token of each slot, 0 if its draw failed."""

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a slot to a sequence."""
        params, settings = sequence.params, self._settings
        if (row := int(settings["slot"][slot])) >= 0:
            self._free_rows.append(row)
            settings["slot"][slot] = -1
        # The kernels keep all tokens that tie with the last of top-k. Top-k 1 must keep only the first.
        greedy = params.greedy or params.top_k == 1
        entries = {
            "temperature": 0.0 if greedy else max(params.temperature, LOWEST_TEMPERATURE),
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": (sequence.seed + 2**63) % 2**64 - 2**63,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "slot": self._add_counts(sequence.tokens, sequence.prompt_len) if params.penalised else -1,
        }
        for name, entry in entries.items():
            settings[name][slot] = entry
        self._truncated[slot] = not greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._changed = True

    def remove_request(self, slot: int) -> None:
        """Does nothing: the slot's parameters are replaced when it is assigned again."""

    def _add_counts(self, tokens: np.ndarray, prompt_len: int) -> int:
        """Writes a sequence's token counts to a row of the table of counts and returns the row."""
        if not self._free_rows:
            have = len(self._counts)
            more = self._counts.new_zeros(max(have, 4), self.vocabulary)
            self._counts = torch.cat((self._counts, more))
            self._free_rows = list(range(len(self._counts) - 1, have - 1, -1))
        row = self._free_rows[-1]
        distinct, inverse = np.unique(tokens, return_inverse=True)
        counts = 2 * np.bincount(inverse[prompt_len:], minlength=len(distinct))
        counts[inverse[:prompt_len]] += 1
        places, values = self.send(distinct.astype(np.int64)), self.send(counts.astype(np.int32))
        self._counts[row].zero_().index_copy_(0, places, values)
        return self._free_rows.pop()  # last, because the lines above may run out of memory

    def resolve(self, buffers: StepBuffers, num_tokens: int) -> None:
        """Replaces -(slot + 1) in the input ids on the device by the slot's last token."""
        buffers.on_device.resolve(num_tokens, self.last_token)

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Copies an array to the device."""
        return self._copy_stream.send(array)

    def mask(self, logits: torch.Tensor, rows: np.ndarray, octets: np.ndarray) -> None:
        """Masks tokens that are not allowed."""
        forbidden = (self.send(octets).unsqueeze(2) & self.send(_BITS) == 0).flatten(1)[:, : logits.shape[1]]
        at = self.send(rows)
        logits[at] = logits[at].masked_fill_(forbidden, NEVER)

    def keeps_logits(self, slots: np.ndarray) -> bool:
        """False: the kernels overwrite the logits."""
        return False

    def prepare(self, slots: np.ndarray) -> SamplingVariant:
        """Copies changed parameters to the device and returns the variant of a step that samples these slots."""
        if self._changed:
            self._table.copy_(self.send(self._host.numpy()))
            self._changed = False
        penalised = (self._settings["slot"][slots] >= 0).any()
        return SamplingVariant(bool(self._truncated[slots].any()), len(self._counts) if penalised else 0)

    def draw(self, logits: torch.Tensor, buffers: StepBuffers, graph: Graph | None, scored: Scored | None) -> Drawn:
        """Starts drawing a token per row of logits [N, vocabulary], which it may overwrite. Reads slots and positions on the device."""
        count = len(logits)
        variant = self.prepare(buffers.sample_slots[:count])
        if graph is not None:
            tokens = graph.sample(variant, count)
        else:
            step = buffers.on_device
            positions = step.positions[step.sample_at[:count]] + 1
            tokens = self.sample(logits, step.sample_slots[:count], positions, variant)
        lines = None
        if scored is not None:
            places = torch.arange(scored.at.size, device=self.device)
            chosen = tokens[self.send(scored.at)]
            lines = self._copy_stream.fetch(self.score_rows(scored.logits, places, chosen, scored.num_top))
        return Drawn(self._copy_stream.fetch(tokens), lines, ())

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, variant: SamplingVariant) -> torch.Tensor:
        """Draws a token per row of logits [N, vocabulary] in fp32, which it may overwrite: int32 [N] on the device.

        `slots` and `positions`, int32 [N] on the device, are the rows' batch slots and the positions that the tokens will take. The
        tokens are also written to `last_token` and counted for penalties. A token is -1 if a logit is NaN or the best is not finite.
        """
        if logits.is_cpu:
            sample = reference.sample
        else:
            from chairlift.kernels.sampling.sample import sample
        counts = self._counts if variant.count_rows else None
        return sample(logits, slots, positions, self.settings, self.last_token, counts, truncated=variant.truncated)

    def score(self, logits: torch.Tensor, tokens: np.ndarray, count: int) -> PendingResult:
        """Starts computing lines of `logprobs.score` for tokens [M], given logits [M, vocabulary]."""
        targets = self.send(tokens.astype(np.int64))
        return self._copy_stream.fetch(self.score_rows(logits, torch.arange(len(targets), device=self.device), targets, count))

    def score_rows(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Lines of `logprobs.score`, int32 [M, 3 + 2 * count] on the device, for `tokens` [M] and `rows` [M] of logits [N, vocabulary].

        `logits` must be unchanged since the model computed them.
        """
        if logits.is_cpu:
            score = reference.score
        else:
            from chairlift.kernels.sampling.logprobs import score
        return score(logits, rows, tokens, count)


def _settings(table: torch.Tensor) -> Settings:
    """Views of the table's rows."""
    floats = table.view(torch.float32)
    seed = table[:2].view(-1).view(torch.int64)
    return Settings(floats[2], table[3], floats[4], floats[5], seed, floats[6], floats[7], floats[8], table[9])
