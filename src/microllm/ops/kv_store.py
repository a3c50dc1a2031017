"""Write keys and values into a cache at each row's own positions: a dense buffer a row, or pages.

Axes:    B or A = rows, T = tokens, C = cache capacity, G = KV heads, D = head dim,
         P = pages, S = slots a page, N = pages a row (position p of a row lies in slot p % S of its page p // S)
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import EXACT, FLOATS, INT64, TRITON, Arg, Contract, Rule, Sizes, cases, in_range, numel
from microllm.ops.operator import Operator

KV_DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""What a cache may hold: any of these, whatever the dtype of the new keys and values."""


def kv_store(cache: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Write values[b, t] to cache[b, positions[b, t]] in place and return the cache; no gradient goes through it.

    Shapes:  cache [B, C, G, D], values [B, T, G, D], positions [B, T] int64 -> cache
    Numbers: exact; rounded once to the cache's dtype, saturated where that is fp8
    Raises:
        OperatorError: sizes differ, or (on a CPU) a position is outside 0..C-1.
    """
    KV_STORE(cache, values.detach(), positions)
    return cache


def kv_store_paged(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, page_table: Tensor, positions: Tensor
) -> None:
    """Write k[a, t] and v[a, t] in place to row a's slot of positions[a, t]; a position of -1 stores nothing.

    Shapes:  k_pages, v_pages [P, S, G, D], k, v [A, T, G, D], page_table [A, N] int32, positions [A, T] int64
    Numbers: as ``kv_store``
    Raises:
        OperatorError: sizes differ, or (on a CPU) a position is outside -1..N*S-1 or its page outside 0..P-1.
    """
    KV_STORE_PAGED(k_pages, v_pages, k, v, page_table, positions)


def _put(cache: Tensor, place: tuple[Tensor, Tensor], values: Tensor) -> None:
    if cache.dtype.itemsize > 1:
        cache[place] = values.to(cache.dtype)
    else:  # saturated, and as bytes, since torch has no indexed assignment of fp8
        largest = torch.finfo(cache.dtype).max
        cache.view(torch.uint8)[place] = values.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)


def _reference(cache: Tensor, values: Tensor, positions: Tensor) -> None:
    _put(cache, (torch.arange(cache.shape[0], device=cache.device)[:, None], positions), values)


def store_reference(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, page_table: Tensor, positions: Tensor
) -> None:
    """Write to the pages by indexed assignment."""
    size, active = k_pages.shape[1], positions >= 0
    page = page_table.long().gather(1, positions.clamp(min=0) // size)
    place = page[active], (positions % size)[active]
    _put(k_pages, place, k[active])
    _put(v_pages, place, v[active])


def pages_in_range(pages: Tensor, page_table: Tensor, positions: Tensor) -> bool:
    """Say whether positions lie in their rows' page tables, and the pages up to each row's last in ``pages``."""
    num_pages, size = pages.shape[:2]
    if not positions.numel() or not in_range(positions, -1, page_table.shape[1] * size):
        return not positions.numel()
    used = torch.arange(page_table.shape[1]) * size <= positions.amax(dim=1, keepdim=True)
    return in_range(page_table[used], 0, num_pages)


def draw_page_table(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw pages in any order, none of them twice."""
    return torch.randperm(sizes["P"], generator=generator)[: shape[0] * shape[1]].view(shape).to(dtype)


def _distinct(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    room = sizes["C"] if "C" in sizes else sizes["N"] * sizes["S"]
    return torch.stack([torch.randperm(room, generator=generator)[: shape[1]] for _ in range(shape[0])])


def page_rules(pages: int, table: int) -> tuple[Rule, ...]:
    """Return the rules on pages: argument ``pages`` and the next are k's and v's, ``table`` and the next say where."""
    return (
        Rule(
            "k_pages and v_pages of one dtype", lambda *v: v[pages].dtype == v[pages + 1].dtype,
            ({"v_pages": lambda c: c["v_pages"].bfloat16()},),
        ),
        Rule(
            "positions from -1 to N * S - 1, and their pages from 0 to P - 1",
            lambda *v: pages_in_range(v[pages], v[table], v[table + 1]), (
                {"positions": lambda c: c["positions"] + c["page_table"].shape[1] * c["k_pages"].shape[1]},
                {"positions": lambda c: c["positions"] * 0 - 2},
                {"page_table": lambda c: c["page_table"] + c["k_pages"].shape[0]},
                {"page_table": lambda c: c["page_table"] - c["k_pages"].shape[0]},
            ), by_value=True,
        ),
    )  # fmt: skip


def pages(name: str, *, mutated: bool = False) -> Arg:
    """Return the argument of one pool of pages."""
    return Arg(name, "PSGD", dtypes=KV_DTYPES, mutated=mutated)


TABLE = Arg("page_table", "AN", draw_page_table, (torch.int32,))

KV_STORE = Operator(Contract(
    name="kv_store", args=(
        Arg("cache", "BCGD", dtypes=KV_DTYPES, mutated=True), Arg("values", "BTGD", layout="any"),
        Arg("positions", "BT", _distinct, INT64),
    ),
    rules=(Rule(
        "positions from 0 to C - 1", lambda cache, values, positions: in_range(positions, 0, cache.shape[1]),
        ({"positions": lambda c: c["positions"] + 9}, {"positions": lambda c: c["positions"] - 9}), by_value=True,
    ),),
    reference=_reference, sizes=cases("B3 C9 T4 G2 D16", "B1 C1 T1 G1 D1"), forward=EXACT,
    traffic=lambda s, item: 2 * numel(s, "BTGD") * item, num_flops=lambda s: 0,
))  # fmt: skip

KV_STORE_PAGED = Operator(Contract(
    name="kv_store_paged", args=(
        pages("k_pages", mutated=True), pages("v_pages", mutated=True), Arg("k", "ATGD"), Arg("v", "ATGD"),
        TABLE, Arg("positions", "AT", _distinct, INT64),
    ),
    rules=page_rules(0, 4), reference=store_reference, levels=TRITON, forward=EXACT,
    sizes=cases("P9 S4 A3 N2 T5 G2 D16", "P1 S1 A1 N1 T1 G1 D1"),
    traffic=lambda s, item: 4 * numel(s, "ATGD") * item, num_flops=lambda s: 0,
))  # fmt: skip
