"""Parses the part of a config.json that describes a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift.architectures import Mixture, Scores
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import NoNativeModel, parse_count, parse_names, parse_number, parse_size, parse_table

OTHER_COUNT = "num_local_experts"
"""The name of the number of experts in each config.json that transformers 5 writes."""

EXPERTS = "moe"
"""The name of layers with experts in `layers_block_type`."""

MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Endings of the names of gpt-oss's experts in MXFP4: codes of 4 bits, and an exponent for each MXFP4_GROUP."""

MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model's layers.

    Each of `layers` is whether the layer has experts; the others have an MLP. A token uses `used` of `count` experts with the inner size
    `inner`, and a shared one if `shared_inner` is not 0. `normalised` means that a token's weights are divided by their sum.
    `clamp` are the slope and the limit of gpt-oss's activation. With `biased` a bias is added to the scores when experts are chosen, and
    `scale` multiplies the weights. `groups` are the number of groups of experts, and of those that a token may use; None means that it may
    use all. With `mxfp4` the checkpoint has the experts' matrices in MXFP4. `names` are those of the tensors.
    """

    names: Mixture
    layers: tuple[bool, ...]
    count: int
    used: int
    inner: int
    shared_inner: int
    normalised: bool
    clamp: tuple[float, float] | None
    biased: bool
    scale: float
    groups: tuple[int, int] | None
    mxfp4: bool

    @property
    def router_rows(self) -> dict[str, int]:
        """The rows of the router's matrices by name: those of the experts, and that of the shared expert's gate if it has one."""
        return {self.names.router: self.count} | ({self.names.shared_gate: 1} if self.names.shared_gate else {})

    def routed_weights(self, hidden: int) -> int:
        """The number of parameters of a layer's experts that tokens choose from."""
        return (3 if self.names.gate else 2) * self.count * self.inner * hidden

    def widest(self, hidden: int) -> int:
        """The numbers of a token's widest activation in a layer: its experts' inner layers or their outputs, or the shared inner layer."""
        return max(self.used * max(self.inner, hidden), self.shared_inner)

    def choice_bias(self, has: Callable[..., bool], prefix: str) -> tuple[str, tuple[int, ...]] | None:
        """The name and the shape of the tensor that is added to the scores of a layer; None if there is none. `has` is as below."""
        if self.names.choice_bias is None or not self.biased:
            return None
        name = prefix + self.names.choice_bias
        return name, (1, self.count) if has(name, 1, self.count) else (self.count,)  # ERNIE's has a dimension more

    def are_transposed(self, has: Callable[..., bool], prefix: str, hidden: int) -> bool:
        """Whether the checkpoint has transposed matrices of all experts, or their blocks of MXFP4.

        `has` says whether there is a tensor of a name, and of a shape if one is given. Where two sizes are equal, the shape of one tensor
        does not tell.
        """
        names = self.names
        if not (names.both and names.transposed):
            return False
        both, down = prefix + names.both, prefix + names.transposed
        shaped = has(both, self.count, hidden, 2 * self.inner) and has(down, self.count, self.inner, hidden)
        return has(both + MXFP4_BLOCKS) or shaped


def whole_name(has: Callable[[str], bool], name: str) -> str | None:
    """Returns the name of the tensor of all experts, if there is one. `has` says whether there is a tensor of a name."""
    name = name.replace(".{}", "")
    return next((whole for whole in (f"{name}.weight", name) if has(whole)), None)


def has_matrices(has: Callable[[str], bool], name: str) -> bool:
    """Whether there are matrices of this name, in one tensor of all experts or in one for each."""
    return whole_name(has, name) is not None or has(f"{name.format(0)}.weight")


