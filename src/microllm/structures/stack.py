"""Running a host's stack over a cache of ours: prompts, steps, and steps of several tokens.

Place: the loop, the gate's decode phases and speculation all run a host through this. Calls the host's own modules, so
that whatever is attached to them acts. Chooses no token.

Axes:    B = rows, T = tokens, D = model dim, V = vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm import ops
from microllm.errors import RequestError
from microllm.structures.cache import LoopCache
from microllm.structures.host import Host


def new_cache(host: Host, num_rows: int, capacity: int) -> LoopCache:
    """Return an empty cache for a host, in its dtype, where it is."""
    cache = LoopCache(len(host.layers), num_rows, capacity, (host.num_kv_heads, host.head_dim), like=host.weight)
    if host.head_dim % 2 == 0:
        cache.tables = host.calls.tables(cache.capacity)
    return cache


def run_stack(host: Host, token_ids_BT: Tensor, positions_BT: Tensor, cache: LoopCache) -> Tensor:
    """Return what the final norm gives for each token, and write keys and values: [B, T, D]."""
    binding, calls, stack = host.binding, host.calls, host.stack
    x = stack.get_submodule(binding.stack["embed"])(token_ids_BT)
    angles = calls.angles(x, positions_BT)
    for layer in host.layers:
        x = calls.layer(layer, x, angles, positions_BT, cache)
    return stack.get_submodule(binding.stack["norm"])(x)


def logits_of(host: Host, x_BTD: Tensor) -> Tensor:
    """Return the head's logits, [B, T, V] in the host's dtype."""
    head = host.head
    return ops.linear(x_BTD, host.weight) if head is None else head(x_BTD)


def run_prompt(host: Host, token_ids_BT: Tensor, cache: LoopCache, num_tokens_B: Tensor | None = None) -> Tensor:
    """Run prompts from position 0, padded on the right; return the final norm's output of each row's last token.

    Shapes:  token_ids [B, T], num_tokens [B] (default: all T) -> [B, 1, D]

    Raises:
        RequestError: no token, or more than the cache holds.
    """
    B, T = token_ids_BT.shape
    if not T or T > cache.capacity:
        raise RequestError(f"got prompts of {T} tokens; need 1 to {cache.capacity}; make max_len larger")
    positions_BT = torch.arange(T, device=token_ids_BT.device).expand(B, T)
    cache.begin_prompt(positions_BT)
    x = run_stack(host, token_ids_BT, positions_BT, cache)
    if num_tokens_B is None:
        return x[:, -1:]
    return x[torch.arange(B, device=x.device), num_tokens_B - 1].unsqueeze(1)


def run_tokens(
    host: Host, token_ids_BT: Tensor, positions_BT: Tensor, cache: LoopCache, seen: int | None = None
) -> Tensor:  # fmt: skip
    """Run tokens behind what the cache holds; return the final norm's output of each: [B, T, D]."""
    cache.begin_tokens(positions_BT, seen)
    return run_stack(host, token_ids_BT, positions_BT, cache)


def forced_logits(host: Host, token_ids_BT: Tensor, num_prompt: int, width: int = 1) -> Tensor:
    """Return the logits of decoding steps that are fed given tokens, ``width`` at a time, behind a prompt.

    Shapes:  token_ids [B, T] -> [B, T - num_prompt, V] fp32: row t from tokens up to num_prompt + t
    """
    B, T = token_ids_BT.shape
    cache, found = new_cache(host, B, T), []
    if num_prompt:
        run_prompt(host, token_ids_BT[:, :num_prompt], cache)
    for start in range(num_prompt, T, width):
        ids_BW = token_ids_BT[:, start : start + width]
        positions_BW = torch.arange(start, start + ids_BW.shape[1], device=ids_BW.device).expand(B, -1)
        found.append(logits_of(host, run_tokens(host, ids_BW, positions_BW, cache, start + ids_BW.shape[1])).float())
    return torch.cat(found, dim=1)
