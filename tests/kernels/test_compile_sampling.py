import re

import pytest
from compile_gate import FULL
from offline import SHARED_MEMORY, compiled, most_spilled

from chairlift.kernels.sampling import gumbel, logprobs, penalties, threshold

pytestmark = pytest.mark.slow

LONGS = {"seed_ptr", "best_ptr", "sums_ptr", "state_ptr", "likeliest_ptr", "places_ptr"}
INTS = {
    "rows_ptr",
    "positions_ptr",
    "least_ptr",
    "tokens_ptr",
    "last_token_ptr",
    "said_ptr",
    "slot_ptr",
    "top_k_ptr",
    "likelier_ptr",
    "lines_ptr",
}

VARIANTS = {
    "draw": (gumbel._draw_kernel, 4, {"block": gumbel.BLOCK}),
    "choose": (gumbel._choose_kernel, 1, {"counts": True, "width": 64}),
    "penalise": (penalties._penalise_kernel, 8, {"block": penalties.BLOCK}),
    **{
        f"sum {level}": (threshold._sum_kernel, 8, {"level": level, "block": threshold.BLOCK, "blocks": threshold.BLOCKS, "width": 8})
        for level in range(6)
    },
    "least": (threshold._least_kernel, 8, {"width": 8}),
    "part": (logprobs._part_kernel, 8, {"block": logprobs.BLOCK, "best_ptr": "*fp32:16"}),
    "line": (logprobs._line_kernel, 4, {"width": 32, "candidates": 1024, "best_ptr": "*fp32:16"}),
}
"""The kernels that are launched for a vocabulary of 128,256, and their warps."""


@pytest.mark.parametrize("capability", SHARED_MEMORY if FULL else [90])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_without_spills_and_loads_logits_sixteen_bytes_at_a_time(name, capability):
    kernel, warps, special = VARIANTS[name]
    arguments = {}
    for argument in kernel.arg_names:
        if argument.endswith("_ptr"):
            kind = "i64" if argument in LONGS else "i32" if argument in INTS else "fp32"
            arguments[argument] = f"*{kind}:16"
        else:
            arguments[argument] = "i32:16" if argument in ("stride", "vocabulary") else "i32"
    found = compiled(kernel, arguments | special, capability=capability, num_warps=warps)
    assert found.spilled <= most_spilled(0, name, capability)
    assert found.shared_memory <= SHARED_MEMORY[capability]
    if "block" in special:
        # Each thread's share of a block of logits (of what was said, in penalties), which lies in one place.
        assert found.loads[16] >= special["block"] // (32 * warps) // 4
        assert found.loads[16] >= found.loads[4] or name == "penalise"
    if name.startswith("sum"):
        # Nobody reads what was there before, so that older versions' `atom` is a `red` to ptxas as well.
        assert re.search(r"(red|atom)\.global\.gpu\.relaxed\.add\.u64", found.ptx)
