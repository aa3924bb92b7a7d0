"""The encoders that Chairlift's own code computes, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.architectures.architecture import GGUFFormat, Projections
from chairlift.architectures.gemma import TENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The layers of a classifier, by name: the first layer, its activation, and the layer with the labels.

    The first layer has a bias unless `norm` names a layer norm of its output, as in ModernBERT.
    """

    dense: str
    activation: str
    out: str
    norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArchitecture:
    """An encoder: names of its tensors, and its differences from BERT.

    `name` is the class name in `architectures` of config.json, beside its `model_type`, and `models` names published models. `layer` begins
    the names of a layer's tensors, with its index in braces; `qkv`, `up` and the others are names below it. `prefix` begins all names but
    those of the `head`, which scores a pair of texts. Each block normalises its input, its output or the sum with the output, with the
    norms of these names (attention's, then the MLP's); with `bare_first` the first layer's attention does not normalise its input. `rms`
    means root-mean-square norms, and `norm_offset` is added to their weights; layer norms have a bias if `norm_bias`. A `gate` is the
    activation of a gated MLP, whose two projections are `up`, or the halves of one; the gate is the second half with `gate_last`. Linear
    layers have `biases`, those of `up` only with `up_biases`. With `theta` positions are rotary; layers with a window
    use `local_theta`. Every n-th layer has none if `window_interval` is n, counted from `first_counted` on. `offset_positions` numbers
    positions from the padding token's id on. `distances` is a table of what is added to each head's scores by the distance of two tokens.
    `keys` are other names of entries of config.json, and `expected` are the values of entries that there is code for.
    """

    name: str
    model_type: str
    models: str
    gguf: GGUFFormat | None = None
    prefix: str = ""
    head: Head | None = None

    tokens: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str | None = "embeddings.LayerNorm"
    final_norm: str | None = None
    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    input_norms: tuple[str, str] | None = None
    output_norms: tuple[str, str] | None = None
    sum_norms: tuple[str, str] | None = ("attention.output.LayerNorm", "output.LayerNorm")
    qk_norms: tuple[str, str] | None = None
    distances: str | None = None

    biases: bool = True
    up_biases: bool = True
    rms: bool = False
    norm_offset: float = 0.0
    norm_bias: bool = True
    norm_eps: float = 1e-12
    bare_first: bool = False
    gate: str | None = None
    gate_last: bool = False
    theta: float | None = None
    local_theta: float | None = None
    scaled_embeddings: bool = False
    window_interval: int | None = None
    first_counted: int = 1
    offset_positions: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)


def decoder_layout(projections: Projections, *, post_norms: bool, qk_norm: bool, **more: Any) -> EncoderArchitecture:
    """Returns the names of the tensors of a decoder that computes embeddings as an encoder does; `more` are other fields."""
    return EncoderArchitecture(
        tokens="embed_tokens",
        positions=None,
        types=None,
        embedding_norm=None,
        final_norm="norm",
        layer="layers.{}.",
        qkv=projections.qkv,
        output=projections.output,
        up=projections.gate_up,
        down=projections.down,
        input_norms=("input_layernorm", "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm") if post_norms else None,
        sum_norms=None,
        qk_norms=("self_attn.q_norm", "self_attn.k_norm") if qk_norm else None,
        biases=False,
        rms=True,
        **more,
    )


