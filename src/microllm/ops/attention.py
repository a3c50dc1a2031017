"""Causal grouped-query attention: over a key-value prefix by positions, of whole sequences, and of packed documents.

Place: the readable forms, and the library's for whole sequences. Attention over pages is in ``attention_paged``.

Axes:    B = batch, T = queries, S = key slots (slot index = position), H = query heads, G = KV heads, D = head dim,
         N = tokens of all documents, E = documents + 1
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import INT64, VENDOR, Arg, Contract, Out, Rule, Sink, Sizes, cases, numel, rounded
from microllm.ops.operator import Operator


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, out: Out = None,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale q kT) v, a query seeing the key slots up to its own position.

    The query heads of a group are folded into rows, so that each key and value is read once a group.

    Shapes:  q [B, T, H, D], k and v [B, S, G, D], positions [B, T] int64 -> [B, T, H, D]
    Numbers: scores, softmax and sum in fp32, rounded once
    Raises:
        OperatorError: H is not a multiple of G, sizes differ, scale is not finite and above 0.
    """
    return ATTENTION(q, k, v, positions, scale, out=out, sink=sink)


def attention_full(q: Tensor, k: Tensor, v: Tensor, *, scale: float, out: Out = None) -> Tensor:
    """Return causal attention of whole sequences.

    Shapes:  q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D]
    Numbers: fp32 softmax; the library's backend is the reason of the choice in the ledger, and never MATH
    Raises:
        OperatorError: as ``attention``.
    """
    return FULL(q, k, v, scale, out=out)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, max_length: int, scale: float, out: Out = None
) -> Tensor:
    """Return causal attention of documents laid end to end: a token sees its own document's earlier tokens.

    ``starts``: where each document begins, and the end of the last. ``max_length``: of the longest document.

    Shapes:  q [N, H, D], k and v [N, G, D], starts [E] int32 -> [N, H, D]
    Numbers: as ``attention_full``
    Raises:
        OperatorError: as ``attention``, or max_length is below 1.
    """
    return VARLEN(q, k, v, starts, max_length, scale, out=out)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, sink: Sink = None) -> Tensor:
    """Attend where ``hidden`` [B, T, S] is false."""
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    rows = q.float().view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, H // G * T, D)
    scores = rows @ k.float().permute(0, 2, 3, 1) * scale
    scores = scores.view(B, G, H // G, T, S).masked_fill(hidden[:, None, None], -math.inf)
    weights = scores.softmax(dim=-1)
    if sink is not None:
        sink.update(scores=scores.reshape(B, H, T, S), weights=weights.reshape(B, H, T, S))
    context = weights.view(B, G, H // G * T, S) @ v.float().permute(0, 2, 1, 3)
    return context.view(B, G, H // G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D).to(q.dtype)


def _reference(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, sink: Sink = None) -> Tensor:
    hidden = torch.arange(k.shape[1], device=q.device) > positions[:, :, None]
    return _attend(q, k, v, hidden, scale, sink)


def _full_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return _reference(q, k, v, torch.arange(q.shape[1], device=q.device).expand(q.shape[:2]), scale)


def _varlen_reference(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_length: int, scale: float) -> Tensor:
    index = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(starts, index, right=True)
    hidden = (document[:, None] != document) | (index > index[:, None])
    return _attend(q[None], k[None], v[None], hidden[None], scale)[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=_gqa(q, k))
    return context.transpose(1, 2).contiguous()


def _gqa(q: Tensor, k: Tensor) -> bool:
    return bool(q.shape[1] != k.shape[1])


def _sdpa_suits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[bool, str]:
    if type(q) is not Tensor and type(q) is not torch.nn.Parameter:
        return True, "SDPA, traced: the compiler takes the backend"
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    backend = torch.ops.aten._fused_sdp_choice(q, k, v, is_causal=True, scale=scale, enable_gqa=_gqa(q, k))
    return backend > 0, f"SDPA's backend {_BACKENDS[max(backend, 0)]}"


_BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE")


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_length: int, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - brings the compiler along: seconds

    flag: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    )  # older: no need to say
    y = varlen_attn(q, k, v, starts, starts, max_length, max_length, scale=scale, window_size=(-1, 0), **flag)
    assert isinstance(y, Tensor)
    return y


def _varlen_suits(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_length: int, scale: float) -> tuple[bool, str]:
    return q.dtype != torch.float32, "torch's varlen flash attention, which takes bf16 and fp16"


_QKV = (Arg("q", "BTHD"), Arg("k", "BTGD"), Arg("v", "BTGD"))
_SCALE = Rule("a finite scale above 0", lambda *v: 0 < v[-1] < math.inf, ({"scale": 0.0}, {"scale": math.nan}))
_EXACT, _LIBRARY = rounded(3e-5, 3e-5, wide=8e-4), rounded(3e-5, 3e-5, times=2, wide=8e-3)
_BACKWARD = rounded(3e-5, 3e-5, times=4, wide=2e-2)


def _groups(axis: int) -> Rule:
    return Rule(
        "H a multiple of G", lambda q, k, *_: q.shape[axis] % k.shape[axis] == 0,
        ({"q": lambda c: c["q"].narrow(axis, 0, c["q"].shape[axis] - 1)},),
    )  # fmt: skip


def _last_positions(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.arange(sizes["S"] - sizes["T"], sizes["S"]).expand(shape).contiguous()


def _draw_starts(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    inner = torch.randint(sizes["N"] + 1, (shape[0] - 2,), generator=generator).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([sizes["N"]]))).to(dtype)


ATTENTION = Operator(Contract(
    name="attention",
    args=(Arg("q", "BTHD"), Arg("k", "BSGD"), Arg("v", "BSGD"), Arg("positions", "BT", _last_positions, INT64)),
    results=(Arg("context", "BTHD"),), scalars={"scale": 0.125}, rules=(_groups(2), _SCALE), reference=_reference,
    composite=True, sink=("scores", "weights"),
    sizes=cases("B2 T5 S5 H6 G2 D64", "B1 T1 S1 H1 G1 D2", "B3 T1 S17 H4 G4 D16", "B1 T4 S33 H9 G3 D64"),
    forward=_EXACT, backward=_BACKWARD, num_flops=lambda s: 4 * numel(s, "BTHD") * s["S"],
))  # fmt: skip

FULL = Operator(Contract(
    name="attention_full", args=_QKV, results=(Arg("context", "BTHD"),), scalars={"scale": 0.125},
    rules=(_groups(2), _SCALE), reference=_full_reference, vendor=_sdpa, vendor_suits=_sdpa_suits, composite=True,
    levels=VENDOR,
    sizes=cases("B2 T5 H6 G2 D64", "B1 T1 H1 G1 D8", "B1 T33 H4 G4 D16"),
    forward=_LIBRARY, backward=_BACKWARD, num_flops=lambda s: 2 * numel(s, "BTHD") * s["T"],
))  # fmt: skip

VARLEN = Operator(Contract(
    name="attention_varlen",
    args=(Arg("q", "NHD"), Arg("k", "NGD"), Arg("v", "NGD"), Arg("starts", "E", _draw_starts, (torch.int32,))),
    results=(Arg("context", "NHD"),), scalars={"max_length": 33, "scale": 0.125},
    rules=(_groups(1), _SCALE, Rule("max_length above 0", lambda *v: v[-2] > 0, ({"max_length": 0},))),
    reference=_varlen_reference, vendor=_varlen, vendor_suits=_varlen_suits, composite=True,
    levels={"cpu": ("reference",), "cuda": ("vendor", "reference")},
    sizes=cases("N33 H6 G2 D64 E5", "N1 H1 G1 D8 E2", "N20 H2 G2 D32 E3"),
    forward=_LIBRARY, backward=_BACKWARD, num_flops=lambda s: 2 * numel(s, "NHD") * s["N"],
))  # fmt: skip
