"""The offline gate of the GPU kernels: compiles them for sm_90 (H100, H200) where there is no GPU, and tells what came of it.

Importing this skips a test file where Triton, or its copy of ptxas, is not installed.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not made for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

try:
    from triton.backends.nvidia.compiler import get_ptxas

    PTXAS = get_ptxas(90).path
except (ImportError, RuntimeError) as error:
    pytest.skip(f"this Triton comes without ptxas: {error}", allow_module_level=True)

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have."""


@dataclass(frozen=True)
class Compiled:
    """What ptxas and the PTX say of one variant of a kernel.

    `loads` and `stores` count instructions that move so many bytes a thread between global memory and registers or, asynchronously,
    shared memory: 16 is the widest, and fewer for neighbouring numbers mean that the compiler did not know that they are aligned.
    """

    registers: int
    spilled: int
    """Bytes of registers spilled, stores and loads."""
    shared_memory: int
    """Bytes a program."""
    wgmma: int
    mma: int
    """Matrix products of a warp group, of sm_90's fast kind; and of a warp."""
    loads: Counter[int]
    stores: Counter[int]
    ptx: str


def compiled(kernel: object, arguments: dict[str, object], *, num_warps: int = 4, num_stages: int = 3) -> Compiled:
    """Compiles a `triton.jit` function, which must not be interpreted.

    `arguments` names every parameter of the kernel, as in Triton's ahead-of-time compiler: a type ("*bf16", "i32", "fp32") with
    ":16" after it where pointer or number are multiples of 16 (which Triton finds out itself when it launches); or, for a
    constexpr, its value.
    """
    types = {name: value for name, value in arguments.items() if isinstance(value, str)}
    constants = {name: value for name, value in arguments.items() if name not in types}
    signature = {name: types[name].removesuffix(":16") if name in types else "constexpr" for name in kernel.arg_names}
    aligned = [(kernel.arg_names.index(name),) for name, kind in types.items() if kind.endswith(":16")]
    source = ASTSource(kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})
    ptx = built.asm["ptx"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(ptx)
        command = [PTXAS, "-arch=sm_90a", "-v", str(path), "-o", str(path.with_suffix(".cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Compiled(
        registers=int(re.search(r"Used (\d+) registers", told)[1]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        shared_memory=built.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        loads=_widths("ld", ptx) + Counter(int(size, 0) for size in re.findall(r"cp\.async\.c[ag][^;]*?\], (\w+)", ptx)),
        stores=_widths("st", ptx),
        ptx=ptx,
    )


def _widths(verb: str, ptx: str) -> Counter[int]:
    """Loads (ld) or stores (st) of global memory by bytes: vectors of up to 8 numbers of 8 to 64 bits."""
    found = re.findall(rf"\b{verb}\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