_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
"""Tensors outside the layers in GGUF files. Those of `cls` are a classifier's."""
_BERT_GGUF = GGUFFormat(
    names=("bert",),
    top=_TOP,
    layer="encoder.layer.{}.",
    tensors={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
)
_BERT_HEAD = Head(dense="bert.pooler.dense", activation="tanh", out="classifier")
_ROBERTA_HEAD = Head(dense="classifier.dense", activation="tanh", out="classifier.out_proj")
_ELECTRA_HEAD = replace(_ROBERTA_HEAD, activation="gelu")
_MODERN_HEAD = Head(dense="head.dense", activation="gelu", out="classifier", norm="head.norm")
_BERT_EXPECTED = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
_NOMIC_EXPECTED = {
    "hidden_act": "silu",
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "moe_every_n_layers": 0,
}
_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "max_trained_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}


def _bert(name: str, models: str, prefix: str = "", head: Head | None = None, gguf: GGUFFormat | None = None) -> EncoderArchitecture:
    family = name.removesuffix("Model").removesuffix("ForSequenceClassification")
    model_type = {"XLMRoberta": "xlm-roberta"}.get(family, family.lower())
    return EncoderArchitecture(
        name=name,
        model_type=model_type,
        models=models,
        prefix=prefix,
        head=head,
        gguf=gguf,
        offset_positions=model_type not in ("bert", "electra"),
        expected=_BERT_EXPECTED,
    )


_MODERN_EXPECTED = {"hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False, "norm_bias": False}
_MODERNBERT = EncoderArchitecture(
    name="ModernBertModel",
    model_type="modernbert",
    models="gte-modernbert, modernbert-embed, granite-embedding-r2",
    head=_MODERN_HEAD,
    gguf=GGUFFormat(
        names=("modern-bert",),
        top={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "cls": "head.dense",
            "cls.norm": "head.norm",
            "cls.output": "classifier",
        },
        layer="layers.{}.",
        tensors={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
    ),
    tokens="embeddings.tok_embeddings",
    positions=None,
    types=None,
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    up=("mlp.Wi",),
    down="mlp.Wo",
    input_norms=("attn_norm", "mlp_norm"),
    sum_norms=None,
    biases=False,
    norm_bias=False,
    norm_eps=1e-5,
    bare_first=True,
    gate="gelu",
    theta=160_000.0,
    local_theta=10_000.0,
    window_interval=3,
    first_counted=0,
    keys={
        "layer_norm_eps": "norm_eps",
        "sliding_window": "local_attention",
        "sliding_window_pattern": "global_attn_every_n_layers",
        "rope_theta": "global_rope_theta",
        "rope_local_base_freq": "local_rope_theta",
    },
    expected=_MODERN_EXPECTED,
)
_GTE = EncoderArchitecture(
    name="GteModel",
    model_type="gte",
    models="snowflake-arctic-embed-m-v2.0",
    head=Head(dense="new.pooler.dense", activation="tanh", out="classifier"),
    prefix="new.",
    positions=None,
    qkv=("attention.qkv_proj",),
    output="attention.o_proj",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    sum_norms=("attn_ln", "mlp_ln"),
    up_biases=False,
    gate="gelu",
    gate_last=True,
    theta=160_000.0,
    expected={"hidden_act": "gelu", "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False},
)
_NEW = replace(_GTE, name="NewModel", model_type="new", models="gte-base-en-v1.5, gte-multilingual-base", theta=10_000.0)

ENCODERS = {
    known.name: known
    for known in (
        _bert("BertModel", "all-MiniLM, bge, e5, gte; GGUF files of RoBERTa (bge-m3) and DistilBERT", head=_ROBERTA_HEAD, gguf=_BERT_GGUF),
        _bert("BertForSequenceClassification", "ms-marco-MiniLM", "bert.", _BERT_HEAD),
        _bert("RobertaModel", "all-roberta"),
        _bert("RobertaForSequenceClassification", "stsb-roberta", "roberta.", _ROBERTA_HEAD),
        _bert("XLMRobertaModel", "bge-m3, multilingual-e5"),
        _bert("XLMRobertaForSequenceClassification", "bge-reranker-v2-m3", "roberta.", _ROBERTA_HEAD),
        _bert("CamembertModel", "sentence-camembert"),
        _bert("CamembertForSequenceClassification", "crossencoder-camembert", "roberta.", _ROBERTA_HEAD),
        _bert("ElectraModel", "electra-base"),
        _bert("ElectraForSequenceClassification", "ms-marco-electra-base", "electra.", _ELECTRA_HEAD),
        EncoderArchitecture(
            name="NomicBertModel",
            model_type="nomic_bert",
            models="nomic-embed-text-v1.5",
            gguf=GGUFFormat(
                names=("nomic-bert",),
                top={**_TOP, "token_embd_norm": "emb_ln"},
                layer="encoder.layers.{}.",
                tensors={
                    "attn_qkv": "attn.Wqkv",
                    "attn_output": "attn.out_proj",
                    "attn_output_norm": "norm1",
                    "ffn_up": "mlp.fc11",
                    "ffn_gate": "mlp.fc12",
                    "ffn_down": "mlp.fc2",
                    "layer_output_norm": "norm2",
                },
            ),
            positions=None,
            embedding_norm="emb_ln",
            layer="encoder.layers.{}.",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            up=("mlp.fc12", "mlp.fc11"),
            down="mlp.fc2",
            sum_norms=("norm1", "norm2"),
            biases=False,
            gate="silu",
            theta=1000.0,
            keys=_NOMIC_KEYS,
            expected=_NOMIC_EXPECTED,
        ),
        decoder_layout(
            Projections(),
            post_norms=True,
            qk_norm=True,
            name="Gemma3TextModel",
            model_type="gemma3_text",
            models="embeddinggemma",
            gguf=GGUFFormat(
                names=("gemma-embedding",),
                top={"token_embd": "embed_tokens", "output_norm": "norm", "dense_2": "dense.0", "dense_3": "dense.1"},
                layer="layers.{}.",
                tensors=TENSORS,
                stored_offset=1.0,
            ),
            norm_offset=1.0,
            norm_eps=1e-6,
            gate="gelu_tanh",
            theta=1e6,
            local_theta=1e4,
            window_interval=6,
            expected={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "use_bidirectional_attention": True,
                "attn_logit_softcapping": None,
            },
            scaled_embeddings=True,
        ),
        *(_GTE, replace(_GTE, name="GteForSequenceClassification", models="GTE's rerankers, as transformers writes them")),
        *(_NEW, replace(_NEW, name="NewForSequenceClassification", models="gte-multilingual-reranker-base")),
        _MODERNBERT,
        replace(
            _MODERNBERT,
            name="ModernBertForSequenceClassification",
            models="gte-reranker-modernbert, granite-embedding-reranker-r2",
            gguf=None,
            prefix="model.",
            expected=_MODERN_EXPECTED | {"classifier_activation": "gelu", "classifier_bias": False},
        ),
        EncoderArchitecture(
            name="DistilBertModel",
            model_type="distilbert",
            models="msmarco-distilbert, distiluse",
            prefix="distilbert.",
            types=None,
            layer="transformer.layer.{}.",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            output="attention.out_lin",
            up=("ffn.lin1",),
            down="ffn.lin2",
            sum_norms=("sa_layer_norm", "output_layer_norm"),
            keys={
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "intermediate_size": "hidden_dim",
            },
            expected={"activation": "gelu"},
        ),
        EncoderArchitecture(
            name="MPNetModel",
            model_type="mpnet",
            models="all-mpnet, paraphrase-multilingual-mpnet",
            types=None,
            prefix="mpnet.",
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            output="attention.attn.o",
            sum_norms=("attention.LayerNorm", "output.LayerNorm"),
            distances="encoder.relative_attention_bias",
            offset_positions=True,
            expected={"hidden_act": "gelu", "relative_attention_num_buckets": 32},
        ),
    )
}
"""The encoders by their names in config.json."""

ENCODER_GGUF = {name: known for known in ENCODERS.values() if known.gguf for name in known.gguf.names}
"""The encoders by their names in GGUF files."""
