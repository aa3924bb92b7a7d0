"""The part of a model that each process of a tensor-parallel group computes. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape


def part_of(model: ModelShape, size: int) -> ModelConfig:
    """The shape of one process's part of a model. Raises InvalidSetting if the model cannot be split into `size` parts."""
    flag = f"--tensor-parallel-size {size}"
    if not isinstance(model, ModelConfig):
        raise InvalidSetting(f"{flag}: transformers' code for {model.architecture} cannot be split, only Chairlift's own models can")
    parts = {
        "latents": model.latent is not None,
        "experts": model.experts is not None,
        "recurrent layers": model.recurrence is not None,
        "norms of all heads together": model.family.whole_norms,
        "norms of each head": model.qk_norm and model.family.centred,
    }
    if whole := " and ".join(name for name, part in parts.items() if part):
        raise InvalidSetting(
            f"{flag}: the {whole} of {model.architecture} cannot be split: leave it out. The model must fit into one device, and "
            "--replicas runs an engine on each"
        )
    split = {"num_heads": "attention heads", "num_kv_heads": "KV heads", "intermediate_size": "inner columns"}
    for name, words in split.items():
        if getattr(model, name) % size:
            raise InvalidSetting(f"{flag}: the model has {getattr(model, name)} {words}, which cannot be split into {size} equal parts")
    projections = model.family.projections
    merged = (projections.qkv, projections.gate_up) if model.gated else (projections.qkv,)
    if fused := [names[0] for names in merged if len(names) == 1]:
        raise InvalidSetting(f"{flag}: the fused projections of {model.architecture}, {fused[0]}, cannot be split")
    part = replace(model, **{name: getattr(model, name) // size for name in split})
    group = model.scheme.group or 2 if model.scheme else 1
    for columns in (part.num_heads * part.head_dim, part.intermediate_size):
        if columns % group:
            raise InvalidSetting(f"{flag}: the checkpoint has a scale for {group} columns each, which do not divide a part's {columns}")
    return part
