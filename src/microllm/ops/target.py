"""What a kernel may use on a device, as data: kernels ask the target, never ``torch.cuda``.

Place: launchers take their options from ``target_of(device)``; ahead-of-time compilation goes through ``TARGETS`` with
no device at all. Imports no triton. Does not say how fast a device is, nor how many of its parts there are.

Source:  shared memory a program: NVIDIA's compute capabilities table, AMD's CDNA 3 and CDNA 4 instruction set manuals
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Fp8 = Literal["e4m3fn", "e4m3fnuz", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of device, in the words of Triton's ``GPUTarget`` and of what kernels ask.

    ``pdl``: a kernel may begin before the one ahead of it ends. ``fp8``: the 8-bit floats that are loaded as such; any
    others are read as bytes and decoded. ``wgmma``: the matrix instruction of a group of four warps.

    Units:   ``shared_bytes`` a program, at most
    """

    backend: Literal["cuda", "hip", "cpu"]
    arch: int | str
    warp_size: int
    shared_bytes: int
    pdl: bool = False
    fp8: Fp8 = "none"
    wgmma: bool = False

    @property
    def name(self) -> str:
        """The architecture as compilers spell it."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """The dtype of ``fp8``, or None."""
        return {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "none": None}[self.fp8]


def _nvidia(capability: int, shared_kib: int) -> Target:
    return Target(
        backend="cuda", arch=capability, warp_size=32, shared_bytes=shared_kib * 1024, pdl=capability >= 90,
        fp8="e4m3fn" if capability >= 89 else "none", wgmma=capability == 90,
    )  # fmt: skip


def _amd(arch: str, shared_kib: int, fp8: Fp8) -> Target:
    return Target(backend="hip", arch=arch, warp_size=64, shared_bytes=shared_kib * 1024, fp8=fp8)


_ALL = (
    _nvidia(80, 163), _nvidia(90, 227), _nvidia(100, 227),
    _amd("gfx942", 64, "e4m3fnuz"), _amd("gfx950", 160, "e4m3fn"),
)  # fmt: skip
MUCH_SHARED_BYTES = 200_000
"""Shared memory from which on tiles of four stages fit."""
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
"""The targets that every kernel is compiled for ahead of time, by name."""

INTERPRETER = Target(backend="cpu", arch="interpreter", warp_size=1, shared_bytes=2**30)
"""What a CPU is to a kernel: Triton's interpreter. It has no 8-bit floats: they are read as bytes and decoded."""


@cache
def target_of(device: torch.device) -> Target:
    """Return the target of a live device, its numbers read off the device; a CPU is the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = found.gcnArchName.partition(":")[0]
        known = TARGETS.get(arch)
        return known or Target(
            backend="hip", arch=arch, warp_size=found.warp_size, shared_bytes=found.shared_memory_per_block
        )
    return _nvidia(10 * found.major + found.minor, found.shared_memory_per_block_optin // 1024)
