import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from chairlift import machine
from chairlift.cli import main
from chairlift.runner import cuda, diagnosis

torch = pytest.importorskip("torch")


@pytest.fixture
def device(monkeypatch):
    """Pretends that torch sees a device of this compute capability."""

    def pretend(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        properties = {"name": "NVIDIA X", "multi_processor_count": 100, "shared_memory_per_block_optin": 101376}
        found = SimpleNamespace(major=capability[0], minor=capability[1], **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (23 << 30, 24 << 30))
        monkeypatch.setattr(torch.version, "cuda", "13.2")
        monkeypatch.setattr(diagnosis.util, "find_spec", lambda name: object())
        for module in (cuda, diagnosis):
            monkeypatch.setattr(module, "has_cuda_driver", lambda: True)

    return pretend


@pytest.fixture
def without_torch(monkeypatch):
    installed = diagnosis.util.find_spec
    monkeypatch.setattr(diagnosis.util, "find_spec", lambda name: None if name == "torch" else installed(name))


def test_the_report_is_plain_text_and_says_the_same_as_json(capsys):
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    assert main.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["system", "processor", "memory", "limits", "packages", "GPU", "what runs", "GPU kernels"]
    assert report["processor"]["CPU kernels"] in ("amx", "vnni", "avx512", "avx2", "neon", "portable")
    for heading, facts in report.items():
        assert f"{heading}\n" in text
        assert all(name in text for name in facts)


def test_it_needs_no_torch():
    requested = (
        "import sys; from importlib import util; from chairlift.runner import diagnosis\n"
        "util.find_spec = lambda name: None\n"
        "print(diagnosis.machine()['GPU']['devices'], diagnosis.what_runs()['--device auto'], 'torch' in sys.modules, sep=';')"
    )
    done = subprocess.run([sys.executable, "-c", requested], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "unknown: torch is not installed;cpu: there is no CUDA device;False"


def test_without_torch_it_says_what_does_not_run(without_torch):
    runs = diagnosis.what_runs()
    assert runs["other architectures"] == "not here: torch not installed"
    assert runs["Chairlift's own models"].startswith("CPU kernels in Rust")


@pytest.mark.parametrize(
    ("capability", "auto", "fp8"),
    [
        ((7, 5), "cpu: the device has compute capability 7.5, and the kernels need 8.0", None),
        ((8, 6), "cuda", "no: it needs compute capability 8.9, not 8.6"),
        ((8, 9), "cuda", "yes"),
        ((9, 0), "cuda", "yes"),
    ],
)
def test_what_a_device_can_do_follows_its_capability(capability, auto, fp8, device):
    device(*capability)
    runs = diagnosis.what_runs()
    assert runs["--device auto"] == auto
    assert runs.get("--quantization fp8, --kv-cache-dtype fp8") == fp8
    shown = diagnosis.machine()["GPU"]["device 0"]
    assert shown.startswith(f"NVIDIA X, 23.0 GiB free of 24.0 GiB, compute capability {capability[0]}.{capability[1]}, ")
    assert shown.endswith("99 KiB of shared memory a program")


def test_a_wrong_kernel_is_reported_with_status_1(device, monkeypatch, capsys):
    device(8, 9)
    checks = [SimpleNamespace(name="rms_norm", ok=True, says="ok"), SimpleNamespace(name="resolve", ok=False, says="wrong")]
    monkeypatch.setattr(diagnosis, "check_gpu", lambda seconds: iter(checks))
    assert main.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["GPU kernels"] == {"rms_norm": "ok", "resolve": "wrong"}


def test_a_containers_limit_is_the_smallest_of_its_groups(tmp_path, monkeypatch):
    files = {"/proc/self/cgroup": "0::/a/b", "/a/b/memory.max": "max", "/a/memory.max": str(3 << 30), "/a/memory.high": str(2 << 30)}
    monkeypatch.setattr(machine, "file_text", lambda path: files.get(path.removeprefix(machine.CGROUPS), ""))
    assert machine.memory_limit() == 2 << 30
    del files["/a/memory.max"], files["/a/memory.high"]
    assert machine.memory_limit() is None


def test_it_says_why_a_driver_is_of_no_use_and_that_this_ends_a_start(monkeypatch):
    fault = cuda.NoDevice("the NVIDIA driver supports CUDA 12.4, and torch needs CUDA 13", is_fault=True)
    monkeypatch.setattr(diagnosis, "cuda_devices", lambda: 0)
    monkeypatch.setattr(diagnosis, "why_no_device", lambda: fault)
    assert diagnosis.machine()["GPU"]["devices"] == f"none: {fault.text}"
    assert diagnosis.what_runs()["--device auto"] == f"none: {fault.text}"
    assert diagnosis.why_no_gpu() == fault


def test_it_names_what_the_launcher_of_kernels_needs(device, monkeypatch):
    device(9, 0)
    monkeypatch.setattr(diagnosis, "missing_for_launcher", lambda: "Python.h (apt install python3.12-dev)")
    monkeypatch.setattr(diagnosis, "cuda_devices", lambda: 1)
    assert diagnosis.machine()["GPU"]["Triton's launcher"] == "cannot be compiled without Python.h (apt install python3.12-dev)"
    monkeypatch.setattr(diagnosis, "missing_for_launcher", lambda: None)
    assert diagnosis.machine()["GPU"]["Triton's launcher"] == "a C compiler and Python.h are there"


def test_it_needs_no_torch_beside_a_driver_either(without_torch, monkeypatch):
    monkeypatch.setattr(diagnosis, "has_cuda_driver", lambda: True)
    monkeypatch.setattr(diagnosis, "cuda_devices", lambda: pytest.fail("it imports torch"))
    assert diagnosis.what_runs()["--device auto"] == "cpu: torch is not installed"
