"""Launches compiled kernels without most of Triton's dispatch, which takes the host longer than a small kernel takes the device."""

# Triton has few types.
# mypy: disable-error-code="no-untyped-call,attr-defined,call-overload"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Kernel = Callable[..., None]


def jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Kernel], Any]:
    """`triton.jit` for kernels that each layer of a step launches. Launches must pass all that is not a constexpr by position."""

    def decorate(kernel: Kernel) -> Any:
        if knobs.runtime.interpret:
            return triton.jit(kernel, do_not_specialize=do_not_specialize)
        return CachedLaunch(kernel, do_not_specialize=do_not_specialize)

    return decorate


class CachedLaunch(JITFunction[Any]):
    """A kernel that remembers what was compiled for arguments of the same kind.

    That is all on which Triton specialises: constexprs by value, dtypes, pointers by whether they are multiples of 16 bytes, integers by
    whether they are 1, multiples of 16, or wider than 32 bits. vLLM caches launches too (its pull request 34838).
    """

    def __init__(self, kernel: Kernel, **options: Any) -> None:
        super().__init__(kernel, **options)
        self._count = next((place for place, parameter in enumerate(self.params) if parameter.is_constexpr), len(self.params))
        self._launches: dict[object, tuple[CompiledKernel, tuple[object, ...]]] = {}

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        """Launches the kernel. Triton compiles it for the first arguments of a kind."""
        count = self._count
        kinds = [
            (value.dtype, value.data_ptr() & 15 == 0)
            if type(value) is torch.Tensor  # isinstance would take longer than the rest
            else (value == 1, value & 15 == 0, value >> 31)
            if type(value) is int
            else type(value)
            for value in args[:count]
        ]
        key = (driver.active.get_current_device(), *kinds, args[count:], *constants.items())
        found = self._launches.get(key)
        if found is None:
            compiled = super().run(*args, grid=grid, warmup=warmup, **constants)
            self._launches[key] = compiled, tuple(constants[name] for name in self.arg_names[len(args) :])
            return compiled
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*args, *rest)
        return compiled
