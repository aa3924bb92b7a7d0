"""What the machine has: cores to compute with, and memory to fill."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch


def usable_cores() -> int:
    """Physical cores that this process may use: hyperthreads counted once, CPU sets and container quotas heeded."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    cores = len(siblings)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now without pushing anything out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        # The cgroup counts cached files as used, but gives them up when asked.
        cached = sum(int(line.split()[1]) for line in _read("/sys/fs/cgroup/memory.stat").splitlines() if line.startswith("inactive_file "))
        available = min(available, int(limit) - int(used) + cached)
    return max(0, available)


def _read(path: str) -> str:
    """The text of a file of the kernel's, empty where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
