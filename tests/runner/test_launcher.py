"""What a start says where Triton cannot compile its launcher: Triton's own code fails here as it would beside a device."""

import os
import shutil
import sysconfig

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.runner.launcher import missing_for_launcher

pytest.importorskip("triton", reason="Triton is not made for this platform")

from tiny_models import write
from triton.backends.nvidia.driver import CudaDriver, CudaUtils
from triton.runtime import build as triton_build
from triton.runtime import driver

from chairlift.models.config import load_shape
from chairlift.runner.torch_backend import TorchBackend, _load_launcher, _raise_kernel_errors


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """Triton with an empty cache, which takes this for a machine with a device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if hasattr(driver, "_default"):
        for name in ("_active", "_default"):
            monkeypatch.setattr(driver, name, None)
    else:  # Triton 3.4
        monkeypatch.setattr(driver, "active", type(driver.default)(CudaDriver))
    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.delattr(CudaUtils, "instance", raising=False)
    if find := getattr(triton_build, "_find_compiler", None):  # newer versions of Triton remember it
        find.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def without_header(monkeypatch, tmp_path):
    usual = sysconfig.get_paths
    monkeypatch.setattr(sysconfig, "get_paths", lambda *given, **more: usual(*given, **more) | {"include": str(tmp_path)})


def start(tmp_path):
    write("llama", tmp_path / "model")
    model = load_shape(tmp_path / "model", in_torch=True)
    return TorchBackend(EngineConfig(device="cuda"), tmp_path / "model", model, 1)


def test_nothing_is_missing_here():
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    assert missing_for_launcher() is None


def test_a_missing_compiler_is_named_before_weights_are_loaded(triton, without_compiler, tmp_path):
    expected = r"^Triton compiles a launcher for its kernels, and needs a C compiler \(apt install gcc libc6-dev, or dnf install gcc\); or"
    with pytest.raises(ChairliftError, match=expected):
        start(tmp_path)


def test_a_compiler_that_cc_names_and_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_for_launcher().startswith("the C compiler no-such-compiler that CC names (apt install")


def test_a_missing_header_is_named(triton, without_header, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    with pytest.raises(ChairliftError, match=r"Python\.h \(apt install python3\.\d+-dev, or dnf install python3\.\d+-devel\); or"):
        start(tmp_path)


def test_a_compiler_that_fails_for_other_reasons_is_reported(triton, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(
        ChairliftError, match=r"^Triton compiles a launcher for its kernels, and that failed \(Command '\['false', .*or use"
    ):
        start(tmp_path)


def test_other_errors_stay_what_they_are(monkeypatch, tmp_path):
    def fails():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("chairlift.kernels.errors.load_launcher", fails)
    with pytest.raises(RuntimeError, match="device-side assert"):
        _load_launcher()


def test_a_launcher_that_fails_at_the_first_step_is_explained_too(monkeypatch):
    class Runner:
        compiles_kernels = True

    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ChairliftError, match="and needs a C compiler"), _raise_kernel_errors(Runner()):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.")
