"""Samples a token per row of logits on the GPU by running the sampling kernels in order."""

from __future__ import annotations

import torch

from chairlift.kernels.sampling.gumbel import draw
from chairlift.kernels.sampling.penalties import penalise
from chairlift.kernels.sampling.reference import LOWEST
from chairlift.kernels.sampling.settings import Settings
from chairlift.kernels.sampling.threshold import thresholds


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    settings: Settings,
    last_token: torch.Tensor,
    said: torch.Tensor | None,
    *,
    truncated: bool,
) -> torch.Tensor:
    """Samples tokens, int32 [N], for logits [N, vocabulary] in fp32; `rows` int32 [N] are their rows of the settings.

    `positions`, int32 [N], are the positions that the tokens will take in their sequences. `said` (see `reference.penalise`) is read and
    counts the tokens; it is None if no row has penalties. The tokens are also written to `last_token`, int32 [rows], with 0 for a failed
    row, whose token is -1. `truncated` is whether any row has top-k, top-p or min-p. Logits may be overwritten. A row's draw does not
    depend on the other rows, nor on whether they need `said` or `truncated`.
    """
    if said is not None:
        penalise(logits, rows, settings, said)
    least = thresholds(logits, rows, settings) if truncated else torch.full_like(rows, LOWEST)
    return draw(logits, rows, positions, settings, least, last_token, said)
