"""Mixtures of experts: the choice of a token's experts, and their MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from chairlift.layers.activation import activate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How experts are chosen: the `used` largest of the softmax or the sigmoid of a router's logits, or of the logits themselves.

    `bias` is added to these scores when they are compared, and not to the weights. Weights are the scores of the chosen experts, of logits
    their softmax. They are divided by their sum plus `epsilon` if that is not None, and multiplied by `scale`. With `groups` (n, m, b) the
    experts are n groups of equal size, of which a token may use the m whose b best experts have the largest sums (DeepSeek).
    """

    scores: Literal["softmax", "sigmoid", "logits"]
    used: int
    bias: torch.Tensor | None
    epsilon: float | None
    scale: float
    groups: tuple[int, int, int] | None = None

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses from fp32 logits [tokens, experts]. Returns experts, int64, and weights, fp32, both [tokens, used]."""
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid() if self.scores == "sigmoid" else logits
        ranks = scores if self.bias is None else scores + self.bias
        if self.groups is not None:
            ranks = _in_best_groups(ranks, *self.groups)
        experts = ranks.topk(self.used).indices
        weights = scores.gather(1, experts)
        if self.scores == "logits":
            weights = weights.softmax(-1)
        if self.epsilon is not None:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return experts, weights * self.scale


def _in_best_groups(ranks: torch.Tensor, groups: int, used: int, best: int) -> torch.Tensor:
    """Ranks [tokens, experts], with minus infinity outside of each token's best groups."""
    grouped = ranks.view(len(ranks), groups, -1)
    sums = grouped.topk(min(best, grouped.shape[-1])).values.sum(-1)
    hidden = torch.ones_like(sums, dtype=torch.bool).scatter_(1, sums.topk(used).indices, False)
    return grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).view_as(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The MLPs of all experts: gate_up [experts, 2 * inner, hidden], or [experts, inner, hidden] without gates, and down [experts, hidden,
    inner], with biases [experts, outputs] or without. With `clamp` (a, c) gates and what they gate are limited to c, and the result is
    gate * sigmoid(a * gate) * (1 + up) (gpt-oss).
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor] | None
    activation: str
    clamp: tuple[float, float] | None

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sums of the outputs of each token's experts for x [tokens, hidden]."""
        tokens, used = experts.shape
        # Rows are sorted by expert, so that each expert multiplies neighbours. Nothing here waits for the device.
        ordered, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(len(self.down), device=x.device), right=True).int()
        inner = grouped_mm(x[order // used], self.gate_up, ends)
        if self.biases is not None:
            inner += self.biases[0][ordered]
        inner = activate(inner, self.activation) if self.clamp is None else _clamped(inner, *self.clamp)
        outputs = grouped_mm(inner, self.down, ends)
        if self.biases is not None:
            outputs += self.biases[1][ordered]
        # A sum by index would add in any order.
        back = outputs[order.argsort()].view(tokens, used, -1)
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), back).squeeze(1)


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies x [rows, in] by the transposed weights [experts, out, in]; expert e has the rows before `ends[e]`, int32 [experts].

    A GPU computes all experts in one launch in bfloat16. In another dtype it waits for the numbers of rows.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        product: torch.Tensor = torch._grouped_mm(x, weights.mT, offs=ends)
        return product
    limits = [0, *ends.tolist()]
    return torch.cat([functional.linear(x[start:end], weight) for start, end, weight in zip(limits, limits[1:], weights, strict=False)])


def _clamped(inner: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    gate, up = inner.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul_((gate * slope).sigmoid_()).mul_(up.add_(1))
