"""Why there is no CUDA device, and what a start does about it, on machines that only seem to have a driver."""

import ctypes
import logging
import sys

import pytest
from tiny_models import write

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.runner import cuda
from chairlift.runner.build import build_runner
from chairlift.runner.cuda import NoDevice, why_no_device

torch = pytest.importorskip("torch")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Pretends to have a kernel driver, with a device's file or without, and a libcuda that supports a version of CUDA or is missing."""
    version, device = tmp_path / "version", tmp_path / "nvidiactl"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Of torch, that of PyPI on Linux.
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    class Library:
        def __init__(self, supports):
            self.supports = supports

        def cuDriverGetVersion(self, version):  # noqa: N802
            ctypes.cast(version, ctypes.POINTER(ctypes.c_int)).contents.value = self.supports
            return 0

    def pretend(supports=13020, has_file=True):
        version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n")
        if has_file:
            device.touch()
        for module in (cuda, sys.modules["chairlift.runner.build"]):
            monkeypatch.setattr(module, "KERNEL_DRIVER", version)
        monkeypatch.setattr(cuda, "DEVICE_FILE", device)
        usual = ctypes.CDLL

        def load(name, *rest, **more):
            if name != "libcuda.so.1":
                return usual(name, *rest, **more)
            if supports is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return Library(supports)

        monkeypatch.setattr(ctypes, "CDLL", load)

    return pretend


def raises(error):
    def call():
        raise error

    return call


def test_a_driver_older_than_torch_is_named_with_both_versions(driver):
    driver(supports=12040)
    assert why_no_device() == NoDevice(
        "the NVIDIA driver supports CUDA 12.4, and torch 2.15.0 needs CUDA 13: update the driver, or install torch for CUDA 12 "
        "(https://pytorch.org/get-started/locally)",
        is_fault=True,
    )


def test_a_driver_of_an_older_minor_version_is_not_blamed(driver, monkeypatch):
    driver(supports=13000)
    monkeypatch.setattr(torch.cuda, "init", raises(RuntimeError("CUDA unknown error\nmore")))
    assert why_no_device() == NoDevice("torch cannot use the CUDA device (CUDA unknown error): see `nvidia-smi`", is_fault=True)


def test_a_torch_for_cpus_is_named(driver, monkeypatch):
    driver()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    assert why_no_device().text.startswith("torch 2.15.0+cpu is built for CPUs: install one for CUDA")
    assert why_no_device().is_fault


def test_missing_libraries_of_the_driver_are_named(driver):
    driver(supports=None)
    assert "libcuda.so.1 is not found: install the driver's libraries" in why_no_device().text
    assert why_no_device().is_fault


def test_a_container_without_a_device_is_no_fault(driver):
    driver(has_file=False)
    reason = "this machine has an NVIDIA driver, but no device may be used here (docker run needs --gpus all)"
    assert why_no_device() == NoDevice(reason, is_fault=False)


@pytest.mark.parametrize("supports", [None, 12040])
def test_wsl_has_a_device_if_it_has_the_drivers_library(driver, monkeypatch, tmp_path, supports):
    driver(supports=supports, has_file=False)
    monkeypatch.setattr(cuda, "KERNEL_DRIVER", tmp_path / "none")
    monkeypatch.setattr(cuda, "WSL", tmp_path / "version")
    assert why_no_device().is_fault == (supports is not None)
    assert ("supports CUDA 12.4" if supports else "there is no CUDA device") in why_no_device().text


@pytest.mark.parametrize("value", ["", "-1"])
def test_devices_that_the_user_hides_are_no_fault(driver, monkeypatch, value):
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert why_no_device() == NoDevice("CUDA_VISIBLE_DEVICES hides all CUDA devices", is_fault=False)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_start_ends_where_the_driver_is_too_old_unless_the_cpu_is_asked_for(driver, tmp_path, device):
    write("llama", tmp_path)
    driver(supports=12040)
    settings = {"num_kv_blocks": 10}
    expected = rf"^--device {device}: the NVIDIA driver supports CUDA 12\.4, .*\(use --device cpu for the CPU\)$"
    with pytest.raises(InvalidSetting, match=expected):
        build_runner(EngineConfig(device=device, **settings), tmp_path)
    runner = build_runner(EngineConfig(device="cpu", **settings), tmp_path)
    assert ("device", "cpu", "--device says so") in runner.decisions


def test_a_start_in_a_container_without_a_device_warns_that_it_takes_the_cpu(driver, tmp_path, caplog):
    write("llama", tmp_path)
    driver(has_file=False)
    with caplog.at_level(logging.WARNING, "chairlift"):
        runner = build_runner(EngineConfig(num_kv_blocks=10), tmp_path)
    assert runner.decisions[1][:2] == ("device", "cpu")
    assert [record.getMessage() for record in caplog.records] == [f"--device auto: the CPU is used, for {cuda.why_no_device().text}"]
