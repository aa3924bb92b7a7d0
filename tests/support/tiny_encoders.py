"""Tiny random encoders of the BERT family, written by transformers, with a tokenizer of letters and the files of sentence-transformers."""

import json
import string
from pathlib import Path

import torch
import transformers
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


def write(family: str, directory: Path, pooling: str | None = "mean_tokens") -> torch.nn.Module:
    """Writes a model of a family of transformers to the directory, with a pooling of sentence-transformers, and returns it."""
    model_class = getattr(transformers, f"{family}Model")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SHAPE)).eval()
    for name, parameter in model.named_parameters():
        # Biases start at zero and norms at one: a mistake with them would go unseen.
        if name.endswith("bias") or "LayerNorm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("LayerNorm.weight") else 0.0, std=0.2)
    model.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    if pooling is not None:
        names = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False})
        )
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    return model


def embed(model: torch.nn.Module, tokens: list[int], pooling: str = "mean") -> torch.Tensor:
    """The embedding that transformers computes, scaled to length 1."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
    return pooled / pooled.norm()


def tokenizer() -> Tokenizer:
    """[CLS], the words' letters, [SEP]."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return made
