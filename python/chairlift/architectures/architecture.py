"""The values that describe an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Code(Enum):
    """Which code of Chairlift's own computes an architecture. Transformers' code computes it elsewhere."""

    RUST_AND_TORCH = "the CPU kernels, and torch"
    RUST = "the CPU kernels"


class Windows(Enum):
    """Which layers have the sliding window of config.json."""

    NONE = "none"
    ALL = "all"
    ALL_UNLESS_LISTED = "all, or those of layer_types"
    SWITCHED = "those of layer_types, or from max_window_layers on; none unless use_sliding_window is set"
    LISTED = "those of layer_types, or all except every n-th"


@dataclass(frozen=True, slots=True)
class Projections:
    """Names of a layer's linear layers in a checkpoint, below `model.layers.N.`.

    A single name for several projections means one fused tensor. If its rows are `by_head`, the query, the key and the value of each head
    follow each other. A checkpoint without the tensors `qkv` has `fused`, with their rows one after another, and one without the tensor
    `gate_up` has those of `apart`. Gates of attention are outputs of the projection of queries, or of `gate`.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    fused: str | None = None
    gate: str | None = None
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    apart: tuple[str, ...] = ()
    down: str = "mlp.down_proj"

    def fused_in(self, has: Callable[[str], bool], prefix: str) -> str | None:
        """The name of the fused tensor of a layer with this prefix, if the checkpoint has it and not those of `qkv`."""
        # Random weights have tensors of all names.
        lacks = self.fused is not None and not has(f"{prefix}{self.qkv[0]}.weight")
        return self.fused if lacks and has(f"{prefix}{self.fused}.weight") else None


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of norms in a checkpoint: the last one, and those of a layer, below `model.layers.N.`.

    `after_attention` and `after_mlp` are those of models with norms after blocks. Without `attention` or `mlp`, that block reads the
    residual stream itself. `parallel` is that of the MLP in parallel models; without it the MLP reads what attention reads.
    """

    attention: str | None = "input_layernorm"
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    mlp: str | None = "post_attention_layernorm"
    last: str = "model.norm"
    after_attention: str = "post_attention_layernorm"
    after_mlp: str = "post_feedforward_layernorm"
    parallel: str | None = None


NORMS_AFTER = Norms(attention=None, mlp=None)
"""Those of models with norms after blocks alone."""
GEMMA_NORMS = Norms(mlp="pre_feedforward_layernorm")
"""Those of Gemma 2 and later, which has a norm after attention under Llama's name of the norm before the MLP."""


class RecurrentKind(Enum):
    """What a recurrent layer computes."""

    CONVOLUTION = "short convolutions"
    DELTA = "gated delta rules"
    SPACE = "state spaces"


Entry = tuple[str, int | None]
"""A key of config.json and its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The recurrent layers of an architecture: those that `layer_types` calls by one of `types`.

    `projections` are the first linear layers, `output` the last one, and `convolution` the weights [channels, 1, taps], all below `prefix`.
    The keys of config.json are those of the number of `taps`, of heads (`count`), of their `groups`, which share keys and queries, of the
    sizes of keys and values, and of whether the convolution and the linear layers have a bias. Every n-th layer is not recurrent if
    config.json does not list kinds of layers and n is the `interval`.
    """

    kind: RecurrentKind
    types: tuple[str, ...]
    prefix: str
    projections: tuple[str, ...] = ("in_proj",)
    convolution: str = "conv1d"
    output: str = "out_proj"
    taps: Entry = ("conv_kernel", 4)
    count: Entry | None = None
    groups: Entry | None = None
    key_size: Entry | None = None
    value_size: Entry | None = None
    conv_bias: tuple[str, bool] | None = None
    bias: tuple[str, bool] | None = None
    interval: Entry | None = None


