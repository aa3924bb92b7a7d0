"""Reads LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import math
from pathlib import Path

from chairlift.architectures import GGUF, GGUF_MIXTURES
from chairlift.checkpoint.gguf import hf_name, open_gguf, read_float32
from chairlift.checkpoint.safetensors_file import Array, TensorEntry

_ENDS = {"lora_a": "lora_A", "lora_b": "lora_B"}
_KNOWN = ("adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix")


class GGUFAdapter:
    """The matrices of an adapter under peft's names, dequantised to fp32."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ValueError if the file is no adapter or asks for more than LoRA, UnsupportedModel if it is damaged."""
        self._file = open_gguf(path, vocabulary=False)
        kind = self._file.get("general.architecture", str) or ""
        if (self._file.get("general.type", str), self._file.get("adapter.type", str)) != ("adapter", "lora"):
            raise ValueError("it is a GGUF file, but not of a LoRA adapter")
        if unknown := [key for key in self._file.keys("adapter.") if key not in _KNOWN]:
            raise ValueError(f"its metadata has {unknown[0]:.80}, which is not known here and may change answers")
        architecture = next(iter(GGUF_MIXTURES.get(kind, ())), None) or GGUF.get(kind)
        if architecture is None or architecture.gguf is None:
            raise ValueError(f"it was made for a model of architecture {kind!r:.80}, which cannot be read")
        self.alpha = self._file.get("adapter.lora.alpha", float) or 0.0
        if not math.isfinite(self.alpha):
            raise ValueError(f"adapter.lora.alpha is {self.alpha}")
        self.alternates = architecture.gguf.adjacent_pairs
        """Whether the halves of rotary rows alternate in B of q_proj and k_proj."""
        self.tensors: dict[str, TensorEntry] = {}
        self._names: dict[str, str] = {}
        for entry in self._file.tensors.values():
            stem, _, end = entry.name.rpartition(".")
            found = hf_name(stem, architecture.gguf)
            # The names of what has no update are left as they are, and refused by the reader of all adapters.
            name = f"{found.removesuffix('.weight')}.{_ENDS[end]}.weight" if found and end in _ENDS else entry.name
            self.tensors[name], self._names[name] = TensorEntry("F32", entry.shape, entry.start, entry.size), entry.name

    def of(self, _layer: str, rank: int) -> tuple[int, float]:
        """Returns the rank of a layer's matrices, and the factor of their product. As in llama.cpp it is 1 for files without an alpha."""
        return rank, self.alpha / rank if self.alpha else 1.0

    def data(self, name: str) -> Array:
        """Returns the bytes of a matrix in fp32."""
        return read_float32(self._file, self._file.tensors[self._names[name]]).reshape(-1).view("u1")
