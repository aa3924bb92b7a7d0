import subprocess
import sys

import pytest
import torch

from chairlift.layers.rope import rotate, rotations
from chairlift.models.rotary import RopeConfig

pytestmark = pytest.mark.slow


def test_rotation_keeps_lengths_and_depends_on_distance():
    q, k = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    frequencies = torch.from_numpy(RopeConfig(dim=16, theta=100.0).frequencies(200))

    def score(at: int, to: int) -> torch.Tensor:
        turned_q = rotate(q, rotations(torch.tensor([at]), frequencies))
        turned_k = rotate(k, rotations(torch.tensor([to]), frequencies))
        torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_neither_triton_nor_transformers_is_imported_on_the_cpu():
    code = "import sys, chairlift.runner.torch_backend; print(sorted({'triton', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
