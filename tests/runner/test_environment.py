import subprocess
import sys

import pytest

SETTINGS = "import os, chairlift.runner; print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "None"),
    ],
)
def test_torchs_allocator_uses_growing_segments_unless_the_user_says_otherwise(given, expected):
    done = subprocess.run([sys.executable, "-c", SETTINGS], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
