"""The memory of recurrent states on a device."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch

from chairlift.errors import InvalidSetting
from chairlift.layers.recurrent import LayerState
from chairlift.models.recurrence import RecurrentLayers
from chairlift.runner.memory.kv_cache import RowCopies


class StateCache:
    """The states of all layers in one tensor, fp32 [slots, numbers]. A slot is one row and moves in one copy. `layers` are views of it."""

    def __init__(self, recurrence: RecurrentLayers, slots: int, device: torch.device) -> None:
        """Allocates slots. Raises InvalidSetting if there is not enough memory."""
        columns = recurrence.taps - 1, recurrence.channels
        matrices = recurrence.count, recurrence.key_size, recurrence.value_size
        parts = [columns, matrices] * sum(recurrence.layers)
        ends = [0, *accumulate(int(np.prod(part)) for part in parts)]
        try:
            self.tensor = torch.zeros((slots, ends[-1]), dtype=torch.float32, device=device)
            self._copies = RowCopies(self.tensor)
        except RuntimeError as error:
            raise InvalidSetting(
                f"no memory for {slots} recurrent states, {slots * 4 * ends[-1] / 2**30:.1f} GiB: lower --max-num-seqs or "
                f"--gpu-memory-utilization ({error})"
            ) from None
        views = [self.tensor[:, start:end].view(slots, *part) for part, (start, end) in zip(parts, pairwise(ends), strict=True)]
        self.layers = [LayerState(*both) for both in zip(views[::2], views[1::2], strict=True)]

    def copy(self, pairs: np.ndarray) -> None:
        """Copies states between slots, in order: pairs [n, 2], from and to."""
        self._copies.run(pairs)
