"""What kernel files have in common: the forms of their tables, block sizes, overlapped launches, scratch memory.

Place: imported by every file in ``kernels/``. Holds no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microllm.ops.select import is_overlapped
from microllm.ops.target import Target, target_of
from microllm.ops.tuned import has_entries


class Kernel(NamedTuple):
    """An operator's kernel: how to run it, and whether it suits a call."""

    run: Callable[..., Any]
    suits: Callable[..., tuple[bool, str]]


class Compiled(NamedTuple):
    """A case that a kernel is compiled for ahead of time, on every target, with pointers aligned to 16 bytes.

    ``signature``: arguments known at launch only, with their Triton types ("*bf16", "*fp32", "i32", "fp32"); "i32:16"
    is known to be a multiple of 16, as Triton finds strides to be when it launches.
    ``constexprs``: all others: sizes, blocks, flags, and pointers that are absent (None). A case with PDL=True is
    compiled with False for a target that has no such launches.
    ``uses``: what the target must have, or the compiler must have used: "pdl", "wgmma", "fp8",
    "warps of 32", "much shared memory" (200 kB).
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 1
    uses: tuple[str, ...] = ()
    fusion: bool = True  # False: no product is fused with a sum but by tl.fma (Triton's enable_fp_fusion)
    max_registers: int = 0  # a thread, where a launch is ``capped``
    may_spill: int = 0  # bytes a thread that were measured to cost less than what the registers bring


def noting(suits: Callable[..., tuple[bool, str]], is_tuned: Callable[..., bool]) -> Callable[..., tuple[bool, str]]:
    """Return ``suits`` with a reason that says "tuned" where an entry of ``tuned.json`` has a part in the call."""

    def told(*values: Any) -> tuple[bool, str]:
        good, reason = suits(*values)
        return good, f"{reason}; tuned" if good and has_entries() and is_tuned(*values) else reason

    return told


def row_stride(x: Tensor | None) -> int:
    """Return how far apart the rows of x lie, its leading axes being one; 0 where there is no x."""
    if x is None:
        return 0
    return x.shape[-1] if x.is_contiguous() else x.stride(-2)


def pdl(device: torch.device) -> bool:
    """Say whether a kernel launched now on ``device`` takes part in overlapped launches."""
    return is_overlapped() and target_of(device).pdl


def overlapping(overlap: bool) -> dict[str, bool]:
    """Return the options of a launch that overlaps; none where it does not, for AMD's compiler knows no such option."""
    return {"launch_pdl": True} if overlap else {}


def capped(target: Target, registers: int) -> dict[str, int]:
    """Return the option that holds a launch to so many registers a thread, from Hopper on; none for 0."""
    return {"maxnreg": registers} if registers and target.pdl else {}


def stream_of(x: Tensor) -> int:
    """Return the number of the stream that kernels on x's device are launched on."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@cache
def zeros(device: torch.device, stream: int, count: int) -> Tensor:
    """Return the counters of a stream: how many parts of a result are done, 0 between launches."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def scratch(device: torch.device, stream: int, name: str, numel: int) -> Tensor:
    """Return fp32 memory for what an operator's first kernel hands to its second: one for a stream, never freed.

    So a captured step that ran once before allocates nothing, and its graph may be replayed for ever.
    """
    return torch.empty(numel, dtype=torch.float32, device=device)
