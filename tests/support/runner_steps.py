"""Drives a ModelRunner by hand: a scheduler of the simplest kind, with shuffled blocks, that keeps the logits."""

from dataclasses import dataclass, field

import numpy as np
import torch

from chairlift.runner.interface import NewSequence
from chairlift.runner.runner import ModelRunner
from chairlift.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Riding:
    row: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Driver:
    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, runner.num_kv_blocks)).tolist())
        logits = runner.model.logits

        def kept(at):
            found = logits(at)
            self.logits = torch.from_numpy(found.copy()) if isinstance(found, np.ndarray) else found.clone()
            return found

        runner.model.logits = kept  # type: ignore[method-assign]

    def add_request(self, row: int, tokens: list[int], params: SamplingParams = GREEDY, seed: int = 0, **more: object) -> Riding:
        self.runner.add_request(row, NewSequence(params, np.array(tokens, dtype=np.int32), len(tokens), seed, **more))
        return Riding(row, list(tokens))

    def remove_request(self, riding: Riding) -> None:
        self.free += riding.blocks

    def step(self, chunks: list[tuple[Riding, int]], copies: list[tuple[int, int]] = ()) -> list[int]:
        """Computes so many more tokens of each, sampling those that reach their end; the sampled tokens are appended."""
        buffers, size = self.runner.buffers[0], self.runner.block_size
        at, samples = 0, []
        buffers.query_starts[0] = 0
        for i, (riding, count) in enumerate(chunks):
            positions = np.arange(riding.computed, riding.computed + count)
            riding.computed += count
            while len(riding.blocks) * size < riding.computed:
                riding.blocks.append(self.free.pop())
            blocks = np.array(riding.blocks)
            span = slice(at, at + count)
            buffers.input_ids[span] = np.array(riding.tokens)[positions]
            buffers.positions[span] = positions
            buffers.slot_mapping[span] = blocks[positions // size] * size + positions % size
            at += count
            buffers.query_starts[i + 1] = at
            buffers.context_lens[i] = riding.computed
            buffers.batch_slots[i] = riding.row
            if self.runner.state_slots:
                buffers.state_slots[i] = riding.row
            buffers.block_tables[riding.row, : len(blocks)] = blocks
            if riding.computed == len(riding.tokens):
                buffers.sample_at[len(samples)] = at - 1
                buffers.sample_slots[len(samples)] = riding.row
                samples.append(riding)
        buffers.copies[: 2 * len(copies)] = np.array(copies, dtype=np.int32).reshape(-1)
        self.sampled = self.runner.run(at, len(chunks), len(samples), len(copies))
        sampled = self.sampled.tokens.tolist()
        for riding, token, logits in zip(samples, sampled, self.logits, strict=True):
            riding.logits.append(logits)
            riding.tokens.append(token)
        return sampled
