"""Runs encoders of the BERT family on a CPU with the Rust kernels. Without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chairlift import _core
from chairlift.checkpoint.safetensors_file import as_float32
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, UnsupportedModel
from chairlift.models.encoder import EncoderConfig, longest_text
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Layout, Pairs, Sampled, StepBuffers, StepSizes
from chairlift.runner.build import choose_threads
from chairlift.runner.interface import AdapterStore, BlockStorage
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.machine import available_memory
from chairlift.runner.memory.precision import decide
from chairlift.runner.weights import Weights, open_weights
from chairlift.sampling import SamplingParams

CHECKPOINT = "the checkpoint's configuration for sentence-transformers, or the usual value"


class EncoderRunner:
    """A `Runner` that computes embeddings of texts instead of tokens.

    A text is computed whole in the step that has its last token, so keys and values are not kept: the KV blocks exist only as numbers.
    """

    batch_invariant = True
    overlaps = False
    has_logprobs = False
    generates = False
    adapters: AdapterStore | None = None
    kv_blocks: BlockStorage | None = None
    host_blocks = 0
    kv_cache_bytes = 0
    swap_ns_per_block = 0

    def __init__(self, config: EngineConfig, directory: Path, model: EncoderConfig, on_phase: Callable[[str, float], None]) -> None:
        """Loads the model. Raises ModelNotFound, UnsupportedModel, or InvalidSetting for settings that do not suit an encoder."""
        began = time.perf_counter()
        self.model_config: ModelShape = model
        self.pooling: str | None = model.pooling
        config = config.for_positions(model.max_position_embeddings)
        self.longest = _longest(config, directory, model)
        threads = choose_threads(config.threads, 1)
        precision = decide(config, model, available_memory())
        device = "encoders are computed by the CPU kernels" if config.device == "auto" else asked("--device")
        self.decisions: tuple[Decision, ...] = (
            Decision("code", f"{model.architecture}, in Rust", "the CPU kernels support it"),
            Decision("device", "cpu", device),
            threads,
            precision.decisions[0],
            Decision("text length", f"{self.longest} tokens", asked("--max-model-len") if config.max_model_len else CHECKPOINT),
            Decision("pooling", model.pooling, CHECKPOINT),
        )
        dtype = "int8" if precision.quantization == "int8" else precision.weights
        self._encoder = _build(config, model, open_weights(config, directory), dtype, int(threads.value))
        on_phase("weights", time.perf_counter() - began)
        # A sequence has one token more than its text.
        self.max_model_len = self.longest + 1
        self.max_num_seqs, self.max_num_batched_tokens = config.slots, config.step_tokens
        blocks = -(-self.max_model_len // config.block_size)
        # Twice those of all sequences, so that no watermark limits them.
        self.num_kv_blocks = 1 + 2 * config.slots * blocks
        self.buffers = [StepBuffers(Layout(config.step_tokens, config.slots, blocks))]
        self._texts: list[np.ndarray] = [np.zeros(0, dtype=np.int32)] * config.slots

    @classmethod
    def find(cls, config: EngineConfig, directory: Path, on_phase: Callable[[str, float], None]) -> EncoderRunner | None:
        """Makes the runner of a checkpoint; None if it is no encoder. Raises what the constructor raises."""
        model = EncoderConfig.find(directory)
        return None if model is None else cls(config, directory, model, on_phase)

    def add_request(self, slot: int, params: SamplingParams, tokens: np.ndarray, prompt_len: int, seed: int, **rest: object) -> None:
        """Assigns a batch slot to a text."""
        self._texts[slot] = tokens[:prompt_len]

    def remove_request(self, slot: int) -> None:
        """Does nothing: the slot's next text replaces this one."""

    def forced_tokens(self) -> list[tuple[int, list[int]]]:
        """None: there are no grammars."""
        return []

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Does nothing: there are no host blocks."""

    def launch(self, buffer_index: int, sizes: StepSizes) -> np.ndarray:
        """Computes the embeddings of the texts that end in this step: float32 [texts, hidden size], NaN where a weight overflows."""
        slots = self.buffers[buffer_index].sample_slots[: sizes.samples].tolist()
        texts = [self._texts[slot] for slot in slots]
        out = np.empty((len(texts), self.model_config.hidden_size), dtype=np.float32)
        if texts:
            starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
            self._encoder.embed(np.concatenate(texts), starts, out)
        return out

    def sample(self, step: np.ndarray) -> None:
        """Does nothing: `launch` has computed the embeddings."""

    def collect(self, step: np.ndarray) -> Sampled:
        """Returns the embeddings that `launch` computed."""
        tokens = np.where(np.isfinite(step).all(axis=1), _core.NO_TOKEN, -1).astype(np.int32)
        return Sampled(tokens, np.zeros(0, dtype=np.float32), {at: row.tobytes() for at, row in enumerate(step)}, [], {})

    def wait(self) -> None:
        """Does nothing: no work is queued."""

    def close(self) -> None:
        """Does nothing."""


def _longest(config: EngineConfig, directory: Path, model: EncoderConfig) -> int:
    """The most tokens of a text. Raises InvalidSetting for settings that do not suit an encoder."""
    if config.device == "cuda" or config.tensor_parallel_size > 1 or config.runner == "torch":
        raise InvalidSetting(f"{model.architecture} is computed by the CPU kernels, in one process: use --device cpu and --runner rust")
    longest = config.max_model_len or longest_text(directory, model)
    if longest > model.max_position_embeddings:
        raise InvalidSetting(f"--max-model-len {longest}: the model was made for {model.max_position_embeddings} positions")
    return longest


def _build(config: EngineConfig, model: EncoderConfig, weights: Weights, dtype: str, threads: int) -> _core.Encoder:
    """Loads and packs all weights. Raises UnsupportedModel for weights that do not match the configuration."""
    hidden, inner = model.hidden_size, model.intermediate_size

    def linear(names: list[str], outs: int, ins: int) -> _core.Linear:
        parts = [weights.part(f"{model.prefix}{name}.weight", outs, ins) for name in names]
        bias = np.concatenate([as_float32(weights.take(f"{model.prefix}{name}.bias", outs)) for name in names])
        return _core.Linear(parts, ins, dtype, threads=threads, bias=bias, isa=config.cpu_isa)

    def table(name: str, rows: int) -> np.ndarray:
        return np.ascontiguousarray(as_float32(weights.take(f"{model.prefix}embeddings.{name}.weight", rows, hidden)))

    def norm(name: str) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = (as_float32(weights.take(f"{model.prefix}{name}.LayerNorm.{part}", hidden)) for part in ("weight", "bias"))
        return weight, bias

    def layer(index: int) -> _core.EncoderLayer:
        name = f"encoder.layer.{index}"
        return _core.EncoderLayer(
            qkv_proj=linear([f"{name}.attention.self.{part}" for part in ("query", "key", "value")], hidden, hidden),
            o_proj=linear([f"{name}.attention.output.dense"], hidden, hidden),
            attention_norm=norm(f"{name}.attention.output"),
            up_proj=linear([f"{name}.intermediate.dense"], inner, hidden),
            down_proj=linear([f"{name}.output.dense"], hidden, inner),
            norm=norm(f"{name}.output"),
        )

    # All texts have token type 0.
    types = table("token_type_embeddings", model.num_token_types)[:1]
    try:
        return _core.Encoder(
            [layer(index) for index in range(model.num_layers)],
            tokens=table("word_embeddings", model.vocab_size).reshape(-1),
            positions=(table("position_embeddings", model.num_positions)[model.first_position :] + types).reshape(-1),
            norm=norm("embeddings"),
            num_heads=model.num_heads,
            norm_eps=model.norm_eps,
            pooling=model.pooling,
            threads=threads,
        )
    except ValueError as error:
        raise UnsupportedModel(f"{model.architecture}: {error}") from None
