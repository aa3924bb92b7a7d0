"""What the machine has: cores to compute with, and memory to fill."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
"""Where Linux shows control groups: all of them (version 2), or a directory for each kind (version 1)."""


def usable_cores() -> int:
    """Physical cores that this process may use: hyperthreads counted once, CPU sets and container quotas heeded."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    cores = len(siblings)
    for group in _groups("cpu"):
        quota, _, period = _read(f"{group}/cpu.max").partition(" ")
        quota, period = quota or _read(f"{group}/cpu.cfs_quota_us"), period or _read(f"{group}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory() -> int:
    """Bytes that can be allocated now without pushing anything out, or into the limit of a container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for group in _groups("memory"):
        limits = [_read(f"{group}/{name}") for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        used = _read(f"{group}/memory.current") or _read(f"{group}/memory.usage_in_bytes")
        if used.isdigit():
            free = [int(limit) - int(used) + _file_pages(group) for limit in limits if limit.isdigit()]
            available = min(available, *free, available)
    return max(0, available)


def _groups(kind: str) -> Iterator[str]:
    """The directories of this process's control groups that may limit `kind`, from its own to the root: all their limits hold."""
    for line in _read("/proc/self/cgroup").splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        root = CGROUPS if number == "0" else f"{CGROUPS}/{kind}"
        if number != "0" and kind not in kinds.split(","):
            continue
        # In a container the path may be the host's name for it; then only the root is there.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]])


def _file_pages(group: str) -> int:
    """Bytes of cached files, which a group counts as used but gives up when asked, those of the groups below included."""
    counted = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in counted else ""
    return sum(int(counted.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _read(path: str) -> str:
    """The text of a file of the kernel's, empty where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
