import pytest
import torch

from chairlift.kernels.resolve import resolve
from chairlift.kernels.resolve_reference import resolve_reference


@pytest.mark.parametrize("count", [1, 5, 1024, 1500])
def test_open_ids_become_what_their_rows_sampled(count):
    last_token = torch.tensor([40, 41, 2**31 - 1, -1, 44], dtype=torch.int32)
    input_ids = torch.arange(count, dtype=torch.int32) * 3
    input_ids[0] = -5
    input_ids[2:5] = torch.tensor([-3, -1, -4])[: max(0, count - 2)]
    found = resolve(input_ids, last_token)
    assert found[:5].tolist() == [44, 3, 2**31 - 1, 40, 0][:count]
    assert torch.equal(found, resolve_reference(input_ids, last_token))
