"""Which files a checkpoint's index may name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from chairlift.errors import UnsupportedModel
from chairlift.runner.weights import SafetensorWeights


@pytest.fixture
def checkpoint(tmp_path):
    """A directory beside a file that no checkpoint may read, and a function that writes its index."""
    save_file({"secret": np.zeros(1, np.float32)}, tmp_path / "secret.safetensors")
    directory = tmp_path / "checkpoint"
    (directory / "part").mkdir(parents=True)
    save_file({"a": np.ones(3, np.float32)}, directory / "part" / "a.safetensors")

    def index(*files):
        names = {f"t{number}": file for number, file in enumerate(files)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return directory

    return index


@pytest.mark.parametrize("name", ["../secret.safetensors", "part/../../secret.safetensors", "..", "/etc/passwd", "ABSOLUTE", 5])
def test_an_index_names_no_file_outside_its_directory(checkpoint, tmp_path, name):
    name = str(tmp_path / "secret.safetensors") if name == "ABSOLUTE" else name
    with pytest.raises(UnsupportedModel, match="is no file of this directory"):
        SafetensorWeights(checkpoint(name))


def test_an_index_may_name_files_in_directories_of_its_own(checkpoint):
    assert SafetensorWeights(checkpoint("part/a.safetensors")).take("a", 3).tolist() == [1.0, 1.0, 1.0]
