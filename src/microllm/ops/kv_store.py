"""Write keys and values into a cache at each row's own positions.

Axes:    B = batch, T = tokens, C = cache capacity, G = KV heads, D = head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import Arg, Contract, Refusal, Sizes, Tolerance, changed, normal, require


def kv_store(cache: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Write values[b, t] to cache[b, positions[b, t]] in place and return the cache.

    Shapes:  cache [B, C, G, D], values [B, T, G, D], positions [B, T] int64 -> cache
    Numbers: exact; rounded once to the cache's dtype
    Raises:
        OperatorError: sizes differ, or (on a CPU) a position is outside 0..C-1.
    """
    require(
        cache.dim() == values.dim() == 4
        and (cache.shape[0], *cache.shape[2:]) == (values.shape[0], *values.shape[2:]),
        "kv_store",
        f"cache {tuple(cache.shape)}, values {tuple(values.shape)}",
        "cache (B, C, G, D), values (B, T, G, D)",
    )  # fmt: skip
    require(
        positions.shape == values.shape[:2] and positions.dtype == torch.int64, "kv_store",
        f"positions {tuple(positions.shape)} of {positions.dtype}", f"int64 {tuple(values.shape[:2])}",
    )  # fmt: skip
    if positions.device.type == "cpu" and positions.numel():
        low, high = positions.aminmax()
        require(
            0 <= int(low) and int(high) < cache.shape[1], "kv_store",
            f"positions from {int(low)} to {int(high)}", f"positions from 0 to {cache.shape[1] - 1}",
        )  # fmt: skip
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    cache[rows, positions] = values.to(cache.dtype)
    return cache


def _oracle(cache: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    cache = cache.clone()
    for b in range(values.shape[0]):
        for t in range(values.shape[1]):
            cache[b, int(positions[b, t])] = values[b, t]
    return cache


def _distinct(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(sizes["C"], generator=generator)[: sizes["T"]] for _ in range(shape[0])]
    return torch.stack(rows)


CONTRACT = Contract(
    name="kv_store",
    call=kv_store,
    oracle=_oracle,
    args=(
        Arg("cache", "BCGD", normal),
        Arg("values", "BTGD", normal),
        Arg("positions", "BT", _distinct, is_float=False),
    ),
    sizes=({"B": 1, "C": 1, "T": 1, "G": 1, "D": 1}, {"B": 3, "C": 9, "T": 4, "G": 2, "D": 16}),
    refusals=(
        Refusal("a position of C", changed(positions=lambda c: c["positions"] * 0 + c["cache"].shape[1])),
        Refusal("a negative position", changed(positions=lambda c: c["positions"] * 0 - 1)),
        Refusal("values of another width", changed(values=lambda c: c["values"][..., :0])),
        Refusal("positions of another length", changed(positions=torch.zeros(1, 99, dtype=torch.int64))),
    ),
    forward={d: Tolerance(0, 0) for d in (torch.float32, torch.bfloat16, torch.float16)},
    num_bytes=lambda s, item: 2 * s["B"] * s["T"] * s["G"] * s["D"] * item,
    num_flops=lambda s: 0,
    exact=True,
)
