"""The machine: what it is, how busy others keep it, and how fast it could be at most."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
NOTED = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
)


def describe() -> dict[str, Any]:
    """Processor, cores, the SIMD it has, and memory in GiB."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    flags = set((re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M) or [""])[0].split())
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "flags": [flag for flag in NOTED if flag in flags],
        "memory_gib": round(total / 2**20),
        "kernel": platform.release(),
    }


@dataclass
class Busy:
    """CPU seconds at one moment: of the whole machine, of a session's processes, and of this process."""

    at: float
    machine: float
    session: float
    client: float

    @classmethod
    def now(cls, session: int) -> Busy:
        """Reads the clocks. Time stolen by the host counts as the machine's, and so as others'."""
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        return cls(
            time.perf_counter(), (user + nice + system + irq + softirq + steal) / TICK, session_seconds(session), time.process_time()
        )

    def shares(self, before: Busy) -> dict[str, float]:
        """Since then, each as a share of all cores: what others took, the peer and the client."""
        whole = (self.at - before.at) * (os.cpu_count() or 1)
        peer, client = self.session - before.session, self.client - before.client
        others = max(0.0, self.machine - before.machine - peer - client)
        return {"others": round(others / whole, 4), "peer": round(peer / whole, 4), "client": round(client / whole, 4)}


def session_seconds(session: int) -> float:
    """CPU of the session's processes, and of those of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICK


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def session_memory(session: int) -> tuple[float, float]:
    """Anonymous and all memory of a session's processes, in MB; what several share counts in parts."""
    sizes = {"Pss_Anon": 0, "Pss": 0}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[3]) == session:
                lines = (line.split() for line in (stat.parent / "smaps_rollup").read_text().splitlines()[1:])
                for name, size in ((words[0].rstrip(":"), int(words[1])) for words in lines):
                    if name in sizes:
                        sizes[name] += size
        except (OSError, IndexError):
            continue
    return sizes["Pss_Anon"] * 1024 / 1e6, sizes["Pss"] * 1024 / 1e6


def read_speed(seconds: float = 2.0, threads: int | None = None) -> float:
    """GB/s read by torch, best of what fits in `seconds`: a matrix of 512 MiB times a vector. For one thread by its CPU time."""
    import torch

    torch.set_num_threads(threads or os.cpu_count() or 1)
    big, row = torch.ones(1 << 13, 1 << 14), torch.ones(1 << 14)
    return round(big.nbytes / 1e9 / best(lambda: torch.mv(big, row), seconds, clock_of(threads)), 1)


def clock_of(threads: int | None) -> Callable[[], float]:
    """The clock of a measurement: that of the thread if there is one, which a busy machine disturbs less."""
    return time.thread_time if threads == 1 else time.perf_counter


def peaks(seconds: float = 2.0) -> dict[str, float]:
    """The machine's best: GB/s read, GFLOP/s in fp32 and bf16, GOP/s in int8, through torch, best of what fits in `seconds` each.

    Square matrices of 2048 in fp32, bf16 and, summed in int32, int8; for reading see `read_speed`.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    half_a, half_b, out = a.bfloat16(), b.bfloat16(), torch.empty(size, size)
    whole, other = (torch.randint(-127, 127, (size, size), dtype=torch.int8) for _ in range(2))
    work = 2 * size**3 / 1e9
    return {
        "read_gb_s": read_speed(seconds),
        "fp32_gflop_s": round(work / best(lambda: torch.mm(a, b, out=out), seconds), 1),
        "bf16_gflop_s": round(work / best(lambda: torch.mm(half_a, half_b), seconds), 1),
        "int8_gop_s": round(work / best(lambda: torch._int_mm(whole, other), seconds), 1),
    }


def best(call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """The least time of as many calls as fit into `seconds`, after one that does not count."""
    call()
    least, ends = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = clock()
        call()
        least = min(least, clock() - began)
    return least


def linear_flops(config: dict[str, Any]) -> tuple[int, int]:
    """Floating-point operations of a token's linear layers, and of its logits."""
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return 2 * layers * (hidden * (2 * queries + 2 * keys) + 3 * hidden * wide), 2 * hidden * config["vocab_size"]
