"""Machines to simulate: published ones by name, and measured ones from a file.

Bandwidth and dense peaks are what the makers print:

- H200, H100 (SXM): NVIDIA's H200 and H100 data sheets: 141 GB at 4.8 TB/s, 80 GB at 3.35 TB/s; 989 TFLOP/s in bfloat16.
- A100 (SXM, 80 GB): NVIDIA's A100 data sheet: 2.039 TB/s, 312 TFLOP/s.
- A10G: NVIDIA's A10G data sheet, as in AWS's G5: 24 GB at 600 GB/s, 70 TFLOP/s (an A10 has 125).
- L4: NVIDIA's L4 data sheet: 24 GB at 300 GB/s, 121 TFLOP/s (half of what it prints for sparse matrices).
- RTX 4090: NVIDIA's Ada whitepaper: 24 GB at 1,008 GB/s, 165 TFLOP/s with sums in float32.
- cpu: two cores of a Xeon with AVX-512, measured: benches/results/linear.md.

What part of these kernels reach is an assumption, not a measurement: 80 % of the bandwidth, 60 % of the peak, and half a millisecond in
each step for all else. The cpu's parts are fitted to the table of linear.md. `chairlift calibrate` measures a machine instead.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.config import DEFAULT_SEATS, DEFAULT_STEP_TOKENS
from chairlift.errors import InvalidSetting
from chairlift.models.shape import ModelShape
from chairlift.sim.steps import Roof, StepTime, roofline

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "fp8": 1.0}
"""Bytes of a number of the weights or of the KV cache; int8 has a scale of two bytes for each block of 32."""

_RESERVED = 2 << 30
"""Bytes of a GPU's memory that are kept for a step's arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A machine: its memory in bytes, what it can do, and how large its steps are where nobody says.

    `link` is the bandwidth to the host's memory, in bytes a second each way. `dtype` is what weights and KV are kept in by default.
    `fitted` says that the roof's shares were fitted to measurements; elsewhere they are assumptions.
    """

    name: str
    memory: float
    roof: Roof
    link: float
    seats: int
    step_tokens: int
    dtype: str = "bfloat16"
    fitted: bool = False

    @property
    def basis(self) -> str:
        """What its steps' times rest on, for whoever reads the numbers."""
        roof = self.roof
        shares = (
            f"{roof.bandwidth_share:.0%} of its bandwidth, {roof.flops_share:.0%} of its peak, {roof.overhead_us / 1e3:g} ms a step more"
        )
        what = "were fitted to one machine" if self.fitted else "are assumptions, not measurements"
        return (
            f"Steps are by a roofline of {self.name}, whose parts ({shares}) {what}: it is there to compare settings and machines; "
            "how far its absolute numbers are off is not known. 'chairlift calibrate' measures a machine."
        )

    def step_time(self, model: ModelShape, *, dtype: str, kv: str) -> StepTime:
        """What steps of `model` take with weights and KV of these types; raises InvalidSetting where the machine has no such."""
        if dtype not in self.roof.flops:
            raise InvalidSetting(f"{self.name} computes in {', '.join(self.roof.flops)}, not in {dtype}")
        return roofline(model, self.roof, weights=dtype, weight_bytes=BYTES[dtype], kv_bytes=kv_bytes(model, kv))

    def kv_memory(self, model: ModelShape, dtype: str) -> float:
        """Bytes for the KV cache beside the weights; below 0 where these do not fit."""
        return 0.92 * self.memory - model.num_weights * BYTES[dtype] - _RESERVED * (self.memory > 2 * _RESERVED)


