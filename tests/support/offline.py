"""The compile gate: compiles GPU kernels where there is no GPU and reports registers, shared memory and instructions.

Importing this skips a test file where Triton, or its copy of NVIDIA's tools, is not installed. By default the tests compile a sample. With
COMPILE_GATE=full in the environment (`make compile-gate`) they compile all shapes for all devices.
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

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
if not CUOBJDUMP.exists():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""Triton's version, without its last number."""

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a program may have, by compute capability: A100; 3090, A10; 4090, L4; H100; B200; 5090."""

SPILLS: dict[tuple[int, int], dict[tuple[object, ...], int]] = {
    (3, 9): {("advance_heads", 80, "qwen3-next"): 8, ("expert_linear", 120, 0, "mxfp4"): 8},
    (3, 6): {("prefill", 90, "gemma-4-full", "bf16, fp8 cache"): 816, ("expert_linear", 120, 0, "mxfp4"): 8},
    (3, 4): {
        ("decode of 4", 89, "gemma-2-9b", "bf16, fp8 cache"): 72,
        ("sum 2", 80): 8,
        **{("expert_linear", device, mean, "mxfp4"): 8 for device in (86, 89, 120) for mean in (64, 256)},
    },
}
"""Bytes of a thread's stack by version of Triton and variant, where they are more than other versions': slower, and as right."""


def most_spilled(usual: int, *variant: object) -> int:
    """The most bytes that a variant of a kernel may spill: `usual`, or what SPILLS says of this version of Triton."""
    return SPILLS.get(VERSION, {}).get(variant, usual)


@dataclass(frozen=True)
class Compiled:
    """What the cubin and the PTX say of one variant of a kernel.

    `loads` and `stores` count instructions that move so many bytes a thread between global memory and registers or, asynchronously,
    shared memory: 16 is the widest, and fewer for neighbouring numbers mean that the compiler did not know that they are aligned.
    """

    registers: int
    spilled: int
    """Bytes of a thread's stack, to which ptxas spills registers."""
    shared_memory: int
    """Bytes a program."""
    wgmma: int
    mma: int
    """Matrix products of a warp group, of sm_90's fast kind; and of a warp."""
    loads: Counter[int]
    stores: Counter[int]
    ttgir: str
    """Triton's own code, after its passes for GPUs."""
    ptx: str
    cubin: bytes

    def device_loads(self) -> Counter[int]:
        """`loads` of the device's own code: of several that read the same, ptxas makes one."""
        widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        instructions = re.findall(r"\bLDG(?:STS)?\.E[.\w]*", _cuobjdump("--dump-sass", self.cubin))
        return Counter(next((widths[part] for part in one.split(".") if part in widths), 4) for one in instructions)


def compiled(kernel: object, arguments: dict[str, object], *, capability: int = 90, num_warps: int = 4, num_stages: int = 3) -> Compiled:
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
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, cubin = built.asm["ptx"], built.asm["cubin"]
    usage = _cuobjdump("--dump-resource-usage", cubin)
    return Compiled(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared_memory=built.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        loads=_widths("ld", ptx) + Counter(int(size, 0) for size in re.findall(r"cp\.async\.c[ag][^;]*?\], (\w+)", ptx)),
        stores=_widths("st", ptx),
        ttgir=built.asm["ttgir"],
        ptx=ptx,
        cubin=cubin,
    )


def _cuobjdump(what: str, cubin: bytes) -> str:
    """What NVIDIA's tool says of compiled code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(CUOBJDUMP), what, file.name], capture_output=True, text=True, check=True).stdout


def _widths(verb: str, ptx: str) -> Counter[int]:
    """Loads (ld) or stores (st) of global memory by bytes: vectors of up to 8 numbers of 8 to 64 bits."""
    found = re.findall(rf"\b{verb}\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