class Scores(Enum):
    """What makes scores of a router's logits, as the CPU kernels name it."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    LOGITS = "logits"
    """The logits; weights are the softmax of those of the chosen experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How the experts of an architecture are chosen and named.

    Names are those below `model.layers.N.`, with `{}` for the number of an expert. A tensor whose name lacks `.{}` has the matrices of all
    experts. A checkpoint has either `gate` and `up` (`gate` is None for experts without one), or `gate_up` with the rows of both, or `both`
    and `transposed`: tensors [experts, inputs, outputs], the first with gate and up, in turn if `alternating`; as transformers 5 saves
    them, tensors of these names may have the shapes of the others. With `biases` the router and all experts have them. `shared` are the
    layers of an expert that all tokens use; its output is multiplied by a gate if `shared_gate` names one. `count`, `used`, `inner` and
    `shared_inner` are the keys of the number of experts, of those of a token, and of inner sizes in config.json. With a `shared_count`, the
    key and the default of a number of experts, the shared one is as wide as that number of others. Weights are divided by their sum if
    `normalised`, or if the key of config.json says so, whose default is given. `epsilon` is added to the sum. `choice_bias` is a tensor
    that is added to the scores when experts are chosen, `scale` the key and the default of the weights' factor, and `dense` those of the
    number of first layers without experts. Models have 0 experts if they are `optional`, and none where the key `switch` is not set. The
    gate and what it is multiplied by are `clamped` as in gpt-oss. With `own_norms`, as in Gemma 4, the router, the experts and the MLP
    beside them have norms of their own, and each expert has a scale. `groups` are the defaults of the number of groups of experts and of
    those that a token may use: those whose `best` experts have the largest sum of scores. Without `best` there is one group.
    """

    router: str = "mlp.gate"
    gate: str | None = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    gate_up: str = "mlp.experts.{}.gate_up_proj"
    down: str = "mlp.experts.{}.down_proj"
    both: str | None = None
    alternating: bool = False
    transposed: str | None = None
    biases: bool = False
    shared: Projections | None = None
    shared_gate: str | None = None
    choice_bias: str | None = None
    epsilon: float = 1e-20
    scale: tuple[str, float] | None = None
    dense: Entry | None = None
    optional: bool = False
    count: str = "num_experts"
    used: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    shared_inner: str = "shared_expert_intermediate_size"
    shared_count: Entry | None = None
    scores: Scores = Scores.SOFTMAX
    normalised: bool | tuple[str, bool] = ("norm_topk_prob", False)
    clamped: bool = False
    switch: str | None = None
    own_norms: bool = False
    groups: tuple[int, int] = (1, 1)
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A number in a GGUF file's metadata, under the architecture's prefix. `default` applies if the file lacks it.

    Without a default, a file without the key is refused, unless the key is `optional`: then config.json has no entry for it.
    """

    name: str
    kind: type[int] | type[float]
    default: float | None = None
    optional: bool = False


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names of a decoder's tensors outside the layers, in GGUF files and in Hugging Face's."""

POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
"""Names of the norms after a layer's attention and its MLP, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """How GGUF files store an architecture.

    `names` are the values of `general.architecture`. `constants` are entries of config.json, and `keys` are entries whose values are in the
    file's metadata. `unused` keys matter for images alone, or follow from the tensors. `tensors` maps the names of a layer's tensors in
    GGUF files to those below `layer` of Hugging Face's files, where they differ from Llama's, and `top` those outside the layers.
    `adjacent_pairs` means that rows of rotated projections are in llama.cpp's order for adjacent pairs (2i, 2i+1) instead of pairs half a
    head apart. `stored_offset` is the number that was added to the weights of norms. Attention scores of the model with `largest_layers`
    layers are divided by the square root of hidden size / heads; its files do not say so, nor whether `truncates_yarn`.
    """

    names: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layer: str = "model.layers.{}."
    adjacent_pairs: bool = False
    stored_offset: float = 0.0
    largest_layers: int | None = None
    truncates_yarn: bool = True


PLAIN = {"relu": "relu", "relu2": "relu2", "gelu": "gelu"} | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_new")
"""Activations of MLPs without a gate, by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture: the defaults where a config.json is silent, and its differences from Llama.

    `name` is the class name in `architectures` of config.json, `aliases` are names of classes that compute the same, and `models` names
    published models. `text_types` are the values of `model_type` in the `text_config` of the classes `wrappers`, which also read images, or
    beside it in their older configurations, which has the `defaults` where it is silent. `model_type` is that of a model of text alone.
    `entries` are the usual names of entries of config.json by those that this architecture has for them, and `ignored` are usual names that
    mean nothing in its config.json. Embeddings are multiplied by the square root of the hidden size if they are `scaled_embeddings`, or if
    that key of config.json says so. The default of `query_scalar` is the square of what divides attention scores; None means the size of a
    head. `softcaps` are the defaults of the caps of attention scores and logits, and `logit_scale` that of the logits' factor; None means
    that config.json's are not read. `rotary` is the default part of each head that is rotated; None means that whole heads always are. In a
    model of `adjacent_pairs` numbers 2i and 2i + 1 of a head are rotated together instead of numbers half the rotated part apart.
    `positions` is the name of a table of embeddings of positions, which are added to those of tokens instead of any rotation, and
    `unused_positions` the number of its first rows without a position. In a model of `window_rotary` only layers with a window have rotary
    positions, unless there are no windows. Layers with a window have rotary positions of the base `local_theta` if it is set. A dynamic
    scaling with the entry `alpha` multiplies the base by a power of it. `position_type` is the default of `position_embedding_type`; None
    means that config.json's is not read. With a `temperature` queries grow with their position. Every n-th layer has no rotary positions if
    `no_rope_interval` is n, and every n-th has full attention if `window_interval` is n and windows are listed. `biases` is the key of
    whether all linear layers have biases, and its default, and `qkv_bias` that of whether queries, keys and values alone do; `mlp_bias` is
    the default of whether MLPs do, and None if they never do. With a `head_bias` the head has one. `inner` is the key of the MLP's inner
    size, and `norm_eps` that of the number that norms add to squares. `norm_offset` is added to the weights of all norms, and `post_norms`
    adds a norm after attention and after the MLP. With `qk_norm` queries and keys have norms, if config.json does not say otherwise, or
    with a key and a default if it says so; layer norms have weights of each head. With `whole_norms` the norms of queries and keys are
    those of all heads together; with `rotated_first` queries and keys are rotated before their norms. Norms are `centred` if they shift
    numbers to mean 0 first, and may then lack `norm_biases`. The MLP of a `parallel` model reads the residual stream that attention reads;
    with a key and a default config.json says whether it does. With `sinks` each head has a score beside those of the keys.
    `global_head_dim` is the default size of heads of layers with full attention, and means that layers differ as in Gemma 4. With
    `gated_attention` sigmoids of gates multiply the outputs; the query projection has them too, head by head, or they have one of their
    own. With a `recurrence` some layers keep a state instead of keys and values. A layer of a `single` model is one of attention, a
    recurrent layer, an MLP and experts, as `layers_block_type` or `hybrid_override_pattern` says. In a `latent` model keys and values are
    made of a latent vector. The `activation` is silu or gelu_tanh, or one of PLAIN for MLPs without a gate, where config.json is silent.
    With a `mixture` layers have experts, instead of an MLP or beside it, except those that config.json names.
    """

    name: str
    model_type: str
    models: str
    aliases: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    text_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    code: Code = Code.RUST_AND_TORCH
    gguf: GGUFFormat | None = None

    vocab_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    norm_eps: str = "rms_norm_eps"
    rms_norm_eps: float = 1e-6
    tied: bool = False
    inner: str = "intermediate_size"

    projections: Projections = Projections()
    norms: Norms = Norms()
    biases: tuple[str, bool] | None = None
    head_bias: bool = False
    qkv_bias: tuple[str, bool] | None = None
    output_bias: bool = True
    mlp_bias: bool | None = None

    theta: float = 10000.0
    local_theta: float | None = None
    alpha: bool = False
    rotary: float | None = None
    adjacent_pairs: bool = False
    window_rotary: bool = False
    no_rope_interval: int | None = None
    position_type: str | None = None
    positions: str | None = None
    unused_positions: int = 0
    temperature: bool = False

    windows: Windows = Windows.NONE
    sliding_window: int | None = None
    window_interval: int | None = None

    qk_norm: bool | tuple[str, bool] = False
    whole_norms: bool = False
    rotated_first: bool = False
    centred: bool = False
    norm_biases: bool = True
    parallel: bool | tuple[str, bool] = False
    sinks: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: str = "silu"
    query_scalar: float | None = None
    softcaps: tuple[float | None, float | None] | None = None
    scaled_embeddings: bool | tuple[str, bool] = False
    multipliers: bool = False
    logit_scale: float | None = None
    global_head_dim: int | None = None
    gated_attention: bool = False
    single: bool = False
    latent: bool = False
    recurrence: Recurrence | None = None
    mixture: Mixture | None = None

    @property
    def gated_queries(self) -> bool:
        """Whether the projection of queries has the gates of attention too."""
        return self.gated_attention and self.projections.gate is None

    @property
    def gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.activation not in PLAIN

    @property
    def activations(self) -> Mapping[str, tuple[str, ...]]:
        """The entries of config.json that name the activation, and their names of the one that the architecture has."""
        if self.activation == "silu":
            return {"hidden_act": ("silu", "swish")}
        if not self.gated:
            return {"mlp_hidden_act" if self.single else "hidden_act": tuple(PLAIN)}
        # Gemma 1's published files say gelu, and mean its approximation.
        first = {"hidden_act": ("gelu_pytorch_tanh", "gelu")} if self.model_type == "gemma" else {}
        return {**first, "hidden_activation": ("gelu_pytorch_tanh",)}
