import pytest
import torch
from interpreted import DTYPES

from chairlift.kernels.copy_blocks import copy_blocks, copy_blocks_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [6, 2048, 3000])
@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 3), (2, 4), (1, 5)], [(4, 1), (1, 2), (2, 3)], [(3, 4), (5, 3), (0, 5)], [(2, 2)]])
def test_blocks_are_copied_as_if_in_order(pairs, numbers, dtype):
    cache = torch.randn(7, numbers, generator=torch.Generator().manual_seed(0)).to(dtype)
    mine, theirs = cache.clone(), cache.clone()
    moved = torch.tensor(pairs, dtype=torch.int32)
    copy_blocks(mine, moved)
    copy_blocks_reference(theirs, moved)
    assert torch.equal(mine, theirs)
    content = list(range(7))
    for source, target in pairs:
        content[target] = content[source]
    assert torch.equal(mine, cache[content])
