"""Tiny random encoders, written by transformers, with a tokenizer of letters and the files of sentence-transformers; and as GGUF."""

import json
import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf_files import CONTROL, NORMAL, finish, quantized, sizes_of, writer_of
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

LONGEST = 40
"""The most tokens of a text."""

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
    "architectures": None,
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "use_bidirectional_attention": True, "query_pre_attn_scalar": 16}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {"Gemma3Text": GEMMA, "ModernBert": {"local_attention": 8, "num_hidden_layers": 4}, "DistilBert": {"hidden_dim": 80}}
OTHERS |= {"MPNet": {"pad_token_id": 1}, "Electra": {"embedding_size": 48}}
"""Settings by family."""
DENSE = {"2_Dense": (48, 96), "3_Dense": (96, 32)}
"""Layers after the pooling of embeddinggemma, with smaller sizes."""


def write(
    family: str, directory: Path, pooling: str | None = "mean_tokens", dense: dict[str, tuple[int, int]] | None = None, **shape: Any
) -> torch.nn.Module:
    """Writes a model of a family of transformers to the directory, with a pooling of sentence-transformers, and returns it.

    A family that ends with ForSequenceClassification has one label. `dense` are sizes of layers after the pooling, which Gemma has.
    """
    scores = family.endswith("ForSequenceClassification")
    model_class = getattr(transformers, family if scores else f"{family}Model")
    special = OTHERS.get(family.removesuffix("ForSequenceClassification"), {}) | ({"num_labels": 1} if scores else {})
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SHAPE, **special, **shape})).eval()
    for name, parameter in model.named_parameters():
        # Biases start at zero and norms at one: a mistake with them would go unseen.
        if name.endswith("bias") or "norm" in name.lower():
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.2)
    model.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if family.startswith("Bert") else [])]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **roles}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if pooling is not None and not scores:
        dense = (DENSE if family == "Gemma3Text" else {}) if dense is None else dense
        names = [("", "Transformer"), ("1_Pooling", "Pooling"), *((path, "Dense") for path in dense), ("4_Normalize", "Normalize")]
        modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False})
        )
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
        model.dense = [_write_dense(directory / path, *sizes) for path, sizes in dense.items()]
    return model