def parse_experts(raw: dict[str, Any], names: Mixture, layers: int) -> Experts | None:
    """Parses the experts of a model with `layers` layers; None if it has none.

    Raises UnsupportedModel for values that do not fit each other.
    """
    if (names.switch and not raw.get(names.switch)) or (names.optional and raw.get(names.count) == 0):
        return None
    # dots.llm1's config.json says noaux_tc, the method that chooses experts by sigmoids and biases.
    usual = (None, names.scores.value, *(("noaux_tc",) if names.scores is Scores.SIGMOID else ()))
    if raw.get("scoring_func") not in usual:
        raise UnsupportedModel(f"config.json: scoring_func is {raw['scoring_func']!r:.50}, and there is code for {names.scores.value}")
    if raw.get("moe_latent_size"):
        raise NoNativeModel("experts of a width of their own (moe_latent_size) have no code of ours")
    for name in (names.used, names.shared_count[0] if names.shared_count else names.used):
        if isinstance(each := raw.get(name), list) and len(each) == layers and len(set(map(str, each))) == 1:
            raw = raw | {name: each[0]}  # Hunyuan has an entry for each layer
    count = parse_size(raw, OTHER_COUNT if raw.get(names.count) is None and OTHER_COUNT in raw else names.count)
    used = parse_size(raw, names.used)
    if used > count:
        raise UnsupportedModel(f"config.json: {names.used} is {used}, and there are {count} experts")
    if names.normalised is True:
        raw.get("norm_topk_prob")  # counts as read: true says what these architectures always do
    normalised = names.normalised if isinstance(names.normalised, bool) else bool(raw.get(*names.normalised))
    inner = parse_size(raw, names.inner)
    return Experts(
        names=names,
        layers=_layers(raw, names, layers),
        count=count,
        used=used,
        inner=inner,
        shared_inner=_shared_inner(raw, names, inner) if names.shared else 0,
        normalised=normalised,
        clamp=(parse_number(raw, "swiglu_alpha", 1.702), parse_number(raw, "swiglu_limit", 7.0)) if names.clamped else None,
        biased=names.choice_bias is not None and bool(raw.get("use_expert_bias", True)),
        scale=parse_number(raw, *names.scale) if names.scale else 1.0,
        groups=_groups(raw, names, count, used),
        mxfp4=parse_table(raw, "quantization_config").get("quant_method") == "mxfp4",
    )


def _shared_inner(raw: dict[str, Any], names: Mixture, inner: int) -> int:
    """Returns the inner size of the shared expert; 0 if there is none."""
    if names.shared_count is None:
        return parse_size(raw, names.shared_inner)
    return inner * parse_count(raw, *names.shared_count)


def _groups(raw: dict[str, Any], names: Mixture, count: int, used: int) -> tuple[int, int] | None:
    """Returns the number of groups of experts, and of those that a token may use; None if it may use all."""
    keys = {name: raw.get(name) or None for name in ("n_group", "topk_group")}  # Hunyuan-A13B's are false
    groups, allowed = parse_size(keys, "n_group", names.groups[0]), parse_size(keys, "topk_group", names.groups[1])
    # Only DeepSeek V2 reads the method.
    if groups == 1 or (names.scores is Scores.SOFTMAX and raw.get("topk_method", "greedy") == "greedy"):
        return None
    if names.best is None:
        raise NoNativeModel(f"experts in {groups} groups (n_group) have no code of ours")
    if count % groups or allowed > groups or used > count // groups * allowed:
        raise UnsupportedModel(
            f"config.json: {used} experts cannot be chosen from topk_group={allowed} of the n_group={groups} groups of {count} experts"
        )
    return groups, allowed


def _layers(raw: dict[str, Any], names: Mixture, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it has experts."""
    if (kinds := parse_names(raw, "layers_block_type")) and EXPERTS in kinds:
        return tuple(kind == EXPERTS for kind in kinds)
    if names.dense is not None:
        if (kinds := parse_names(raw, "mlp_layer_types")) is not None:
            if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
                raise UnsupportedModel(
                    f"config.json: mlp_layer_types must be dense or sparse for each of {layers} layers, got {kinds!r:.200}"
                )
            return tuple(kind == "sparse" for kind in kinds)
        first, step = parse_count(raw, *names.dense), parse_size(raw, "moe_layer_interval", 1)  # this and the next are ERNIE's
        last = layers - 1 if raw.get("moe_layer_end_index") == -1 else parse_count(raw, "moe_layer_end_index", layers - 1)
        return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers))
    step, dense = parse_size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < layers for layer in dense):
        raise UnsupportedModel(f"config.json: mlp_only_layers must be numbers of the {layers} layers, got {dense!r:.200}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
