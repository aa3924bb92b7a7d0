"""A token for each row of logits, on the GPU: all kernels of this room in their order."""

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
    """Tokens, int32 [N], for logits [N, vocabulary] in fp32 that belong to rows int32 [N] of the settings.

    `positions`, int32 [N], are the places that the tokens take in their sequences. `said`, None if no row is penalised, is read and
    counts the tokens (see `reference.penalise`); `last_token`, int32 [rows], gets them, and 0 for a row that failed, whose token is -1.
    `truncated` is whether some row has top-k, top-p or min-p. Logits may be changed. What a row draws does not depend on the others,
    nor on these two.
    """
    if said is not None:
        penalise(logits, rows, settings, said)
    least = thresholds(logits, rows, settings) if truncated else torch.full_like(rows, LOWEST)
    return draw(logits, rows, positions, settings, least, last_token, said)
