"""Describes this machine and what runs on it, for `chairlift doctor`. Works without torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata, util
from typing import TYPE_CHECKING

from chairlift import _core
from chairlift.machine import available_memory, file_text, memory_limit, usable_cores
from chairlift.runner.cuda import KERNEL_DRIVER, NoDevice, compute_capability, cuda_devices, dotted, has_cuda_driver, too_old, why_no_device
from chairlift.runner.launcher import missing_for_launcher
from chairlift.runner.memory.decision import gib
from chairlift.runner.memory.precision import FP8_CAPABILITY

if TYPE_CHECKING:
    from chairlift.runner.kernel_check import KernelCheck

Facts = dict[str, str]
"""A section of the report: names and values in words."""

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8")
"""The features of x86 processors that the CPU kernels use or might use, by Linux's names. `avx512` needs those up to avx512_vnni."""
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "gguf")
FEW_FILES = 4096
"""Fewer open files than this limit the number of connections in practice."""


def machine() -> dict[str, Facts]:
    """The machine and its software: sections with facts."""
    return {
        "system": _system(),
        "processor": _processor(),
        "memory": _memory(),
        "limits": _limits(),
        "packages": {name: version(name) for name in PACKAGES},
        "GPU": _gpus(),
    }


def version(package: str) -> str:
    """The version of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system() -> Facts:
    return {"chairlift": _core.__version__, "python": platform.python_version(), "system": platform.platform()}


def _processor() -> Facts:
    lines = [line.partition(":") for line in file_text("/proc/cpuinfo").splitlines()]
    info = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "cores": f"{usable_cores()} physical that may be used; {allowed} threads allowed, {os.cpu_count()} in all",
        "CPU kernels": _core.instruction_sets()[0],
    }
    if platform.machine() in ("x86_64", "AMD64") and (flags := set(info.get("flags", "").split())):
        facts["has"] = ", ".join(name for name in FEATURES if name in flags) or "none of the features below"
        facts["lacks"] = ", ".join(name for name in FEATURES if name not in flags) or "nothing"
    return facts


def _memory() -> Facts:
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return {
        "total": gib(total),
        "available": gib(available_memory()),
        "container's limit": "none" if limit is None or limit >= total else gib(limit),
    }


def _limits() -> Facts:
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    hint = "" if files[0] >= FEW_FILES else f"; each stream needs one (ulimit -n {min(files[1], 65536)})"
    facts = {"open files": f"{_limit(files[0], str)} (at most {_limit(files[1], str)}){hint}", "locked memory": _limit(locked[0], gib)}
    if os.path.isdir("/dev/shm"):
        facts["/dev/shm"] = f"{gib(shutil.disk_usage('/dev/shm').free)} free of {gib(shutil.disk_usage('/dev/shm').total)}"
    return facts


def _limit(value: int, words: Callable[[int], str]) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else words(value)


def _gpus() -> Facts:
    driver = file_text(KERNEL_DRIVER).partition("\n")[0]
    unknown = "of unknown version" if has_cuda_driver() else "none"
    facts = {"driver": driver.partition(":")[2].strip() or unknown}
    if not util.find_spec("torch"):
        return facts | {"devices": "unknown: torch is not installed"}
    import torch

    facts["torch's CUDA"] = torch.version.cuda or "none: this torch is for CPUs"
    if not cuda_devices():
        return facts | {"devices": f"none: {why_no_device().text}"}
    missing = missing_for_launcher()
    facts["Triton's launcher"] = f"cannot be compiled without {missing}" if missing else "a C compiler and Python.h are there"
    for index in range(torch.cuda.device_count()):
        found, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        facts[f"device {index}"] = (
            f"{found.name}, {gib(free)} free of {gib(total)}, compute capability {found.major}.{found.minor}, "
            f"{found.multi_processor_count} multiprocessors, {found.shared_memory_per_block_optin >> 10} KiB of shared memory a program"
        )
    return facts


def what_runs() -> Facts:
    """What runs where, and why other things do not."""
    reason = why_no_gpu()
    isa = _core.instruction_sets()[0]
    slow = "" if isa != "portable" else ", slowly: this processor lacks avx2, fma or f16c"
    facts = {"--device auto": "cuda" if reason is None else f"{'none' if reason.is_fault else 'cpu'}: {reason.text}"}
    if reason is None:
        facts["Chairlift's own models"] = "torch with Triton kernels on the GPU"
        facts |= _dtypes(compute_capability())
    else:
        facts["Chairlift's own models"] = f"CPU kernels in Rust, {isa}{slow}"
    needed = ("torch", "transformers", *(("accelerate",) if reason is None else ()))
    missing = [name for name in needed if not util.find_spec(name)]
    facts["other architectures"] = f"not here: {' and '.join(missing)} not installed" if missing else "transformers' code in torch"
    return facts


def why_no_gpu() -> NoDevice | None:
    """Why the GPU kernels do not run here; None if they do."""
    missing = next((name for name in ("torch", "triton") if not util.find_spec(name)), None)
    if missing and has_cuda_driver():
        return NoDevice(f"{missing} is not installed", False)
    if not cuda_devices():
        return why_no_device()
    reason = too_old(compute_capability())
    return NoDevice(reason, False) if reason else None


def _dtypes(capability: tuple[int, int]) -> Facts:
    fp8 = "yes" if capability >= FP8_CAPABILITY else f"no: it needs compute capability {dotted(FP8_CAPABILITY)}, not {dotted(capability)}"
    return {"bfloat16, float16, float32": "yes", "--quantization fp8, --kv-cache-dtype fp8": fp8, "--quantization int8": "yes"}


def check_gpu(seconds: float) -> Iterator[KernelCheck]:
    """Compares the kernels with their references on the first CUDA device."""
    import torch

    from chairlift.runner.kernel_check import check_kernels  # imports triton

    return check_kernels(torch.device("cuda"), torch.bfloat16, seconds)