def _write_dense(directory: Path, ins: int, outs: int) -> torch.Tensor:
    """Writes a layer of sentence-transformers without a bias and an activation; returns its weight."""
    weight = torch.randn(outs, ins) * 0.2
    directory.mkdir()
    save_file({"linear.weight": weight}, directory / "model.safetensors")
    settings = {"in_features": ins, "out_features": outs, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    (directory / "config.json").write_text(json.dumps(settings))
    return weight


def embed(model: torch.nn.Module, tokens: list[int], pooling: str = "mean") -> torch.Tensor:
    """The embedding that transformers computes, scaled to length 1."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
    for weight in getattr(model, "dense", []):
        pooled = weight @ pooled
    return pooled / pooled.norm()


def score(oracle: torch.nn.Module, query: str, document: str) -> float:
    """The score of a pair of texts that transformers computes."""
    encoding = tokenizer().encode(query, document)
    types = {"token_type_ids": torch.tensor([encoding.type_ids])} if getattr(oracle.config, "type_vocab_size", 1) > 1 else {}
    with torch.no_grad():
        logits = oracle(input_ids=torch.tensor([encoding.ids]), **types).logits
    return torch.sigmoid(logits)[0, 0].item()


def tokenizer() -> Tokenizer:
    """[CLS], the words' letters, [SEP]; a second text has the type 1."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


ARCHITECTURES = {"bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT, "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
MODERN_HEAD = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
ARCHITECTURES |= {"distilbert": gguf.MODEL_ARCH.BERT, "modernbert": gguf.MODEL_ARCH.MODERN_BERT}


def gguf_of(
    model: torch.nn.Module,
    path: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pooling: int | None = 1,
    replaced: dict[str, Any] | None = None,
) -> None:
    """Writes `model` as llama.cpp's converter does; matrices are quantized, `replaced` metadata differ, and None is left out."""
    config = model.config
    architecture = ARCHITECTURES["bert" if "roberta" in config.model_type else config.model_type]
    kind, gemma = gguf.MODEL_ARCH_NAMES[architecture], config.model_type == "gemma3_text"
    first = config.pad_token_id + 1 if "roberta" in config.model_type else 0
    epsilon = "layer_norm_rms_epsilon" if gemma else "layer_norm_epsilon"
    values = {
        **sizes_of(config, kind),
        f"{kind}.context_length": config.max_position_embeddings - first,
        f"{kind}.attention.{epsilon}": next((value for name in EPSILONS if (value := getattr(config, name, None))), 1e-12),
        f"{kind}.pooling_type": pooling,
        **_vocabulary(),
        "tokenizer.ggml.token_type_count": getattr(config, "type_vocab_size", 2),
    }
    if gemma:
        values |= {f"{kind}.attention.head_count_kv": config.num_key_value_heads, f"{kind}.attention.key_length": config.head_dim}
        values[f"{kind}.attention.value_length"] = config.head_dim
        # transformers keeps half of the window.
        values |= {f"{kind}.attention.sliding_window": 2 * (config.sliding_window - 1), f"{kind}.attention.sliding_window_pattern": 2}
        values[f"{kind}.rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
    else:
        values[f"{kind}.attention.causal"] = False
    if kind == "modern-bert":
        values |= {f"{kind}.attention.sliding_window": config.local_attention, f"{kind}.attention.sliding_window_pattern": 3}
        values |= {f"{kind}.rope.freq_base": 160000.0, f"{kind}.rope.freq_base_swa": 10000.0, f"{kind}.rope.scaling.type": "none"}
    if kind == "nomic-bert":
        values[f"{kind}.rope.freq_base"] = config.rope_parameters["rope_theta"]
    writer = writer_of(path, values | (replaced or {}))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weights in _tensors(model, first).items():
        stem, suffix = name.rsplit(".", 1)
        matrix = weights.ndim == 2 and not stem.startswith(("classifier", "embeddings.token_type", "embeddings.position"))
        used = quantization if matrix else gguf.GGMLQuantizationType.F32
        known = MODERN_HEAD.get(stem) if kind == "modern-bert" else None
        writer.add_tensor(
            f"{known or names.get_name(stem) or stem}.{suffix}", quantized(np.ascontiguousarray(weights), used), raw_dtype=used
        )
    finish(writer)


def _tensors(model: torch.nn.Module, first_position: int) -> dict[str, np.ndarray]:
    """The tensors under the names that llama.cpp's converter knows."""
    prefixes, found = ("bert.", "roberta.", "nomic_bert.", "model."), {}
    for name, tensor in model.state_dict().items():
        weights = tensor.numpy()
        name = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
        if name.endswith("position_embeddings.weight"):
            weights = weights[first_position:]
        if model.config.model_type == "gemma3_text":
            weights, name = weights + np.float32(1) if "norm" in name else weights, f"model.{name}"
        if "pooler" not in name:
            found[name] = weights
    for number, weight in enumerate(getattr(model, "dense", []), 2):
        found[f"dense_{number}.weight"] = weight.numpy()
    if model.config.model_type == "nomic_bert":
        for layer in range(model.config.num_hidden_layers):
            parts = [found.pop(f"layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            found[f"encoder.layers.{layer}.attn.Wqkv.weight"] = np.concatenate(parts)
        renamed = {
            "embeddings.LayerNorm": "emb_ln",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12",
        }
        renamed |= {"mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
        for old, new in renamed.items():
            found = {name.replace(old, new): weights for name, weights in found.items()}
        found = {f"encoder.{name}" if name.startswith("layers.") else name: weights for name, weights in found.items()}
    return found


def _vocabulary() -> dict[str, Any]:
    """The tokenizer's pieces in the way of GGUF files: ▁ begins a word."""
    pieces = [piece for piece, _ in sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])]
    texts = [piece if piece[0] == "[" else piece.removeprefix("##") if piece.startswith("##") else f"\u2581{piece}" for piece in pieces]
    padding = [f"[unused{index}]" for index in range(SHAPE["vocab_size"] - len(texts))]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": [*texts, *padding],
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * (len(texts) - 4) + [5] * len(padding),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
