"""Runs a model with transformers' code, except attention, which chairlift computes over a ragged token axis and a paged cache."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from chairlift.errors import UnsupportedModel
from chairlift.layers.attention import Scales, paged_attention, write_kv
from chairlift.models.forward_batch import ForwardBatch, LayerCache, WeightSource
from chairlift.models.transformers_config import ATTENTION, DECODERS, TransformersConfig, brief, settle

PACKAGES = {
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
}
"""Packages that transformers needs to read a checkpoint quantised with each method. transformers reports those of other methods."""
DEQUANTISED = {"compressed-tensors", "fp8"}
"""Methods whose weights are dequantised on reading.

transformers would dequantise them in a forward pass of the whole model, which is not used here, or with kernels downloaded from the
network.
"""


class TransformersModel:
    """Any transformers decoder that delegates its attention (`AttentionInterface`), like the fallbacks of vLLM and SGLang.

    `specs` has the shape of each layer's cache.
    """

    def __init__(self, model: PreTrainedModel, config: TransformersConfig, longest: int) -> None:
        """Wraps `model` for sequences of up to `longest` tokens."""
        self.model, self.config, self.specs, self.longest = model, config, config.kv_specs, longest
        self.scales: Sequence[Scales | None] = [None] * len(self.specs)
        """Scales of each layer's 8-bit keys and values, if it has any."""
        self.text = model.config.get_text_config(decoder=True)
        decoder: Any = model.get_submodule(config.decoder)
        # The decoder runs once per step, the head for any tokens and as often as needed. The head runs as the whole model, which includes
        # all changes to logits, with a decoder that only returns the hidden states it is given.
        self._decode, decoder.forward = decoder.forward, self._repeat
        settle(model, longest)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        config: TransformersConfig,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        source: WeightSource | None,
        norms: bool = True,
    ) -> TransformersModel:
        """Loads the weights of a directory's safetensors files, or takes them from `source`, without `norms` only the matrices.

        Raises UnsupportedModel.
        """
        model = _loaded(config, directory, dtype, device) if source is None else _filled(config, dtype, device, source, norms)
        return cls(model.eval(), config, longest)

    def forward(self, step: ForwardBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a step over each layer's cache. Returns hidden states [T, hidden]."""

        def attend(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]
        ) -> torch.Tensor:
            layer: Any = module.layer_idx
            keys, values = cache[layer]
            # Keys and values are written before attention, which reads this step's keys from the cache.
            scales = self.scales[layer] if keys.dtype == torch.float8_e4m3fn else None
            write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, step.attention, scales=scales)
            return paged_attention(
                query[0].transpose(0, 1),
                keys,
                values,
                step.attention,
                window=self.specs[layer].window,
                scale=how.get("scaling"),
                softcap=how.get("softcap"),
                sinks=how.get("s_aux"),
                scales=scales,
            ).unsqueeze(0)

        self._output = self._run(step.input_ids, step.positions, **{ATTENTION: attend})
        hidden: torch.Tensor = self._output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, vocabulary] at token positions `at` [N] of a step's hidden states."""
        self._output = type(self._output)(last_hidden_state=hidden[at].unsqueeze(0))
        logits: torch.Tensor = self.model(input_ids=at.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def reference(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits [T, vocabulary] of one whole sequence [T], computed with transformers' attention and its own positions."""
        self.model.set_attn_implementation("eager")
        try:
            self._output = self._run(ids, None)
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return self.logits(self._output.last_hidden_state[0], torch.arange(len(ids), device=ids.device))

    @contextlib.contextmanager
    def narrowed(self, window: int) -> Iterator[None]:
        """Sets all sliding windows, chairlift's and transformers', to this size, so that a short sequence exceeds them.

        A window that is wider than the longest sequence is not changed, because no sequence exceeds it.
        """
        wide = getattr(self.text, "sliding_window", None)
        if wide is None or wide >= self.longest:
            yield
            return
        self.text.sliding_window = window
        self.specs = tuple(spec._replace(window=window) if spec.window == wide else spec for spec in self.specs)
        try:
            yield
        finally:
            self.text.sliding_window, self.specs = wide, self.config.kv_specs

    def _run(self, ids: torch.Tensor, positions: torch.Tensor | None, **more: Any) -> Any:
        given = {} if positions is None else {"position_ids": positions.long().unsqueeze(0)}
        return self._decode(input_ids=ids.long().unsqueeze(0), use_cache=False, **given, **more)

    def _repeat(self, *_: Any, **__: Any) -> Any:
        return self._output


def _loaded(config: TransformersConfig, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    theirs = copy.deepcopy(config.theirs)
    if config.quantization:
        _check_quantization(config, config.quantization)
    if config.quantization in DEQUANTISED:
        theirs.quantization_config["dequantize"] = True
    if device.type != "cpu" and not _installed("accelerate"):
        # Without it transformers would load the whole model into the host's memory first.
        raise UnsupportedModel(f"transformers loads {config.architecture} onto a device with accelerate: pip install accelerate")
    try:
        with _without_bars():
            model, found = DECODERS.from_pretrained(
                directory,
                config=theirs,
                dtype=dtype,
                device_map=None if device.type == "cpu" else device,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        what = f"{config.architecture}, quantised with {config.quantization}," if config.quantization else config.architecture
        raise UnsupportedModel(f"{what} cannot be loaded from {directory}: {brief(error)}") from None
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(f"{directory} lacks weights that its config.json asks for: {', '.join(missing[:3])}")
    return model


def _check_quantization(config: TransformersConfig, method: str) -> None:
    """Raises UnsupportedModel for a method that transformers does not know, and if packages that it needs for the method are missing."""
    # transformers would ignore the method and make up the weights.
    if not any(known.startswith(method) for known in AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise UnsupportedModel(f"{config.architecture} is quantised with {method}, which transformers does not know ({config.not_ours})")
    needed = PACKAGES.get(method, ())
    if missing := [name for name in needed if not _installed(name)]:
        raise UnsupportedModel(
            f"{config.architecture} is quantised with {method}, which transformers reads with the help of {' and '.join(needed)}: "
            f"pip install {' '.join(missing)} ({config.not_ours})"
        )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _filled(config: TransformersConfig, dtype: torch.dtype, device: torch.device, source: WeightSource, norms: bool) -> Any:
    with torch.device(device):
        model = DECODERS.from_config(copy.deepcopy(config.theirs), dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False)
    for name, parameter in model.named_parameters():
        # A parameter that is no matrix is a norm or a bias; only the model knows its neutral value.
        if parameter.ndim > 1 or norms:
            parameter.copy_(source.take(name, *parameter.shape))
    for name, buffer in model.named_buffers():
        # Gemma 4 has a factor of the residual stream among them.
        if norms and source.has(name):
            buffer.copy_(source.take(name, *buffer.shape))
    return model


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Disables transformers' progress bars on stderr."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()  # type: ignore[no-untyped-call]
