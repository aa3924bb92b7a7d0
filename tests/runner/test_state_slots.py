"""The runner makes a step's copies of recurrent states before the pass, and tells the model which states to save."""

from types import SimpleNamespace

import numpy as np

from chairlift.runner.buffers import Layout, StepBuffers, StepSizes
from chairlift.runner.runner import ModelRunner

SIZE = SimpleNamespace(num_blocks=9, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=8)


class RecordingModel:
    batch_invariant = True
    adapters = None

    def __init__(self):
        self.calls = []

    def copy(self, pairs):
        self.calls.append(("blocks", pairs.tolist()))

    def copy_states(self, pairs):
        self.calls.append(("states", pairs.tolist()))

    def forward(self, buffers, num_tokens, num_seqs):
        saves = buffers.state_saves[: 3 * buffers.num_state_saves].reshape(-1, 3)
        self.calls.append((buffers.state_slots[:num_seqs].tolist(), saves.tolist()))

    def logits(self, at):
        return np.zeros((len(at), 4), dtype=np.float32)


def test_states_are_copied_after_blocks_and_before_the_pass():
    model, buffers = RecordingModel(), StepBuffers(Layout(8, 4, 2, state_slots=6))
    runner = ModelRunner(model, SimpleNamespace(vocab_size=4), SIZE, 16, [buffers], None)
    buffers.copies[:2] = (7, 8)
    buffers.state_copies[:4] = (5, 1, 1, 2)
    buffers.state_slots[:2] = (2, 3)
    buffers.state_saves[:3] = (1, 16, 4)
    runner.launch(0, StepSizes(tokens=3, seqs=2, samples=0, copies=1, state_copies=2, state_saves=1))
    assert model.calls == [("blocks", [[7, 8]]), ("states", [[5, 1], [1, 2]]), ([2, 3], [[1, 16, 4]])]
    model.calls.clear()
    runner.launch(0, StepSizes(tokens=3, seqs=1, samples=0))
    assert model.calls == [([2], [])]


def test_a_layout_without_states_has_no_arrays_for_them():
    assert not {"state_slots", "state_copies", "state_saves"} & Layout(8, 4, 2).slices.keys()
    assert len(StepBuffers(Layout(8, 4, 2, state_slots=6)).arrays()["state_saves"]) == 18
