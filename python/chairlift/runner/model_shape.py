"""Reads a checkpoint's configuration, and corrects what its weights contradict."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from chairlift.checkpoint.safetensors_file import as_array, as_float32, tensor_files
from chairlift.checkpoint.weight_files import gguf_link
from chairlift.errors import ChairliftError
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.shape import ModelShape
from chairlift.runner.weights import decoder_prefix, stored_name

log = logging.getLogger("chairlift")


def model_shape(directory: Path, *, in_torch: bool, load_format: str) -> ModelShape:
    """Reads config.json as `load_shape` does. Embeddings are not tied if the weights have an output matrix of their own.

    Some checkpoints were trained with separate matrices, and their config.json still says `tie_word_embeddings`.
    """
    model = load_shape(directory, in_torch=in_torch)
    if not isinstance(model, ModelConfig) or model.headless or not model.tie_word_embeddings or load_format != "auto":
        return model
    if _has_own_head(directory):
        log.warning("%s: lm_head.weight differs from the embeddings and is used, though config.json says tie_word_embeddings", directory)
        return replace(model, tie_word_embeddings=False)
    return model


def _has_own_head(directory: Path) -> bool:
    if gguf_link(directory) is not None:
        return False  # the configuration was made from the file's tensors
    try:
        found = tensor_files(directory)
    except ChairliftError:
        return False  # reported when the weights are opened
    names = [stored_name(name, decoder_prefix(found)) for name in ("lm_head.weight", "model.embed_tokens.weight")]
    if not found.keys() >= set(names):
        return False
    head, embedding = (as_array(found[name], name) for name in names)
    return head.shape != embedding.shape or not np.array_equal(as_float32(head), as_float32(embedding))
