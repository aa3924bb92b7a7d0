import json
from pathlib import Path

import pytest

from chairlift.checkpoint.info import CheckpointInfo
from chairlift.checkpoint.weight_files import info_before_load, weight_bytes, weight_files
from chairlift.errors import ModelNotFound, UnsupportedModel

INDEX = "model.safetensors.index.json"


def put(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"1234")


def names(directory: Path) -> list[str]:
    return [path.name for path in weight_files(directory)]


def test_the_model_file_wins_over_files_of_other_names(tmp_path: Path) -> None:
    put(tmp_path, "config.json", "model.safetensors", "consolidated.safetensors", "old_model.safetensors", "model-old.safetensors")
    assert names(tmp_path) == ["model.safetensors"]
    assert weight_bytes(tmp_path) == 4


def test_the_index_wins_over_all(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", "b.safetensors", "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert names(tmp_path) == ["b.safetensors"]


def test_a_file_that_the_index_names_may_not_be_missing(tmp_path: Path) -> None:
    put(tmp_path, "b.safetensors", "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert names(tmp_path) == ["b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"b\.safetensors is missing, though model\.safetensors\.index\.json names it"):
        weight_files(tmp_path)


def test_a_link_to_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/1234")
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is a link to \.\./\.\./blobs/1234, which is missing"):
        weight_files(tmp_path)


def test_the_index_of_the_model_before_it_was_quantised_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "model.safetensors", "model-00002-of-00002.safetensors")
    named = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": named}))
    assert names(tmp_path) == names(tmp_path) == ["model.safetensors"]
    assert caplog.messages == [
        f"{tmp_path / INDEX} names model-00001-of-00002.safetensors, which is missing: the weights are those of model.safetensors"
    ]


def test_without_index_the_names_decide(tmp_path: Path) -> None:
    put(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors")
    assert names(tmp_path) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_files_may_have_any_names_if_none_begins_with_model(tmp_path: Path) -> None:
    put(tmp_path, "weights-2.safetensors", "weights-1.safetensors", "._weights-1.safetensors")
    assert names(tmp_path) == ["weights-1.safetensors", "weights-2.safetensors"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", ".", "", 5])
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UnsupportedModel, match="which is no file of this directory"):
        weight_files(tmp_path)


def test_a_models_files_tell_what_it_is_before_it_is_loaded(tmp_path: Path) -> None:
    assert info_before_load(tmp_path) == info_before_load(tmp_path / "none") == CheckpointInfo()
    put(tmp_path, "a.gguf")
    assert info_before_load(tmp_path) == info_before_load(tmp_path / "a.gguf") == CheckpointInfo(weight_format="gguf")
    for config in ("[" * 100_000, "{", "[]", '{"architectures": [1]}', '{"architectures": "x"}', '{"architectures": []}', "\x80"):
        (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
        assert info_before_load(tmp_path) == CheckpointInfo(), config
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert info_before_load(tmp_path) == CheckpointInfo(architecture="LlamaForCausalLM", weight_format="safetensors")
