"""A layer's mixture of experts in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from chairlift.architectures import Mixture as Names
from chairlift.errors import UnsupportedModel
from chairlift.layers import experts as layers
from chairlift.layers.activation import activate
from chairlift.layers.linear import Activations, Linear, Quantised, Weight, multiplied_out, quantise
from chairlift.models.blocks import Block, LayerWeights, Pass
from chairlift.models.experts import MXFP4_BLOCKS, MXFP4_GROUP, MXFP4_SCALES, Experts, has_matrices, whole_name


class Mixture(Block):
    """MLPs of which a router chooses a few for each token, and one that all tokens use, if the model has it."""

    def __init__(self, weights: LayerWeights, experts: Experts) -> None:
        """Reads the experts. Their quantised matrices are kept on a CUDA device, and multiplied out elsewhere. Raises UnsupportedModel."""
        super().__init__(weights)
        config, names, source = weights.config, experts.names, weights.source
        self._activation, self._count = config.activation, experts.count
        self.norm, self.parallel = weights.stream_norm(config.mlp_norm), config.parallel
        self.post_norm = weights.stream_norm(config.family.norms.after_mlp) if config.family.post_norms else None
        self._gated = names.shared_gate is not None
        router = {f"{weights.prefix}{name}.weight": size for name, size in experts.router_rows.items()}
        matrices = {name: source.take(name, size, config.hidden_size) for name, size in router.items()}
        for name, matrix in matrices.items():
            if not matrix.isfinite().all():
                raise UnsupportedModel(f"tensor {name} has numbers that are not finite: no expert could be chosen with it")
        bias = source.take(f"{weights.prefix}{names.router}.bias", experts.count) if names.biases else None
        self._router = Linear(torch.cat(list(matrices.values())), bias)
        choice = experts.choice_bias(source.has, weights.prefix)
        self._choice = layers.Choice(
            scores=names.scores.value,
            used=experts.used,
            bias=source.floats(choice[0], *choice[1]).view(-1) if choice else None,
            epsilon=names.epsilon if experts.normalised else None,
            scale=experts.scale,
            groups=(*experts.groups, names.best) if experts.groups and names.best else None,
        )
        reader = _Reader(weights, experts)
        self._experts = layers.Experts(
            gate_up=reader.gate_up(),
            down=reader.down(),
            biases=reader.biases() if names.biases else None,
            activation=config.activation,
            clamp=experts.clamp,
        )
        self._shared: tuple[Linear, Linear] | None = None
        if names.shared and (inner := experts.shared_inner):
            down = weights.merged((names.shared.down,), (config.hidden_size,), inner)
            self._shared = weights.gate_up(names.shared, inner), down

    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Chooses experts and computes them."""
        assert isinstance(x, torch.Tensor)
        logits = self._router(x)
        out = self._experts(x, *self._choice(logits[:, : self._count].float()))
        if self._shared is not None:
            gate_up, down = self._shared
            shared = down(activate(gate_up(x), self._activation, rounds=down.rounds_activations))
            out += shared.mul_(logits[:, self._count :].sigmoid()) if self._gated else shared
        return self._scaled(out)


