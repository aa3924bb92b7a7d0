"""The part of `kernels.py` that times attention with other launch settings."""

from __future__ import annotations

import itertools
import math
from functools import partial

import common
from pool import DIM, HEADS, KV_HEADS, Pool


def sweep(run: common.Run) -> None:
    """Times attention with other launch settings than `launch_settings.py` chooses, each a part of its own."""
    import torch

    from chairlift.kernels import launch_settings, paged_decode, paged_prefill
    from chairlift.kernels.launch_settings import LaunchSettings

    half = torch.float16 if run.dry else torch.bfloat16
    shape = launch_settings.HeadShape(HEADS // KV_HEADS, DIM, DIM, 2, 2)
    limits = launch_settings.device_limits(torch.device(run.device))
    chosen = launch_settings.decode_settings(shape, 1, limits), launch_settings.prefill_settings(shape, limits)
    decodes = [LaunchSettings(16, *rest) for rest in itertools.product((32, 64, 128), (4, 8), (2, 3, 4))]
    prompts = [LaunchSettings(*each) for each in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))]
    steps = {"decode": [(1, 40)] * 2, "prefill": [(20, 20)]} if run.dry else {"decode": [(1, 2048)] * 64, "prefill": [(4096, 4096)]}

    def timed(kind: str, settings: LaunchSettings) -> None:
        usual = launch_settings.decode_settings, launch_settings.prefill_settings
        # The modules that launch have names of their own for it.
        users = [paged_decode] if kind == "decode" else [launch_settings, paged_prefill]
        name = f"{kind}_settings"
        for user in users:
            setattr(user, name, lambda *_: settings)
        try:
            pool = Pool(run, sum(context + 64 for _, context in steps[kind]), 2, 16, half)
            query = torch.randn(sum(queries for queries, _ in steps[kind]), HEADS, DIM, device=run.device).to(half)
            seconds = common.time_calls(run, pool.calls(steps[kind], query)[: None if kind == "decode" else 4], repeats=7)
        finally:
            for user in users:
                setattr(user, name, usual[kind == "prefill"])
        run.row(f"Launch settings, {kind}", settings._asdict() | {"us": seconds * 1e6, "chosen": "yes" if settings in chosen else ""})

    for kind, own, all_settings in (("decode", chosen[0], decodes), ("prefill", chosen[1], prompts)):
        # Those near the chosen ones first, the chosen ones included.
        near = sorted(all_settings, key=lambda other, own=own: sum(abs(math.log2(a / b)) for a, b in zip(own, other, strict=True)))
        for settings in near[:1] if run.dry else near:
            if launch_settings.shared_memory(shape, settings, limits.capability) <= limits.shared_memory:
                rows, keys, warps, stages = settings
                run.part(f"sweep-{kind}-{rows}x{keys}-{warps}w-{stages}s", partial(timed, kind, settings), most=20)
