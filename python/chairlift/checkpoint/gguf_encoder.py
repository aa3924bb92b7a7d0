"""Converts the metadata of an encoder's GGUF file to Hugging Face's config.json and sentence-transformers' modules."""

from __future__ import annotations

import logging
from typing import Any

from chairlift.architectures import ENCODER_GGUF, EncoderArchitecture
from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.errors import UnsupportedModel

log = logging.getLogger("chairlift")

POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
"""llama.cpp's numbers of ways to combine the states of a text, and the names in sentence-transformers' configuration."""
Modules = list[tuple[str, dict[str, Any]]]
"""Modules of sentence-transformers, each a type and its configuration."""
_DENSE = ("dense_2", "dense_3")


def encoder_config(file: GGUFFile, architecture: EncoderArchitecture) -> dict[str, Any]:
    """Returns the file's configuration in the format of Hugging Face's config.json."""
    assert architecture.gguf is not None
    kind = architecture.gguf.names[0]
    hidden, heads = file.size(f"{kind}.embedding_length"), file.size(f"{kind}.attention.head_count")
    head_dim = file.size(f"{kind}.attention.key_length", hidden // heads)
    if {file.size(f"{kind}.{key}", head_dim) for key in ("rope.dimension_count", "attention.value_length")} != {head_dim}:
        raise UnsupportedModel(f"{file.path}: rotary or value dimensions that differ from the head's {head_dim} cannot be read")
    vocab_size = file.vocab_size
    if file.get(f"{kind}.attention.causal", bool) and not architecture.rms:
        raise UnsupportedModel(f"{file.path}: {kind}.attention.causal is true, and an encoder's tokens attend to all tokens")
    if experts := file.get(f"{kind}.expert_count", int):
        raise UnsupportedModel(f"{file.path}: {kind}.expert_count is {experts}, and there is no code for encoders with experts")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.size(f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.context_length,
        "vocab_size": vocab_size,
        "dtype": "float32",
    }
    if architecture.types:
        types = file.tensors.get("token_types.weight")  # which DistilBERT lacks
        config["type_vocab_size"] = 0 if types is None else types.shape[0]
    if architecture.rms:
        config["rms_norm_eps"] = file.number(f"{kind}.attention.layer_norm_rms_epsilon")
    else:
        config["layer_norm_eps"] = file.number(f"{kind}.attention.layer_norm_epsilon")
    if architecture.theta:
        config["rope_theta"] = file.number(f"{kind}.rope.freq_base", architecture.theta)
        if file.get(f"{kind}.rope.scaling.type", str) not in (None, "none"):
            raise UnsupportedModel(f"{file.path}: scaled rotary positions of an encoder cannot be read")
    if architecture.window_interval:
        config |= {
            "use_bidirectional_attention": True,
            "sliding_window": file.size(f"{kind}.attention.sliding_window"),
            "rope_local_base_freq": file.number(f"{kind}.rope.freq_base_swa", architecture.local_theta),
            "query_pre_attn_scalar": head_dim,
        }
        pattern = file.value(f"{kind}.attention.sliding_window_pattern")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if near else "full_attention" for near in pattern]
        else:
            config["sliding_window_pattern"] = pattern or architecture.window_interval
    if (labels := file.tensors.get("cls.output.weight")) is not None:
        config["num_labels"] = labels.shape[0]
        if "cls.weight" not in file.tensors:
            log.warning(
                "%s has a classifier without the layer before it, which converters leave out for BERT: its scores may differ from the "
                "original's",
                file.path.name,
            )
    return config


def encoder_modules(file: GGUFFile) -> Modules:
    """Returns the modules of sentence-transformers after the states of a text: the pooling, and the layers after it.

    A file with a classifier's layer needs no key to be one. Raises UnsupportedModel for an encoder whose pooling there is no code for.
    """
    modules: Modules = []
    kind = str(file.get("general.architecture", str))
    number = 4 if "cls.output.weight" in file.tensors else file.get(f"{kind}.pooling_type", int)
    if kind in ENCODER_GGUF and number is not None and number not in POOLINGS:
        hint = ", a state for each token and no embedding of a text" if number == 0 else ""
        known = "1 (mean), 2 (first), 3 (last) and 4 (rank)"
        raise UnsupportedModel(f"{file.path}: {kind}.pooling_type is {number}{hint}; there is code for {known}")
    if number in POOLINGS:
        modules.append(("Pooling", {"pooling_mode": POOLINGS[number]}))
    for name in _DENSE:
        if (entry := file.tensors.get(f"{name}.weight")) is not None:
            if len(entry.shape) != 2:
                raise UnsupportedModel(f"{file.path}: tensor {name}.weight is {list(entry.shape)}, and no matrix")
            outs, ins = entry.shape
            if (file.size(f"{kind}.{name}_feat_in", ins), file.size(f"{kind}.{name}_feat_out", outs)) != (ins, outs):
                raise UnsupportedModel(f"{file.path}: tensor {name}.weight is {[outs, ins]}, and its metadata differ")
            modules.append(("Dense", {"in_features": ins, "out_features": outs, "bias": False, "activation_function": "Identity"}))
    return modules
