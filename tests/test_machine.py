import os
from pathlib import Path

import pytest

from chairlift import machine
from chairlift.machine import available_memory, core_time, usable_cores

GIB = 1 << 30
MEMINFO = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nBuffers: 1 kB"}
"""32 GiB of memory available."""
TOP = "/sys/fs/cgroup"
NO_LIMIT = "9223372036854771712"
"""What version 1 says where there is none."""


@pytest.fixture
def kernel(monkeypatch):
    """Has the kernel's files say what a test wants, on a machine of eight threads on four cores."""

    def says(files: dict[str, str]) -> None:
        topology = {f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
        monkeypatch.setattr(machine, "file_text", lambda path: (MEMINFO | topology | files).get(path, ""))

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return says


def version2(path: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    return {f"{path}/memory.max": limit, f"{path}/memory.current": str(used), f"{path}/memory.stat": stat}


def version1(path: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    root = f"{TOP}/memory{path}"
    return {f"{root}/memory.limit_in_bytes": limit, f"{root}/memory.usage_in_bytes": str(used), f"{root}/memory.stat": stat}


def test_this_machine_has_cores_and_memory():
    assert usable_cores() >= 1
    assert 2**20 < available_memory() < 2**50
    assert Path("/proc/cpuinfo").exists() is False or usable_cores() <= Path("/proc/cpuinfo").read_text().count("processor\t")


def test_without_limits_all_is_there(kernel):
    kernel({})
    assert (usable_cores(), available_memory()) == (4, 32 * GIB)
    kernel({"/proc/self/cgroup": "0::/user.slice", **version2(f"{TOP}/user.slice", "max", GIB)})
    assert available_memory() == 32 * GIB
    kernel({"/proc/self/cgroup": "4:memory:/\n1:cpu,cpuacct:/", **version1("", NO_LIMIT, GIB), f"{TOP}/cpu/cpu.cfs_quota_us": "-1"})
    assert (usable_cores(), available_memory()) == (4, 32 * GIB)


def test_a_limit_of_the_address_space_counts_less_what_is_mapped(kernel):
    limits = "Limit                     Soft Limit\nMax address space         {:20} unlimited            bytes"
    mapped = {"/proc/self/statm": f"{GIB // os.sysconf('SC_PAGE_SIZE')} 7 3"}
    kernel({**mapped, "/proc/self/limits": limits.format(str(4 * GIB))})
    assert available_memory() == 3 * GIB
    kernel({**mapped, "/proc/self/limits": limits.format("unlimited")})
    assert available_memory() == 32 * GIB


def test_a_containers_limit_counts_less_what_is_used_but_for_cached_files(kernel):
    stat = f"anon 5\nfile 7\ninactive_file {GIB}\nactive_file {GIB}\ntotal_inactive_file_x 9"
    kernel({"/proc/self/cgroup": "0::/", **version2(TOP, str(8 * GIB), 5 * GIB, stat)})
    assert available_memory() == 5 * GIB
    kernel({**version2(TOP, str(8 * GIB), 5 * GIB)})  # without /proc/self/cgroup
    assert available_memory() == 3 * GIB
    kernel({"/proc/self/cgroup": "0::/", **version2(TOP, str(4 * GIB), 5 * GIB)})
    assert available_memory() == 0


def test_the_limits_of_all_groups_above_hold(kernel):
    own, above = f"{TOP}/system.slice/chairlift.service", f"{TOP}/system.slice"
    groups = {"/proc/self/cgroup": "0::/system.slice/chairlift.service"}
    kernel({**groups, **version2(own, str(8 * GIB), GIB), **version2(above, str(6 * GIB), 4 * GIB)})
    assert available_memory() == 2 * GIB
    kernel({**groups, **version2(own, str(8 * GIB), GIB), **version2(above, "max", 4 * GIB)})
    assert available_memory() == 7 * GIB
    kernel({**groups, **version2(own, "max", GIB), f"{own}/memory.high": str(3 * GIB)})
    assert available_memory() == 2 * GIB
    kernel({**groups, f"{own}/cpu.max": "max 100000", f"{above}/cpu.max": "150000 100000"})
    assert usable_cores() == 2
    kernel({**groups, f"{own}/cpu.max": "50000 100000", f"{above}/cpu.max": "150000 100000"})
    assert (usable_cores(), core_time()) == (1, 0.5)


def test_version_1_has_a_directory_for_each_kind(kernel):
    lists = {"/proc/self/cgroup": "12:cpu,cpuacct:/docker/7\n5:memory:/docker/7\n2:cpuset:/docker/7\n1:name=systemd:/x\n0::/x"}
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    kernel({**lists, **version1("/docker/7", str(8 * GIB), 5 * GIB, stat)})
    assert available_memory() == 5 * GIB
    kernel({**lists, **version1("", str(8 * GIB), 5 * GIB)})  # a container sees its own group as the root
    assert available_memory() == 3 * GIB
    kernel({**lists, f"{TOP}/cpu/docker/7/cpu.cfs_quota_us": "250000", f"{TOP}/cpu/docker/7/cpu.cfs_period_us": "100000"})
    assert usable_cores() == 3
    kernel({**lists, **{f"{TOP}/{kind}/docker/7/memory.limit_in_bytes": "1" for kind in ("cpu", "cpuset")}})
    assert available_memory() == 32 * GIB
