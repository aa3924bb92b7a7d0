"""The arrays of a step, and how another process of tensor parallelism gets them."""

import numpy as np
import torch

from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers

TOKENS, SEQS, BLOCKS = 512, 64, 256


def buffers() -> DeviceBuffers:
    cpu = torch.device("cpu")
    return DeviceBuffers(2, TOKENS, SEQS, BLOCKS, cpu, CopyStream(cpu))


def test_another_process_gets_the_entries_that_a_step_uses() -> None:
    ours, theirs = buffers(), buffers()
    host, random = ours.host[1], np.random.default_rng(0)
    tokens, seqs, writes = 5, 3, 4
    for array in (host.query_starts, host.context_lens, host.batch_slots, host.positions, host.slot_mapping):
        array[:] = random.integers(0, 1000, array.shape)
    packed = host.arrays()["table_writes"][: 2 * writes].reshape(-1, 2)
    packed[:] = [(7, 70), (8, 80), (BLOCKS, 90), (SEQS * BLOCKS - 1, 100)]
    ours.load(1, writes)
    sent = ours.loaded(tokens, seqs)
    # Starts have one entry more than sequences. An entry takes four bytes.
    assert len(sent[2]) == 4 * ((seqs + 1) + 2 * seqs + 2 * tokens + 2 * writes)
    theirs.receive(*sent, tokens, seqs)
    for name, used in (("query_starts", seqs + 1), ("context_lens", seqs), ("batch_slots", seqs), ("positions", tokens)):
        assert torch.equal(getattr(theirs, name)[:used], getattr(ours, name)[:used])
        assert not getattr(theirs, name)[used:].any(), f"{name}: the rest was sent too"
    assert torch.equal(theirs.block_tables, ours.block_tables)
    assert theirs.block_tables.count_nonzero() == writes
