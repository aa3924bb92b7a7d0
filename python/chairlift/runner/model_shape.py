"""Reads a checkpoint's configuration, and corrects what its weights contradict."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from chairlift.checkpoint.safetensors_file import SafetensorsFile, as_array, as_float32, tensor_files
from chairlift.checkpoint.weight_files import gguf_link
from chairlift.errors import ChairliftError
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.shape import ModelShape
from chairlift.runner.tensor_names import TensorNames

log = logging.getLogger("chairlift")


def model_shape(directory: Path, *, in_torch: bool, load_format: str) -> ModelShape:
    """Reads config.json as `load_shape` does. Embeddings are not tied if the weights have an output matrix of their own.

    Some checkpoints were trained with separate matrices, and their config.json still says `tie_word_embeddings`. Others have one matrix,
    under the name of the output matrix.
    """
    model = load_shape(directory, in_torch=in_torch)
    if not isinstance(model, ModelConfig) or not model.tie_word_embeddings or load_format != "auto" or gguf_link(directory) is not None:
        return model  # of a GGUF file, the configuration was made from the tensors
    try:
        found = tensor_files(directory)
    except ChairliftError:
        return model  # reported when the weights are opened
    names = TensorNames.of(found)
    head, embedding = (names.stored(name) for name in ("lm_head.weight", f"{model.embedding}.weight"))
    if head not in found:
        return model
    if embedding not in found:
        return replace(model, embedding="lm_head")
    if model.headless or _equal(found[head], head, found[embedding], embedding):
        return model
    log.warning("%s: lm_head.weight differs from the embeddings and is used, though config.json says tie_word_embeddings", directory)
    return replace(model, tie_word_embeddings=False)


def _equal(file: SafetensorsFile, name: str, other_file: SafetensorsFile, other: str) -> bool:
    """Whether two tensors have the same numbers."""
    one, two = as_array(file, name), as_array(other_file, other)
    return one.shape == two.shape and np.array_equal(as_float32(one), as_float32(two))
