"""Reads the matrices with which attention to latents makes keys and values."""

from __future__ import annotations

from chairlift.models.latent import Latent
from chairlift.runner.quantised_matrix import QuantisedMatrix, multiply_out
from chairlift.runner.weights import Part, Weights, in_memory, split_rows


def keys_and_values(weights: Weights, latent: Latent, prefix: str) -> tuple[list[Part], list[Part]]:
    """Returns for each head the transposed matrix of its keys, and the matrix of its values.

    GGUF files have them so. Safetensors, and old GGUF files, have one tensor with the keys and the values of each head in turn. Raises
    UnsupportedModel as `Weights.part` does.
    """
    heads, rank, plain, value = latent.heads, latent.rank, latent.plain, latent.value
    if weights.has(f"{prefix}k_b_proj.weight"):
        keys = split_rows(weights.part(f"{prefix}k_b_proj.weight", heads, rank, plain), heads, plain)
        return keys, split_rows(weights.part(f"{prefix}v_b_proj.weight", heads, value, rank), heads, rank)
    found = weights.matrix(f"{prefix}kv_b_proj", heads * (plain + value), rank)
    both = (multiply_out(found) if isinstance(found, QuantisedMatrix) else found).reshape(heads, plain + value, rank)
    return [in_memory(head[:plain].T) for head in both], [in_memory(head[plain:]) for head in both]