_SIZES = {"num_kv_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine with a model, measured by `chairlift calibrate`: what steps take, and the engine's sizes there.

    `sizes` has num_kv_blocks (the scratch block included), block_size, max_model_len, max_num_seqs and max_num_batched_tokens. `errors`
    say how well the steps' times are told: the part by which one differs from what was measured, at p50 and p90. `model` is "" where a
    journal was measured and nobody said whose. `kept` has dtype, quantization and kv_cache_dtype as they were asked for, if that is known.
    """

    name: str
    model: str
    step: StepTime
    sizes: dict[str, int]
    errors: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def basis(self) -> str:
        """What its steps' times rest on, for whoever reads the numbers."""
        model = f" with {self.model}" if self.model else ""
        off = ", ".join(f"{error:.0%} at {name}" for name, error in self.errors.items())
        return f"Steps take what was measured on {self.name}{model}{f'; single ones are off by {off}' if off else ''}."

    def save(self, path: str | Path) -> None:
        """Writes it as JSON; raises InvalidSetting where it can't be."""
        raw = {name: getattr(self, name) for name in self.__slots__} | {"step": self.step.document()}
        try:
            Path(path).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot write there ({error.strerror}); name a file in a directory that exists") from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote; raises InvalidSetting for anything else."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            raw.pop("swap_ns_per_block", None)  # older files have it, and it was always 0
            profile = cls(step=StepTime.parse(raw.pop("step")), **raw)
            if missing := _SIZES - profile.sizes.keys():
                raise ValueError(f"sizes lack {', '.join(sorted(missing))}")
            if any(type(size) is not int or size < 1 for size in profile.sizes.values()):
                raise ValueError("sizes are whole numbers above 0")
            if not isinstance(profile.name, str) or not isinstance(profile.model, str):
                raise ValueError("its name or its model is no text")
            if not all(isinstance(table, dict) for table in (profile.kept, profile.errors, profile.measured)):
                raise ValueError("kept, errors and measured are tables")
            if not all(type(error) in (int, float) and 0 <= error < math.inf for error in profile.errors.values()):
                raise ValueError("errors are numbers from 0 on")
            if type(profile.measured.get("most_tokens", 1)) is not int:
                raise ValueError("most_tokens is a whole number")
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); 'chairlift calibrate' writes such a file") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSetting(f"{path} is no profile of a machine ({error}); 'chairlift calibrate' writes one") from None
        return profile


def _gpu(name: str, gigabytes: float, terabytes: float, tflops: float, link: float, *, large: bool = False) -> Device:
    flops = {"bfloat16": tflops * 1e12, "float16": tflops * 1e12}
    roof = Roof(bandwidth=terabytes * 1e12, flops=flops, bandwidth_share=0.8, flops_share=0.6, overhead_us=500.0)
    # Steps of 2,048 tokens keep the time between tokens short; they fill the units of any of these.
    return Device(name=name, memory=gigabytes * 1e9, roof=roof, link=link, seats=512 if large else 256, step_tokens=2048)


DEVICES = {
    device.name.lower(): device
    for device in (
        _gpu("H200", 141, 4.8, 989, 55e9, large=True),
        _gpu("H100", 80, 3.35, 989, 55e9, large=True),
        _gpu("A100", 80, 2.039, 312, 25e9, large=True),
        _gpu("A10G", 24, 0.6, 70, 25e9),
        _gpu("L4", 24, 0.3, 121, 12e9),
        _gpu("RTX4090", 24, 1.008, 165, 25e9),
        Device(
            name="cpu",
            memory=8e9,
            roof=Roof(
                bandwidth=29.4e9,
                flops={"float32": 326.5e9, "bfloat16": 326.5e9, "float16": 326.5e9, "int8": 326.5e9},
                bandwidth_share=0.5,
                flops_share=0.65,
                overhead_us=400.0,
            ),
            link=5e9,
            seats=DEFAULT_SEATS,
            step_tokens=DEFAULT_STEP_TOKENS,
            dtype="int8",
            fitted=True,
        ),
    )
}
"""The machines that are known, by their names in lower case."""


def device(name: str) -> Device | Profile:
    """A known machine, or one from a file; raises InvalidSetting with the names that are known."""
    known = DEVICES.get(name.lower().replace(" ", "").replace("-", ""))
    if known is not None:
        return known
    if Path(name).suffix == ".json" or Path(name).exists():
        return Profile.load(name)
    names = ", ".join(one.name for one in DEVICES.values())
    raise InvalidSetting(f"--device {name}: no such machine; there are {names}, and files that 'chairlift calibrate' wrote")


def kv_bytes(model: ModelShape, kv: str) -> float:
    """Bytes of one token's keys and values over all layers."""
    return sum(spec.kv_heads * (spec.head_dim + spec.value_dim) for spec in model.kv_specs) * BYTES[kv]
