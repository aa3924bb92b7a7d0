"""The arrays in which a step is described: written by the scheduler, read by the model."""

from __future__ import annotations

import numpy as np


class StepBuffers:
    """Flat int32 arrays for up to T tokens of S sequences with B blocks each, made once and used for every step.

    Sequence i of a step owns the tokens query_starts[i] to query_starts[i + 1]; block_tables is indexed by row, all else by the
    sequence's or token's place in the step.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int32)

        self.input_ids = zeros(max_tokens)
        self.positions = zeros(max_tokens)
        self.slots = zeros(max_tokens)
        """Where each token's key and value go: block * block_size + offset."""
        self.query_starts = zeros(max_seqs + 1)
        self.context_lens = zeros(max_seqs)
        """Tokens of each sequence, those of this step included."""
        self.rows = zeros(max_seqs)
        """The row that each sequence keeps for as long as it runs."""
        self.sample_at = zeros(max_tokens)
        """Places on the token axis whose next token is wanted."""
        self.sample_rows = zeros(max_tokens)
        self.copies = zeros(2 * max_seqs)
        """Pairs of blocks, from and to, copied before the forward pass."""
        self.block_tables = zeros(max_seqs, max_blocks)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, as the scheduler wants them."""
        return dict(vars(self))
