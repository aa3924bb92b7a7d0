"""Devices to simulate: well-known ones by name, and measured ones from a file.

Sources of bandwidth and dense peak:

- H200, H100 (SXM): NVIDIA's H200 and H100 data sheets: 141 GB at 4.8 TB/s, 80 GB at 3.35 TB/s; 989 TFLOP/s in bfloat16.
- A100 (SXM, 80 GB): NVIDIA's A100 data sheet: 2.039 TB/s, 312 TFLOP/s.
- A10G: NVIDIA's A10G data sheet, as in AWS's G5: 24 GB at 600 GB/s, 70 TFLOP/s (an A10 has 125).
- L4: NVIDIA's L4 data sheet: 24 GB at 300 GB/s, 121 TFLOP/s (half of its figure for sparse matrices).
- RTX 4090: NVIDIA's Ada whitepaper: 24 GB at 1,008 GB/s, 165 TFLOP/s with float32 accumulation.
- cpu: two cores of a Xeon with AVX-512, measured: benches/results/linear.md.

The share of them that kernels reach is an assumption, not a measurement: 80 % of the bandwidth, 60 % of the peak, and 0.5 ms of overhead
a step. The cpu's shares are fitted to the table of linear.md. `chairlift calibrate` measures a machine instead.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.config import DEFAULT_SLOTS, DEFAULT_STEP_TOKENS
from chairlift.errors import InvalidSetting, writing
from chairlift.models.shape import ModelShape
from chairlift.sim.steps import Roof, StepTime, roofline

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "fp8": 1.0}
"""Bytes of one weight or KV element. int8 has a two-byte scale for each block of 32."""

_RESERVED = 2 << 30
"""Bytes of GPU memory reserved for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device: its memory in bytes, its roofline, and its default batch size.

    `link` is the bandwidth to host memory, in bytes a second each way. `dtype` is the default of weights and KV cache. With `fitted`, the
    roofline's shares were fitted to measurements; otherwise they are assumptions.
    """

    name: str
    memory: float
    roof: Roof
    link: float
    slots: int
    step_tokens: int
    dtype: str = "bfloat16"
    fitted: bool = False

    @property
    def basis(self) -> str:
        """The basis of the step times, for reports."""
        roof = self.roof
        shares = f"{roof.bandwidth_share:.0%} of its bandwidth, {roof.flops_share:.0%} of its peak, {roof.overhead_us / 1e3:g} ms overhead"
        source = "were fitted to one machine" if self.fitted else "are assumptions, not measurements"
        return (
            f"Step times come from a roofline of {self.name}, whose parameters ({shares}) {source}. Use it to compare settings "
            "and devices; its absolute error is unknown. 'chairlift calibrate' measures a machine."
        )

    def step_time(self, model: ModelShape, *, dtype: str, kv: str) -> StepTime:
        """The step times of `model` with these data types. Raises InvalidSetting for a `dtype` that the device lacks."""
        if dtype not in self.roof.flops:
            raise InvalidSetting(f"{self.name} computes in {', '.join(self.roof.flops)}, not {dtype}")
        return roofline(model, self.roof, weights=dtype, weight_bytes=BYTES[dtype], kv_bytes=kv_bytes(model, kv))

    def kv_memory(self, model: ModelShape, dtype: str) -> float:
        """Bytes that the weights leave for the KV cache; negative if the weights do not fit."""
        return 0.92 * self.memory - model.num_weights * BYTES[dtype] - _RESERVED * (self.memory > 2 * _RESERVED)


SIZES = ("num_kv_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""The sizes of a profile, with the scheduler's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine and a model, measured by `chairlift calibrate`: step times and the engine's sizes.

    `sizes` has num_kv_blocks (including the scratch block), block_size, max_model_len, max_num_seqs and max_num_batched_tokens. `errors`
    has the relative error of the step times at p50 and p90, and `spread`, the difference between repeats of the measurement. `model` is ""
    if a journal was measured without naming it. `data_types` has the settings dtype, quantization and kv_cache_dtype, if known.
    """

    name: str
    model: str
    step: StepTime
    sizes: dict[str, int]
    errors: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    data_types: dict[str, str] = field(default_factory=dict)

    @property
    def basis(self) -> str:
        """The basis of the step times, for reports."""
        model = f" with {self.model}" if self.model else ""
        errors = ", ".join(f"{error:.0%} at {name}" for name, error in self.errors.items() if name != "spread")
        spread = f"; repeats differed by {self.errors['spread']:.0%}" if "spread" in self.errors else ""
        return f"Step times were measured on {self.name}{model}{f', with an error of {errors}' if errors else ''}{spread}."

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON; raises InvalidSetting if it cannot."""
        raw = {name: getattr(self, name) for name in self.__slots__} | {"step": self.step.document()}
        with writing(path):
            Path(path).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a file that `save` wrote; raises InvalidSetting."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            profile = cls(step=StepTime.parse(raw.pop("step")), **raw)
            if missing := {*SIZES} - profile.sizes.keys():
                raise ValueError(f"sizes lack {', '.join(sorted(missing))}")
            if any(type(size) is not int or size < 1 for size in profile.sizes.values()):
                raise ValueError("sizes must be whole numbers above 0")
            if not isinstance(profile.name, str) or not isinstance(profile.model, str):
                raise ValueError("name and model must be text")
            if not all(isinstance(table, dict) for table in (profile.data_types, profile.errors, profile.measured)):
                raise ValueError("data_types, errors and measured must be tables")
            if not all(type(error) in (int, float) and 0 <= error < math.inf for error in profile.errors.values()):
                raise ValueError("errors must be numbers of at least 0")
            if type(profile.measured.get("most_tokens", 1)) is not int:
                raise ValueError("most_tokens must be a whole number")
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}): 'chairlift calibrate' writes such a file") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSetting(f"{path} is no profile of a machine ({error}): 'chairlift calibrate' writes such a file") from None
        return profile


def _gpu(name: str, gigabytes: float, terabytes: float, tflops: float, link: float, *, large: bool = False) -> Device:
    flops = {"bfloat16": tflops * 1e12, "float16": tflops * 1e12}
    roof = Roof(bandwidth=terabytes * 1e12, flops=flops, bandwidth_share=0.8, flops_share=0.6, overhead_us=500.0)
    # Steps of 2,048 tokens saturate each of these GPUs and keep ITL short.
    return Device(name=name, memory=gigabytes * 1e9, roof=roof, link=link, slots=512 if large else 256, step_tokens=2048)


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
            slots=DEFAULT_SLOTS,
            step_tokens=DEFAULT_STEP_TOKENS,
            dtype="int8",
            fitted=True,
        ),
    )
}
"""The well-known devices, by lower-case name."""


def device(name: str | Device | Profile) -> Device | Profile:
    """A well-known device, a profile from a file, or what is one already. Raises InvalidSetting with the known names."""
    if not isinstance(name, str):
        return name
    known = DEVICES.get(name.lower().replace(" ", "").replace("-", ""))
    if known is not None:
        return known
    if Path(name).suffix == ".json" or Path(name).exists():
        return Profile.load(name)
    names = ", ".join(one.name for one in DEVICES.values())
    raise InvalidSetting(f"--modelled-device {name}: unknown device; expected {names}, or a file of 'chairlift calibrate'")


def kv_bytes(model: ModelShape, kv: str) -> float:
    """KV cache bytes of one token, over all layers."""
    return sum(spec.kv_heads * (spec.head_dim + spec.value_dim) for spec in model.kv_specs) * BYTES[kv]
