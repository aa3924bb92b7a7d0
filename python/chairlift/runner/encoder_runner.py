"""Runs encoders on a CPU with the Rust kernels. Without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chairlift import _core
from chairlift.checkpoint.weight_files import gguf_link
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.machine import available_memory
from chairlift.models.encoder import EncoderConfig, longest_text, report_prompt
from chairlift.models.entries import report_entries
from chairlift.runner.buffers import Layout, Sampled, StepBuffers, StepSizes
from chairlift.runner.build import choose_threads
from chairlift.runner.cpu_encoder import build_encoder
from chairlift.runner.interface import NewSequence, Runner
from chairlift.runner.long_texts import LongTexts, long_texts_bytes
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.precision import decide
from chairlift.runner.weights import open_weights

CHECKPOINT = "the checkpoint's configuration for sentence-transformers, or the usual value"


class EncoderRunner(Runner):
    """A runner that computes embeddings of texts instead of tokens.

    A text is computed whole in the step that has its last token, so keys and values are not kept: the KV blocks exist only as numbers.
    One with more tokens than a step is computed in parts (see `LongTexts`).
    """

    batch_invariant = True
    generates = False

    def __init__(self, config: EngineConfig, directory: Path, model: EncoderConfig, on_phase: Callable[[str, float], None]) -> None:
        """Loads the model. Raises ModelNotFound, UnsupportedModel, or InvalidSetting for settings that do not suit an encoder."""
        began = time.perf_counter()
        report_prompt(directory)
        report_entries(directory, model)
        self.model_config = model
        self.pooling = model.pooling
        self._one_type = model.num_token_types < 2
        config = config.for_positions(model.max_position_embeddings)
        self.longest = _longest(config, directory, model)
        threads = choose_threads(config.threads, 1)
        weights = open_weights(config, directory, norm=1.0 - model.layout.norm_offset)
        # With matrix tiles activations of 16 bits are no faster.
        byte_products = _core.byte_products(config.cpu_isa) and (
            config.cpu_math != "auto" or _core.bf16_products(config.cpu_isa) != "tiles"
        )
        self.long_texts_bytes = long_texts_bytes(self.longest, config.step_tokens, model.hidden_size)
        available = available_memory() - self.long_texts_bytes
        precision = decide(config, model, available, weights.sizes(), byte_products=byte_products)
        device = "encoders are computed by the CPU kernels" if config.device == "auto" else asked("--device")
        self.decisions = (
            Decision("code", f"{model.architecture}, in Rust", "the CPU kernels support it"),
            Decision("device", "cpu", device),
            threads,
            *precision.decisions[:2],
            Decision("text length", f"{self.longest} tokens", asked("--max-model-len") if config.max_model_len else CHECKPOINT),
            Decision("pooling", model.pooling, CHECKPOINT),
        )
        modules = None if gguf_link(directory) else directory
        self._encoder = build_encoder(model, weights, precision.packed, int(threads.value), config.cpu_isa, self.longest, modules)
        weights.finish(model)
        on_phase("weights", time.perf_counter() - began)
        # A sequence has one token more than its text.
        self.max_model_len = self.longest + 1
        self.max_num_seqs, self.max_num_batched_tokens = config.slots, config.step_tokens
        kv_blocks = -(-self.max_model_len // config.block_size)
        # Twice those of all sequences, so that no watermark limits them.
        self.num_kv_blocks = 1 + 2 * config.slots * kv_blocks
        self.buffers = [StepBuffers(Layout(config.step_tokens, config.slots, kv_blocks))]
        self._texts: list[tuple[np.ndarray, int]] = [(np.zeros(0, dtype=np.int32), 0)] * config.slots
        """The tokens of each slot's text, and the first token of the second text of a pair."""
        self._long = LongTexts(self._encoder, config.step_tokens)

    @property
    def progress(self) -> int:
        """A number that changes while texts are computed."""
        return self._encoder.progress

    @classmethod
    def find(cls, config: EngineConfig, directory: Path, on_phase: Callable[[str, float], None]) -> EncoderRunner | None:
        """Makes the runner of a checkpoint; None if it is no encoder. Raises what the constructor raises."""
        model = EncoderConfig.find(directory)
        return None if model is None else cls(config, directory, model, on_phase)

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a batch slot to a text."""
        self.remove_request(slot)
        prompt_len, second_text = sequence.prompt_len, sequence.params.second_text
        self._texts[slot] = sequence.tokens[:prompt_len], prompt_len if second_text is None else second_text

    def remove_request(self, slot: int) -> None:
        """Forgets what has been computed of a slot's text."""
        self._long.forget(slot)

    def launch(self, buffer_index: int, sizes: StepSizes) -> np.ndarray:
        """Computes the embeddings of the texts that end in this step: float32 [texts, numbers], NaN where a weight overflows."""
        buffers = self.buffers[buffer_index]
        ending = buffers.sample_slots[: sizes.samples].tolist()
        for slot, computed in zip(buffers.batch_slots[: sizes.seqs].tolist(), buffers.context_lens[: sizes.seqs].tolist(), strict=True):
            if slot not in ending:
                self._long.advance(slot, self._texts[slot][0], self._types([self._texts[slot]]), computed)
        out = np.empty((len(ending), self.model_config.embedding_size), dtype=np.float32)
        whole = [at for at, slot in enumerate(ending) if not self._long.finish(slot, out[at : at + 1])]
        if whole:
            out[whole] = self._compute([self._texts[ending[at]] for at in whole])
        return out

    def _compute(self, texts: list[tuple[np.ndarray, int]]) -> np.ndarray:
        """Computes texts whole."""
        out = np.empty((len(texts), self.model_config.embedding_size), dtype=np.float32)
        starts = np.cumsum([0, *(len(tokens) for tokens, _ in texts)], dtype=np.int32)
        self._encoder.embed(np.concatenate([tokens for tokens, _ in texts]), self._types(texts), starts, out)
        return out

    def _types(self, texts: list[tuple[np.ndarray, int]]) -> np.ndarray:
        """Returns the type of each token, 1 in the second text of a pair; empty if the model has one type."""
        if self._one_type:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate([(np.arange(len(tokens)) >= second).astype(np.int32) for tokens, second in texts])

    def collect(self, step: np.ndarray) -> Sampled:
        """Returns the embeddings that `launch` computed."""
        tokens = np.where(np.isfinite(step).all(axis=1), _core.NO_TOKEN, -1).astype(np.int32)
        return Sampled(tokens, np.zeros(0, dtype=np.float32), {at: row.tobytes() for at, row in enumerate(step)}, [], {})


def _longest(config: EngineConfig, directory: Path, model: EncoderConfig) -> int:
    """The most tokens of a text. Raises InvalidSetting for settings that do not suit an encoder."""
    if config.device == "cuda" or config.tensor_parallel_size > 1 or config.runner == "torch":
        raise InvalidSetting(f"{model.architecture} is computed by the CPU kernels, in one process: use --device cpu and --runner rust")
    longest = config.max_model_len or longest_text(directory, model)
    if longest > model.max_position_embeddings:
        raise InvalidSetting(f"--max-model-len {longest}: the model was made for {model.max_position_embeddings} positions")
    return longest
