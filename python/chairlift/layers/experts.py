"""Mixtures of experts: the choice of a token's experts, and their MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch.nn import functional

from chairlift.layers.activation import activate
from chairlift.layers.linear import Quantised, Weight, dequantise


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
    inner], with biases [experts, outputs] or without. Quantised matrices are a `Quantised` whose tensors have a leading axis of experts.
    With `clamp` (a, c) gates and what they gate are limited to c, and the result is gate * sigmoid(a * gate) * (1 + up) (gpt-oss).
    """

    gate_up: Weight
    down: Weight
    biases: tuple[torch.Tensor, torch.Tensor] | None
    activation: str
    clamp: tuple[float, float] | None

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sums of the outputs of each token's experts for contiguous x [tokens, hidden]."""
        tokens, used = experts.shape
        first, second = self.biases or (None, None)
        rows = Rows.sort(experts, len(self.down if isinstance(self.down, torch.Tensor) else self.down.numbers))
        inner = rows.linear(x, self.gate_up, first, spread=True)
        inner = activate(inner, self.activation) if self.clamp is None else clamped(inner, *self.clamp)
        # A sum by index would add in any order.
        outputs = rows.linear(inner, self.down, second, spread=False).view(tokens, used, -1)
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), outputs).squeeze(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, one for each of a token's `used` experts, sorted by expert, so that each expert multiplies neighbours.

    `order` are their places before, int32 [rows], `ends` those where each expert's rows end, int32 [experts], and `experts` the choices
    [tokens, used]. Nothing here waits for the device.
    """

    order: torch.Tensor
    ends: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def sort(cls, experts: torch.Tensor, count: int) -> Rows:
        """Sorts choices [tokens, used] of `count` experts."""
        if experts.is_cuda:
            from chairlift.kernels.sort_experts import sort_experts  # triton is only installed for GPUs

            return cls(*sort_experts(experts, count), experts)
        ordered, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(count), right=True)
        return cls(order.int(), ends.int(), experts)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, *, spread: bool) -> torch.Tensor:
        """Maps rows by their experts' matrices. With `spread` x is [tokens, in] and the result is sorted; else x is sorted.

        A GPU multiplies them in 16 bits with our kernel, or with torch's where that is faster.
        """
        if x.is_cuda and x.element_size() == 2:
            from chairlift.kernels import expert_linear as kernel  # as above

            if isinstance(weight, Quantised) or not kernel.torch_is_faster(x, len(self.order), len(self.ends)):
                used = self.experts.shape[1]
                return kernel.expert_linear(x, _stored(weight), bias, (self.order, self.ends), used, spread=spread)
        if spread:
            x = x[self.order // self.experts.shape[1]]
        product = grouped_mm(x, weight, self.ends)
        if bias is not None:
            product += bias[self.experts.flatten()[self.order]]
        if spread:
            return product
        back = torch.empty_like(product)
        back[self.order] = product
        return back


def _stored(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]:
    return (weight, None, None, 0) if isinstance(weight, torch.Tensor) else weight.stored


def grouped_mm(x: torch.Tensor, weights: Weight, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies x [rows, in] by the transposed weights [experts, out, in]; expert e has the rows before `ends[e]`, int32 [experts].

    On a GPU, bfloat16 is for the devices of `torch_is_faster`, which compute all experts in one launch. Other dtypes wait for the numbers
    of rows.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and isinstance(weights, torch.Tensor):
        product: torch.Tensor = torch._grouped_mm(x, weights.mT, offs=ends)
        return product
    limits = [0, *ends.tolist()]
    return torch.cat([functional.linear(x[start:end], of_expert(weights, e, x.dtype)) for e, (start, end) in enumerate(pairwise(limits))])


def of_expert(weights: Weight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """An expert's matrix, multiplied out if it is quantised."""
    if isinstance(weights, torch.Tensor):
        return weights[expert]
    numbers, scale, zero, group = weights.stored
    return dequantise(Quantised(numbers[expert], scale[expert], None if zero is None else zero[expert], group), dtype)


def clamped(inner: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    """Maps contiguous gates and what they gate [rows, 2 * columns] as `Experts` says."""
    if inner.is_cuda:
        from chairlift.kernels.act_mul import act_mul  # as above

        return act_mul(inner, "silu", clamp=(slope, limit))
    gate, up = inner.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul_((gate * slope).sigmoid_()).mul_(up.add_(1))
