"""New keys and values to their slots in the pages: a program a token.

Axes:    A = rows, T = tokens a row, G = KV heads, D = head dim; S = slots a page
Bytes:   each key and value is read once and written once
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.kernels.fp8 import encode_e4m3
from microllm.ops.kernels.launch import Compiled, overlapping, pdl
from microllm.ops.kernels.pages import AS_IT_IS, E4M3FN_BYTES, E4M3FNUZ_BYTES, alike, as_stored
from microllm.ops.target import INTERPRETER

MAX_TOKEN = 16384
"""Most numbers of a token's keys that a program holds."""


@triton.jit(do_not_specialize=["T"])
def kv_store_paged_kernel(
    k_pages, v_pages, k_ptr, v_ptr, table_ptr, positions_ptr, T, page_stride, slot_stride, group_stride,
    row_stride, token_stride, head_stride, table_stride, positions_stride,
    S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one token's k and v [G, D] to its slot, rounded once; grid (A * T,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a, t = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    position = tl.load(positions_ptr + a * positions_stride + t).to(tl.int32)
    page = tl.load(table_ptr + a * table_stride + position // S, mask=position >= 0, other=0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = (i < G * D) & (position >= 0)
    source = a * row_stride + t * token_stride + (i // D) * head_stride + i % D
    place = page * page_stride + position % S * slot_stride + (i // D) * group_stride + i % D
    k, v = tl.load(k_ptr + source, mask=ok), tl.load(v_ptr + source, mask=ok)
    if FORMAT == 0:
        tl.store(k_pages + place, k.to(tl.float32).to(k_pages.dtype.element_ty), mask=ok)
        tl.store(v_pages + place, v.to(tl.float32).to(v_pages.dtype.element_ty), mask=ok)
    else:
        tl.store(k_pages + place, encode_e4m3(k.to(tl.float32), FORMAT == 2), mask=ok)
        tl.store(v_pages + place, encode_e4m3(v.to(tl.float32), FORMAT == 2), mask=ok)


def suits(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a program can hold a token, and k's offsets are v's."""
    if not (alike(k_pages, v_pages) and alike(k, v)):
        return False, "k and v lie differently"
    return 0 < k[0, 0].numel() <= MAX_TOKEN if k.numel() else True, f"tokens of 1 to {MAX_TOKEN} numbers"


def run(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, page_table: Tensor, positions: Tensor, *, out: None = None
) -> None:
    """Run ``kv_store_paged``."""
    A, T, G, D = k.shape
    if not k.numel():
        return
    (k_pages, form), (v_pages, _) = (as_stored(pages, INTERPRETER) for pages in (k_pages, v_pages))
    overlap = pdl(k.device)
    kv_store_paged_kernel[(A * T,)](
        k_pages, v_pages, k, v, page_table, positions, T, *k_pages.stride()[:3], *k.stride()[:3], page_table.stride(0),
        positions.stride(0), S=k_pages.shape[1], G=G, D=D, BLOCK=triton.next_power_of_2(G * D), FORMAT=form,
        PDL=overlap, num_warps=_num_warps(G * D), **overlapping(overlap),
    )  # fmt: skip


def _num_warps(numbers: int) -> int:
    return 1 if numbers <= 256 else 4


def _compiled() -> tuple[Compiled, ...]:
    strides = ("page_stride", "slot_stride", "group_stride", "row_stride", "token_stride", "head_stride")
    sizes = dict.fromkeys(strides, "i32:16") | dict.fromkeys(("T", "table_stride", "positions_stride"), "i32")
    cases = []
    for G, D in ((2, 64), (8, 128)):
        fp8 = (("*bf16", "*u8", E4M3FN_BYTES), ("*bf16", "*u8", E4M3FNUZ_BYTES))
        for dtype, pages, form in (("*bf16", "*bf16", AS_IT_IS), ("*fp32", "*fp32", AS_IT_IS), *fp8):
            pointers = {"k_pages": pages, "v_pages": pages, "k_ptr": dtype, "v_ptr": dtype}
            pointers |= {"table_ptr": "*i32", "positions_ptr": "*i64"}
            fixed = {"S": 16, "G": G, "D": D, "BLOCK": triton.next_power_of_2(G * D), "FORMAT": form, "PDL": True}
            cases.append(Compiled(kv_store_paged_kernel, pointers | sizes, fixed, _num_warps(G * D), uses=("pdl",)))
    return tuple(cases)


COMPILED = _compiled()
