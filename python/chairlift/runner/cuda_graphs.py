"""Decode steps as CUDA graphs: what a step launches kernel by kernel is recorded once for each size, and replayed in one go."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from chairlift.layers.device_attention import DecodeLists, DevicePlan
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.graph_capture import GraphCapture, Replay
from chairlift.runner.sampling.device import DeviceSampler, SamplingVariant
from chairlift.runner.torch_executor import TorchExecutor

log = logging.getLogger("chairlift")

LARGEST = 512
"""Sequences of the largest graph: a device is busy for longer with a step of more than the host is with launching it."""
PLAIN = SamplingVariant(truncated=False, slots=0)
"""What most steps need of the sampler: it is recorded at the start, other tiers when they come up."""


def sizes(most: int) -> list[int]:
    """How many sequences graphs are made for, up to `most`, ascending: a step takes the next larger, like vLLM's and SGLang's."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST, 32))
    most = min(most, LARGEST)
    return [*(size for size in usual if size < most), most]


class Graph:
    """Steps of up to `size` sequences with one token each: a graph of the pass, and one of the sample for each tier.

    What a step has is put where graphs look for it before they are replayed: its arrays, attention's work, and the sampler's settings.
    What they give lies outside of the memory that all graphs share, which the next one to run overwrites: logits hold until the next
    pass, tokens until the next sample.
    """

    def __init__(self, size: int, shared: _Shared) -> None:
        """Records the pass and the plain sample of a step that is on the device, and of nobody."""
        self.size, self._shared = size, shared
        shared.recorder.warm(self._run)
        self._pass = shared.recorder.record(self._run)
        self._hidden = shared.model.hidden
        shared.recorder.warm(lambda: self._draw(PLAIN))
        self._samples: dict[SamplingVariant, Replay | None] = {PLAIN: shared.recorder.record(lambda: self._draw(PLAIN))}

    def launch(self, turn: int, num_seqs: int, num_samples: int, num_table_writes: int) -> torch.Tensor:
        """Starts the pass of the step in the host's buffers: the logits of its samples, fp32 [num_samples, vocabulary]."""
        shared, buffers = self._shared, self._shared.there.host[turn]
        shared.there.pad(turn, num_seqs, num_samples, self.size)
        shared.there.load(turn, num_table_writes)
        shared.lists.fill((buffers.query_starts[: num_seqs + 1], buffers.context_lens[:num_seqs]))
        self._pass()
        shared.model.hidden = self._hidden
        return shared.logits[:num_samples]

    def sample(self, tier: SamplingVariant, num_samples: int) -> torch.Tensor:
        """Starts the sample of the step that was launched last: tokens, int32 [num_samples]. Its logits may have been changed since.

        The first sample of a tier may wait for its kernels to be compiled; the second is recorded, which waits for the device.
        """
        if tier not in self._samples:
            # The first runs as it is, for what is recorded must have run before: kernels are compiled then. Penalties lie elsewhere once
            # there are more lines of them, and never again where they were.
            self._samples = {known: replay for known, replay in self._samples.items() if not tier.slots or known.slots in (0, tier.slots)}
            self._samples[tier] = None
            self._draw(tier)
        else:
            replay = self._samples[tier] = self._samples[tier] or self._recorded(tier)
            replay()
        return self._shared.tokens[:num_samples]

    def _run(self) -> None:
        shared, size, there = self._shared, self.size, self._shared.there
        there.resolve(size, shared.drawer.last_token)
        arrays = (
            there.slot_mapping[:size],
            there.query_starts[: size + 1],
            there.context_lens[:size],
            there.batch_slots[:size],
            there.block_tables,
        )
        nobody = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)  # no chunk is a long one
        # A plan of its own each time: its scratch memory is to be among what graphs share.
        shared.model.run(there, size, DevicePlan(*arrays, nobody, shared.lists.work(size)))
        shared.logits[:size].copy_(shared.model.network.logits(shared.model.hidden, there.sample_at[:size]))

    def _recorded(self, tier: SamplingVariant) -> Replay:
        """The sample of a tier as a graph; where that fails, for want of memory perhaps, as it is from now on."""

        def draw() -> None:
            self._draw(tier)

        try:
            return self._shared.recorder.record(draw)
        except RuntimeError as error:
            log.warning("samples of %d sequences cannot be recorded, and take longer: %s", self.size, str(error).partition("\n")[0])
            return draw

    def _draw(self, tier: SamplingVariant) -> None:
        shared, size, there = self._shared, self.size, self._shared.there
        places = there.positions[there.sample_at[:size]] + 1
        shared.tokens[:size].copy_(shared.drawer.sample(shared.logits[:size], there.sample_slots[:size], places, tier))


class Graphs:
    """The graphs of an engine, for some sizes of steps."""

    def __init__(self, recorder: GraphCapture, model: TorchExecutor, there: DeviceBuffers, drawer: DeviceSampler, longest: int) -> None:
        """Records them, the largest first, so that the smaller ones fit into its memory.

        `longest` is how long a sequence may get. Raises RuntimeError if the model cannot be recorded; it can be run all the same.
        """
        self.sizes = sizes(there.sizes[2])
        largest, device = self.sizes[-1], model.device
        logits = torch.zeros(largest, drawer.vocabulary, device=device)
        tokens = torch.zeros(largest, dtype=torch.int32, device=device)
        lists = DecodeLists(largest, longest, model.windows, device)
        shared = _Shared(recorder, model, there, drawer, lists, logits, tokens)
        there.pad(0, 0, 0, largest)
        there.load(0, 0)
        graphs = [Graph(size, shared) for size in reversed(self.sizes)]
        self._graphs = graphs[::-1]

    def fit(self, num_tokens: int, num_seqs: int) -> Graph | None:
        """The smallest graph that a step fits; None if its sequences have several tokens, or are too many."""
        if num_tokens != num_seqs or num_seqs > self.sizes[-1]:
            return None
        return self._graphs[bisect_left(self.sizes, num_seqs)]


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all graphs work with, each part at its place for good."""

    recorder: GraphCapture
    model: TorchExecutor
    there: DeviceBuffers
    drawer: DeviceSampler
    lists: DecodeLists
    logits: torch.Tensor
    tokens: torch.Tensor
