"""Runs steps of a loaded model: forward pass, sampling and log-probabilities. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from chairlift import _core
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Pairs, PendingResult, Sampled, StepBuffers, StepSizes
from chairlift.runner.executor import Logits, ModelExecutor
from chairlift.runner.interface import NewSequence, Runner
from chairlift.runner.memory.sizing import Size
from chairlift.runner.sampling.logprobs import CHUNK_LOGITS, PromptLogprobs, packed
from chairlift.runner.sampling.matcher import Masks
from chairlift.runner.sampling.sampler import PendingSample, Sampler, TokenSampler

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph


@dataclass(slots=True)
class Launched:
    """A step in flight, from `ModelRunner.launch` to `ModelRunner.collect`."""

    buffer_index: int
    logits: Logits
    """The logits of the positions to be sampled, which `sample` may overwrite."""
    scored_prompts: list[tuple[PromptLogprobs, int]]
    """Prompts whose log-probabilities the step computes, each with the number of tokens."""
    prompt_lines: list[PendingResult]
    """The lines of `logprobs.score` for these tokens, in chunks."""
    graph: Graph | None = None
    """The captured graph that runs the step, if any."""
    embedded: Sequence[int] = ()
    """The samples whose requests want an embedding, in place of a token."""
    embeddings: np.ndarray | None = None
    """Their embeddings."""
    masks: Masks | None = None
    """The masks of its grammars, if they were computed beside the forward pass."""
    sample: PendingSample | None = None


class ModelRunner(Runner):
    """The runner of a loaded model, on the host; `TorchRunner` is that of a model in torch. `build.build_runner` makes them."""

    has_logprobs = True
    compiles_kernels = False
    """Whether the first use of a sampling feature takes long."""

    def __init__(
        self,
        model: ModelExecutor,
        model_config: ModelShape,
        size: Size,
        block_size: int,
        buffers: list[StepBuffers],
        tokens: TokenSampler,
        pooling: str | None = None,
    ) -> None:
        """The model's KV cache must be allocated before the first step. `pooling` is last if the model has `states`, else None."""
        self.model, self.model_config, self.batch_invariant = model, model_config, model.batch_invariant
        self.block_size, self.num_kv_blocks, self.max_model_len = block_size, size.num_blocks, size.max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = size.max_num_seqs, size.max_num_batched_tokens
        self.buffers, self.sampler = buffers, Sampler(self.max_num_seqs, tokens)
        self.pooling, self.adapters = pooling, model.adapters
        self._prompts: dict[int, PromptLogprobs] = {}
        self._embedded: set[int] = set()  # slots of requests for an embedding

    @property
    def progress(self) -> int:
        """The model's progress (see `Runner.progress`)."""
        return self.model.progress

    @property
    def kv_blocks(self) -> _core.KvCache | None:
        """The KV cache, if its blocks can be read and written."""
        return self.model.kv_blocks

    @property
    def state_storage(self) -> _core.StateCache | None:
        """The recurrent states, if they can be read and written."""
        return self.model.state_storage

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a batch slot to a sequence (see `Runner.add_request`)."""
        if self.adapters is not None:
            self.adapters.assign(slot, sequence.adapter)
        self._prompts.pop(slot, None)
        if (prompt := sequence.prompt) is not None and not prompt.complete:
            self._prompts[slot] = prompt
        self._embedded.discard(slot)
        if sequence.params.embed:
            self._embedded.add(slot)
        self.sampler.add_request(slot, sequence)

    def remove_request(self, slot: int) -> None:
        """Frees a batch slot."""
        self._prompts.pop(slot, None)
        if self.adapters is not None:
            self.adapters.assign(slot, 0)
        self.sampler.remove_request(slot)

    def forced_tokens(self) -> Sequence[tuple[int, Sequence[int]]]:
        """The slots whose grammar leaves no choice (see `Runner.forced_tokens`)."""
        return self.sampler.forced_tokens()

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block), then back (host block, device block)."""
        self.model.swap(outs, ins)

    def launch(self, buffer_index: int, sizes: StepSizes) -> Launched:
        """Starts the copies and the forward pass of the step in `buffers[buffer_index]` (see `Runner.launch`)."""
        buffers = self.buffers[buffer_index]
        if sizes.copies:
            self.model.copy(buffers.copies[: 2 * sizes.copies].reshape(-1, 2))
        if sizes.state_copies:
            self.model.copy_states(buffers.state_copies[: 2 * sizes.state_copies].reshape(-1, 2))
        buffers.num_state_saves = sizes.state_saves
        if self.overlaps:  # the tokens before the masks are not known yet, and the device does not wait for this thread
            return self._forward(buffers, sizes)
        slots, forward = buffers.sample_slots[: sizes.samples], partial(self._forward, buffers, sizes)
        step, step_masks = self.sampler.beside_masks(forward, slots, buffers, self.model_config.vocab_size)
        step.masks = step_masks
        return step

    def sample(self, step: Launched) -> None:
        """Starts sampling a launched step (see `Runner.sample`)."""
        step.sample = self.sampler.draw(step.logits, self.buffers[step.buffer_index], step.graph, step.masks)

    def collect(self, step: Launched) -> Sampled:
        """Waits for the oldest step in flight and returns its tokens."""
        assert step.sample is not None
        tokens, logprobs, details, refusals = self.sampler.take(step.sample)
        if step.embeddings is not None:
            for at, embedding in zip(step.embedded, step.embeddings, strict=True):
                tokens[at] = _core.NO_TOKEN if np.isfinite(embedding).all() else -1
                details[at] = embedding.tobytes()
        return Sampled(tokens, logprobs, details, _prompt_lines(step) if step.scored_prompts else [], refusals)

    def run(self, num_tokens: int, num_seqs: int, num_samples: int, num_copies: int = 0) -> Sampled:
        """Runs the step in the first buffers to its end. No other step may be in flight."""
        step = self.launch(0, StepSizes(num_tokens, num_seqs, num_samples, num_copies))
        self.sample(step)
        return self.collect(step)

    def wait(self) -> None:
        """Waits until all queued work is done. Steps in flight are discarded."""
        self.model.synchronize()

    def close(self) -> None:
        """Ends the processes that compute parts of the model."""
        self.sampler.close()
        self.model.close()

    def _forward(self, buffers: StepBuffers, sizes: StepSizes) -> Launched:
        self.model.forward(buffers, sizes.tokens, sizes.seqs)
        scored = self._score_prompts(buffers, sizes.seqs)
        at, slots = buffers.sample_at[: sizes.samples], buffers.sample_slots[: sizes.samples]
        step = Launched(buffers.index, self._logits(at), *scored)
        if self._embedded:
            step.embedded = [i for i, slot in enumerate(slots.tolist()) if slot in self._embedded]
            step.embeddings = self.model.states(at[step.embedded])
        return step

    def _logits(self, at: np.ndarray) -> Logits:
        """Logits of the last step at token positions `at`, where the sampler wants them."""
        return self.model.logits(at)

    def _score_prompts(self, buffers: StepBuffers, num_seqs: int) -> tuple[list[tuple[PromptLogprobs, int]], list[PendingResult]]:
        """Starts computing the log-probabilities of the prompt tokens in this step, for requests that want them."""
        if not self._prompts:
            return [], []
        starts, slots = buffers.query_starts[: num_seqs + 1].tolist(), buffers.batch_slots[:num_seqs].tolist()
        chunks = [(int(buffers.positions[starts[i]]), i, self._prompts[slot]) for i, slot in enumerate(slots) if slot in self._prompts]
        scored, at, tokens = [], [], []
        # Two sequences of one request may compute adjacent chunks of its prompt.
        for first, i, prompt in sorted(chunks, key=lambda chunk: chunk[0]):
            positions = prompt.take(first, first + starts[i + 1] - starts[i])
            scored.append((prompt, len(positions)))
            at += [starts[i] + position - first for position in positions]
            tokens.append(prompt.tokens[positions.start + 1 : positions.stop + 1])
        if not at:
            return [], []
        count, size = max(prompt.count for prompt, _ in scored), max(1, CHUNK_LOGITS // self.model_config.vocab_size)
        places, targets = np.array(at, dtype=np.int32), np.concatenate(tokens)
        parts = [slice(start, start + size) for start in range(0, len(at), size)]
        self._prompts = {slot: prompt for slot, prompt in self._prompts.items() if not prompt.complete}
        return scored, [self.sampler.tokens.score(self._logits(places[part]), targets[part], count) for part in parts]


def _prompt_lines(step: Launched) -> list[tuple[int, bytes]]:
    """The log-probabilities of a step's prompts: tags and lines of `logprobs.score`."""
    lines = np.concatenate([part.numpy() for part in step.prompt_lines])
    ends = np.cumsum([length for _, length in step.scored_prompts]).tolist()
    return [
        (prompt.tag, packed(lines[end - length : end], prompt.count))
        for (prompt, length), end in zip(step.scored_prompts, ends, strict=True)
        if length
    ]
