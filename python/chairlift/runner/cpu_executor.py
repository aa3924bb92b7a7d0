"""The model on a CPU: kernels, threads and memory of our own, behind `chairlift._core`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, UnsupportedModel
from chairlift.layers.rope import inverse_frequencies
from chairlift.models.config import ModelConfig
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.executor import Pairs
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import DummyWeights, GGUFWeights, SafetensorWeights, open_weights


class CpuExecutor:
    """A `ModelExecutor` that is one call a step, without Python's lock: from token ids to logits."""

    device = torch.device("cpu")
    batch_invariant = True

    cache: _core.KvCache
    """Made by `allocate`."""

    def __init__(self, config: ModelConfig, decoder: _core.Decoder, kv: str) -> None:
        self.config, self.decoder, self.kv = config, decoder, kv
        self._logits = np.empty((1, config.vocab_size), dtype=np.float32)

    @classmethod
    def load(cls, config: EngineConfig, directory: Path, model: ModelConfig, precision: Precision) -> CpuExecutor:
        """Loads and packs the weights of a directory (see `Loader`)."""
        form = "int8" if precision.quantization == "int8" else precision.weights.replace("blocks", "kept")
        weights = open_weights(config, directory, None, cls.device)
        decoder = _decoder(model, weights, form, config.threads or 1)
        weights.finish(model)
        return cls(model, decoder, precision.kv)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes the KV cache."""
        model = self.config
        try:
            self.cache = _core.KvCache(
                layers=model.num_layers,
                blocks=num_blocks,
                kv_heads=model.num_kv_heads,
                block_size=block_size,
                head_dim=model.head_dim,
                form=self.kv,
                host_blocks=host_blocks,
            )
        except MemoryError as error:
            raise InvalidSetting(f"{error}: lower --num-kv-blocks or --swap-space") from None

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self.cache.copy([(source, target) for source, target in pairs.tolist()])

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, and then back."""
        self.cache.swap(list(outs), list(ins))

    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step that the buffers describe."""
        self.decoder.forward(
            self.cache,
            input_ids=buffers.input_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            slot_mapping=buffers.slot_mapping[:num_tokens],
            query_starts=buffers.query_starts[: num_seqs + 1],
            context_lens=buffers.context_lens[:num_seqs],
            batch_slots=buffers.batch_slots[:num_seqs],
            block_tables=buffers.block_tables,
        )

    def logits(self, at: np.ndarray) -> torch.Tensor:
        """What the last step says of the tokens after those at places `at`."""
        if len(self._logits) < len(at):
            self._logits = np.empty((len(at), self.config.vocab_size), dtype=np.float32)
        self.decoder.logits(at.astype(np.int32, copy=False), self._logits)
        return torch.from_numpy(self._logits[: len(at)])

    def synchronize(self) -> None:
        """Nothing runs on its own here."""

    def close(self) -> None:
        """Nothing runs elsewhere."""


def _decoder(model: ModelConfig, weights: SafetensorWeights | GGUFWeights | DummyWeights, form: str, threads: int) -> _core.Decoder:
    """Takes and packs all weights, matrix by matrix."""
    hidden, inner, head_dim = model.hidden_size, model.intermediate_size, model.head_dim
    queries, kv = model.num_heads * head_dim, model.num_kv_heads * head_dim

    def vector(name: str, size: int) -> np.ndarray:
        taken: np.ndarray = weights.take(name, size).float().numpy()
        return taken

    def linear(outs: dict[str, int], ins: int, bias: bool = False, gated: bool = False) -> _core.Linear:
        """One layer for several projections of the same input."""
        parts = [weights.part(f"{name}.weight", size, ins) for name, size in outs.items()]
        biases = np.concatenate([vector(f"{name}.bias", size) for name, size in outs.items()]) if bias else None
        try:
            return _core.Linear(parts, ins, form, threads=threads, bias=biases, gated=gated)
        except ValueError as error:
            raise UnsupportedModel(f"{', '.join(outs)}: {error}") from None

    def blocks(index: int) -> list[_core.DecoderBlock]:
        """One layer's attention and network."""
        attention, mlp, prefix = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp.", f"model.layers.{index}."
        qk_norm = (vector(attention + "q_norm.weight", head_dim), vector(attention + "k_norm.weight", head_dim)) if model.qk_norm else None
        qkv = {attention + "q_proj": queries, attention + "k_proj": kv, attention + "v_proj": kv}
        return [
            _core.DecoderBlock.attention(
                norm=vector(prefix + "input_layernorm.weight", hidden),
                qkv_proj=linear(qkv, hidden, model.qkv_bias),
                o_proj=linear({attention + "o_proj": hidden}, queries, model.output_bias),
                scale=model.attention_scale,
                qk_norm=qk_norm,
                rope=0,
                window=model.windows[index],
            ),
            _core.DecoderBlock.gated_mlp(
                norm=vector(prefix + "post_attention_layernorm.weight", hidden),
                gate_up_proj=linear({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, model.mlp_bias, gated=True),
                down_proj=linear({mlp + "down_proj": hidden}, inner, model.mlp_bias),
                activation=model.activation,
            ),
        ]

    # The largest first: while one is packed it is there twice.
    embedding = linear({"model.embed_tokens": model.vocab_size}, hidden)
    # Tied, the head's matrix is where embeddings are read too.
    head = embedding if model.tie_word_embeddings else linear({"lm_head": model.vocab_size}, hidden)
    return _core.Decoder(
        [block for index in range(model.num_layers) for block in blocks(index)],
        norm=vector("model.norm.weight", hidden),
        head=head,
        embedding=None if model.tie_word_embeddings else embedding,
        hidden_size=hidden,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=model.rms_norm_eps,
        ropes=[(inverse_frequencies(head_dim, **asdict(model.rope)).numpy(), 1.0)],
        threads=threads,
    )
