"""Sampling where the logits are: settings, penalties and the draw on a device, which no call here waits for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from chairlift.kernels.sampling import reference
from chairlift.kernels.sampling.settings import Settings
from chairlift.runner.copy_stream import send
from chairlift.runner.sampling.choice import LOWEST_TEMPERATURE
from chairlift.sampling import SamplingParams


class SamplingVariant(NamedTuple):
    """Which kernels a step needs: steps of one tier run the same ones on the same memory, and so can share a graph."""

    truncated: bool
    """Whether some row has top-k, top-p or min-p."""
    slots: int
    """Lines that there are for penalties, 0 if no row is penalised."""


class DeviceSampler:
    """How each row of the engine is sampled, kept on the device, and the draw.

    A draw is the largest of logit / temperature + Gumbel noise, which Philox makes of (seed, position, token): it depends on nobody
    else in the step. All work is put on the current stream, and what the host gives is taken before a call returns.

    Behind the rows is one that is nobody's: what only fills up a step is sampled for it.
    """

    def __init__(self, max_seqs: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        # One table, so that one copy brings it to the device: seeds take two lines.
        self._host = torch.zeros(10, max_seqs + 1, dtype=torch.int32)
        self._table = torch.zeros(10, max_seqs + 1, dtype=torch.int32, device=device)
        self._mine = {name: values.numpy() for name, values in _settings(self._host)._asdict().items()}
        self._mine["slot"].fill(-1)
        self._truncated = np.zeros(max_seqs, dtype=bool)
        self._changed = True
        self.settings = _settings(self._table)
        self._said = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self.last_token = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        """int32 [max_seqs + 1]: the token that each row drew last, 0 if that failed."""

    def seat(self, row: int, params: SamplingParams, tokens: np.ndarray, prompt_len: int, seed: int) -> None:
        """Gives `row` to a sequence: its settings, and its tokens so far (prompt, then generated)."""
        mine = self._mine
        if (slot := int(mine["slot"][row])) >= 0:
            self._free.append(slot)
            mine["slot"][row] = -1
        # The kernels keep all tokens that are as likely as the last of top-k: of one, only the first is to be taken.
        greedy = params.greedy or params.top_k == 1
        entries = {
            "temperature": 0.0 if greedy else max(params.temperature, LOWEST_TEMPERATURE),
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": (seed + 2**63) % 2**64 - 2**63,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "slot": self._remember(tokens, prompt_len) if params.penalised else -1,
        }
        for name, entry in entries.items():
            mine[name][row] = entry
        self._truncated[row] = not greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._changed = True

    def _remember(self, tokens: np.ndarray, prompt_len: int) -> int:
        """Puts what a sequence has said into a line of `said`."""
        if not self._free:
            have = len(self._said)
            more = self._said.new_zeros(max(have, 4), self.vocabulary)
            self._said = torch.cat((self._said, more))
            self._free = list(range(len(self._said) - 1, have - 1, -1))
        slot = self._free[-1]
        distinct, inverse = np.unique(tokens, return_inverse=True)
        counts = 2 * np.bincount(inverse[prompt_len:], minlength=len(distinct))
        counts[inverse[:prompt_len]] += 1
        places, values = send(distinct.astype(np.int64), self.device), send(counts.astype(np.int32), self.device)
        self._said[slot].zero_().index_copy_(0, places, values)
        return self._free.pop()  # last, for what is before it may lack memory

    def prepare(self, rows: np.ndarray) -> SamplingVariant:
        """Brings what `seat` changed to the device, and says the tier of a step that samples these rows."""
        if self._changed:
            self._table.copy_(send(self._host.numpy(), self.device))
            self._changed = False
        penalised = (self._mine["slot"][rows] >= 0).any()
        return SamplingVariant(bool(self._truncated[rows].any()), len(self._said) if penalised else 0)

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tier: SamplingVariant) -> torch.Tensor:
        """A token for each row of logits [N, vocabulary] in fp32, which it may overwrite; int32 [N] on the device.

        `rows` and `positions`, int32 [N] on the device, say whose they are and which places in their sequences the tokens will take.
        Also keeps them in `last_token`, and counts them for penalties. A token is -1 where a logit is NaN or the best is not finite.
        """
        if logits.is_cpu:
            sample = reference.sample
        else:
            from chairlift.kernels.sampling.sample import sample
        said = self._said if tier.slots else None
        return sample(logits, rows, positions, self.settings, self.last_token, said, truncated=tier.truncated)

    def score(self, logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Lines of `logprobs.score`, int32 [M, 3 + 2 * count] on the device, for rows of logits [N, vocabulary] at `places` [M].

        `tokens` [N] are the rows' tokens. `logits` must be as the model gave them: `sample` may change them.
        """
        if logits.is_cpu:
            score = reference.score
        else:
            from chairlift.kernels.sampling.logprobs import score
        return score(logits, places, tokens, count)


def _settings(table: torch.Tensor) -> Settings:
    """Views of a table's lines."""
    floats = table.view(torch.float32)
    seed = table[:2].view(-1).view(torch.int64)
    return Settings(floats[2], table[3], floats[4], floats[5], seed, floats[6], floats[7], floats[8], table[9])
