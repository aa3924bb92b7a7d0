"""The time of a step: a curve over its tokens plus the cost of attention, measured or from a roofline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from chairlift.errors import InvalidSetting
from chairlift.models.shape import ModelShape


class Load(NamedTuple):
    """The work of a step, as in `rust/core/src/step_time/model.rs`: numbers, or arrays of them."""

    prefill_tokens: Any
    decode_seqs: Any
    context_tokens: Any
    prefill_pairs: Any


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds of a step.

    `curve` has points (tokens, microseconds). It is linear between them, and beyond the last as between the last two. The other fields are
    microseconds for each decoding sequence, each context token read, and each pair of a prompt token and an earlier one.
    """

    curve: Sequence[tuple[float, float]]
    decode_seq: float = 0.0
    context_token: float = 0.0
    prefill_pair: float = 0.0

    @classmethod
    def constant(cls, microseconds: float) -> StepTime:
        """A constant time for every step."""
        return cls(((0.0, microseconds), (1.0, microseconds)))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> StepTime:
        """Parses the output of `document`; raises InvalidSetting."""
        try:
            curve = tuple((float(tokens), float(time)) for tokens, time in raw["curve"])
            parts = [float(raw[name]) for name in ("decode_seq", "context_token", "prefill_pair")]
            if len(curve) < 2 or not all(map(math.isfinite, [*parts, *itertools.chain(*curve)])):
                raise ValueError("a curve needs at least two points, and finite times")
            return cls(curve, *parts)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSetting(f"invalid step times ({error}): 'chairlift calibrate' writes them") from None

    @property
    def numbers(self) -> tuple[Sequence[tuple[float, float]], float, float, float]:
        """The fields in the order that `_core.simulate` takes."""
        return self.curve, self.decode_seq, self.context_token, self.prefill_pair

    def __call__(self, load: Load) -> Any:
        """Microseconds of one step, or of each of several."""
        (*_, (previous, low), (last, high)) = self.curve
        tokens = np.asarray(load.prefill_tokens) + np.asarray(load.decode_seqs)
        points = np.asarray(self.curve)
        linear = np.interp(tokens, points[:, 0], points[:, 1]) + np.maximum(0, tokens - last) * (high - low) / (last - previous)
        attention = self.context_token * np.asarray(load.context_tokens) + self.prefill_pair * np.asarray(load.prefill_pairs)
        return linear + attention + self.decode_seq * np.asarray(load.decode_seqs)

    def times(self, factor: float) -> StepTime:
        """Steps that take `factor` times as long."""
        curve = tuple((tokens, factor * time) for tokens, time in self.curve)
        return StepTime(curve, factor * self.decode_seq, factor * self.context_token, factor * self.prefill_pair)

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A device's peak bandwidth and FLOP rate, per second, and the share of them that kernels reach.

    `flops` has a peak for each data type. `overhead_us` is added to every step.
    """

    bandwidth: float
    flops: Mapping[str, float]
    bandwidth_share: float
    flops_share: float
    overhead_us: float


def roofline(model: ModelShape, roof: Roof, *, weights: str, weight_bytes: float, kv_bytes: float) -> StepTime:
    """A model's step time by the roofline of a device (Williams et al., 2009).

    Linear layers read all weights once or compute 2 FLOP for each weight and token, whichever takes longer. Of experts, only those are read
    that the tokens are expected to use together, and a token computes with its own. Attention reads `kv_bytes` for
    each context token and computes 4 FLOP for each pair of tokens, head and head dimension. Sliding windows are ignored. `weights` is the
    data type of the computation, `weight_bytes` the size of one weight.
    """
    table = model.vocab_size * model.hidden_size
    tied = bool(getattr(model, "tie_word_embeddings", False))
    layers = model.num_weights - table * (1 if tied else 2)
    bandwidth, flops = roof.bandwidth * roof.bandwidth_share / 1e6, roof.flops[weights] * roof.flops_share / 1e6
    reading = (layers + table) * weight_bytes / bandwidth
    (count, used), experts = model.expert_counts, model.expert_weights
    unused = 1 - used / max(count, 1)
    token = 2 * (layers - experts * unused) / flops
    knee = reading / token
    # Latents are keys and values.
    spec_flops = sum(2 * (spec.head_dim + (spec.value_dim or spec.head_dim)) for spec in model.kv_specs) * model.num_heads
    few = [0.0, *(2.0**power for power in range(math.ceil(math.log2(max(knee, 1))) if experts else 0))]
    reads = [(tokens, reading - experts * unused**tokens * weight_bytes / bandwidth) for tokens in few]
    points = [*((tokens, max(read, tokens * token)) for tokens, read in reads), (knee, reading), (2 * knee, 2 * reading)]
    curve = tuple((tokens, roof.overhead_us + time) for tokens, time in points)
    return StepTime(curve, 2 * table / flops, kv_bytes / bandwidth, spec_flops / flops)
