"""Cores and memory that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
"""Linux's directory of control groups (version 2), or of a directory per controller (version 1)."""


def usable_cores() -> int:
    """Physical cores that this process may use, at least one; a part of a core counts as one."""
    return math.ceil(core_time())


def core_time() -> float:
    """Seconds of physical cores that this process may use in a second. Hyperthreads count once; CPU sets and container quotas apply."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {file_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    cores = float(len(siblings))
    for group in _groups("cpu"):
        quota, _, period = file_text(f"{group}/cpu.max").partition(" ")
        quota, period = quota or file_text(f"{group}/cpu.cfs_quota_us"), period or file_text(f"{group}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory() -> int:
    """Bytes that can be allocated now without swapping and within the limits of the container and of `ulimit -v`."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for line in file_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for line in file_text("/proc/self/limits").splitlines():
        if line.startswith("Max address space ") and (limit := line.split()[3]).isdigit():
            mapped = int(file_text("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
            available = min(available, int(limit) - mapped)
    for group in _groups("memory"):
        used = file_text(f"{group}/memory.current") or file_text(f"{group}/memory.usage_in_bytes")
        if used.isdigit():
            free = [limit - int(used) + _file_pages(group) for limit in _limits(group)]
            available = min(available, *free, available)
    return max(0, available)


def memory_limit() -> int | None:
    """Bytes that this process's container may use; None without a limit."""
    # Version 1 has a limit close to 2^63 where there is none.
    return min((limit for group in _groups("memory") for limit in _limits(group) if limit < 2**60), default=None)


def _limits(group: str) -> list[int]:
    """The limits of a control group's memory in bytes."""
    texts = (file_text(f"{group}/{name}") for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))
    return [int(text) for text in texts if text.isdigit()]


def _groups(kind: str) -> Iterator[str]:
    """The directories of this process's control groups for the controller `kind`, from its own to the root. All their limits apply."""
    for line in file_text("/proc/self/cgroup").splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        root = CGROUPS if number == "0" else f"{CGROUPS}/{kind}"
        if number != "0" and kind not in kinds.split(","):
            continue
        # In a container the path may be the host's, and then only the root exists.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]])


def _file_pages(group: str) -> int:
    """Bytes of cached files, including those of child groups. They count as used but can be reclaimed."""
    counted = dict(line.split() for line in file_text(f"{group}/memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in counted else ""
    return sum(int(counted.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def file_text(path: str | Path) -> str:
    """The text of a file in /proc or /sys, without white space around it; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