class _Reader:
    """Reads the matrices of a layer's experts, in each way that checkpoints store them."""

    def __init__(self, weights: LayerWeights, experts: Experts) -> None:
        self._dtype, self._quantization = weights.dtype, weights.quantization
        self._source, self._prefix, self._count = weights.source, weights.prefix, experts.count
        self._names: Names = experts.names
        self._hidden, self._inner = weights.config.hidden_size, experts.inner
        self._are_transposed = experts.are_transposed(weights.source.has, weights.prefix, self._hidden)

    def gate_up(self) -> Weight:
        """The gate and up projections [experts, 2 * inner, hidden], or up alone if there are no gates."""
        names, inner = self._names, self._inner
        if names.both and self._are_transposed:
            both = self._transposed(names.both, 2 * inner, self._hidden)
            in_turn = names.alternating
            return self._rounded(_each(both, lambda x: torch.cat((x[:, ::2], x[:, 1::2]), 1) if in_turn else x.contiguous()))
        if names.gate and has_matrices(self._source.has, self._prefix + names.gate_up):
            return self._filled(((names.gate_up, 2 * inner),), self._hidden)
        return self._filled(tuple((name, inner) for name in (names.gate, names.up) if name), self._hidden)

    def down(self) -> Weight:
        """The down projections [experts, hidden, inner]."""
        names = self._names
        if names.transposed and self._are_transposed:
            return self._rounded(_each(self._transposed(names.transposed, self._hidden, self._inner), torch.Tensor.contiguous))
        return self._filled(((names.down, self._hidden),), self._inner)

    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The biases [experts, outputs] of the first projections and of the second ones."""
        names, take = self._names, self._source.take
        fused = f"{self._prefix}{names.both}_bias"
        if self._source.has(fused):
            both = take(fused, self._count, 2 * self._inner)
            second = take(f"{self._prefix}{names.transposed}_bias", self._count, self._hidden)
            return torch.cat((both[:, ::2], both[:, 1::2]), 1), second
        sizes = {name: self._inner for name in (names.gate, names.up) if name} | {names.down: self._hidden}
        found = [take(f"{self._prefix}{name.replace('.{}', '')}.bias", self._count, size) for name, size in sizes.items()]
        return torch.cat(found[:-1], 1), found[-1]

    def _filled(self, parts: tuple[tuple[str, int], ...], ins: int) -> Weight:
        """Matrices of all experts with the rows of several projections, each from one tensor or from one for each expert."""
        if len(parts) == 1 and (whole := whole_name(self._source.has, self._prefix + parts[0][0])):
            return self._rounded(self._source.take(whole, self._count, parts[0][1], ins))
        out: Weight | None = None
        start, total = 0, sum(size for _, size in parts)
        for name, size in parts:
            for at, found in self._matrices(name, size, ins):
                if out is None:
                    out = _each(found, lambda x: x.new_empty(self._count, total, x.shape[-1]))
                try:
                    for there, tensor in zip(_tensors(out), _tensors(found), strict=True):
                        there[at, start : start + size] = tensor
                except (ValueError, RuntimeError):
                    raise UnsupportedModel(f"the experts of {self._prefix}{name} are quantised in different ways") from None
            start += size
        assert out is not None
        return out

    def _matrices(self, name: str, rows: int, ins: int) -> Iterable[tuple[slice | int, Weight]]:
        if whole := whole_name(self._source.has, self._prefix + name):
            yield slice(None), self._rounded(self._source.take(whole, self._count, rows, ins))
            return
        for expert in range(self._count):
            yield expert, self._rounded(self._source.matrix(self._prefix + name.format(expert), rows, ins))

    def _rounded(self, weight: Weight) -> Weight:
        """Matrices as a device keeps them. A CPU, and columns in another order than the inputs, need them multiplied out."""
        if isinstance(weight, Quantised):
            return weight if _keeps(weight.numbers) and weight.order is None else multiplied_out(weight, self._dtype)
        if self._quantization is None:
            return weight
        found = quantise(weight.flatten(0, -2), self._quantization)
        return _each(found, lambda x: x.view(*weight.shape[:-1], x.shape[-1]))

    def _transposed(self, name: str, rows: int, ins: int) -> Weight:
        """Matrices [experts, rows, ins] that are stored as [experts, ins, rows] or in MXFP4."""
        name = self._prefix + name
        if self._source.has(name + MXFP4_BLOCKS):
            return self._mxfp4(name, rows, ins)
        return self._source.take(name, self._count, ins, rows).mT

    def _mxfp4(self, name: str, rows: int, ins: int) -> Weight:
        if ins % MXFP4_GROUP:
            raise UnsupportedModel(f"tensor {name}{MXFP4_BLOCKS} has rows of {ins} numbers, which are not whole blocks of {MXFP4_GROUP}")
        pairs = self._source.packed(name + MXFP4_BLOCKS, self._count, rows, ins // MXFP4_GROUP, MXFP4_GROUP // 2).flatten(2)
        packed = Quantised(pairs, self._source.packed(name + MXFP4_SCALES, self._count, rows, ins // MXFP4_GROUP), None, MXFP4_GROUP)
        if _keeps(pairs):
            return packed
        # One by one, because indices take eight bytes each.
        return torch.stack([layers.of_expert(packed, expert, self._dtype) for expert in range(self._count)])


def _keeps(numbers: torch.Tensor) -> bool:
    """Whether the device of quantised numbers multiplies by them as they are."""
    return numbers.is_cuda


def _tensors(weight: Weight) -> list[torch.Tensor]:
    """The tensors of a weight; torch cannot assign fp8."""
    if isinstance(weight, torch.Tensor):
        return [weight]
    numbers = weight.numbers.view(torch.uint8) if weight.numbers.dtype == torch.float8_e4m3fn else weight.numbers
    return [numbers, weight.scale, *([] if weight.zero is None else [weight.zero])]


def _each(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """A weight with each of its tensors changed, which are rows of numbers, of scales and of zeros."""
    if isinstance(weight, torch.Tensor):
        return change(weight)
    zero = None if weight.zero is None else change(weight.zero)
    return weight._replace(numbers=change(weight.numbers), scale=change(weight.scale), zero=zero)
