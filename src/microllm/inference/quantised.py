"""A Transformer whose matrices are codes of eight or four bits, dequantised on the way into a product.

Place: ``load(precision="int8" | "int4" | "fp8")`` on a GPU; its engine, and the model's own forward pass, multiply by
the same codes. Norms, biases and the embedding's table stay as they are; the head is quantised too. A CPU has a plan of
packed weights instead (``plan_weights.py``).

Axes:    N = out, K = in, U = groups a row, J = K / 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from microllm import ops
from microllm.errors import ConfigError
from microllm.model import Transformer
from microllm.model.transformer import Block, Linear

Quantisation = Literal["int8", "int4", "fp8"]
QUANTISATIONS: tuple[Quantisation, ...] = ("int8", "int4", "fp8")
GROUP = 32
"""Columns that share a scale in int4; int8 and fp8 have one scale a row."""
_SMALLEST = 1e-12


class QuantisedWeight(NamedTuple):
    """A matrix as codes: int8 or fp8 [N, K], or int4 [N, J], with scales [N, U] and, int4, minima [N, U]."""

    kind: Quantisation
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def num_rows(self) -> int:
        """Return N."""
        return self.codes.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return x [M, K] times the transposed matrix, plus bias."""
        return ops.linear_codes(x, self.codes, self.scale, self.minimum, bias, out=out)

    def first(self, num_rows: int) -> QuantisedWeight:
        """Return the first rows."""
        minimum = None if self.minimum is None else self.minimum[:num_rows]
        return QuantisedWeight(self.kind, self.codes[:num_rows], self.scale[:num_rows], minimum)


Weight = Tensor | QuantisedWeight


class QuantisedLinear(nn.Module):
    """A quantised matrix with or without bias, in the place of a ``Linear``."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.kind: Quantisation = weight.kind
        for name in ("codes", "scale", "minimum"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = bias

    @property
    def weight(self) -> QuantisedWeight:
        """Return the matrix."""
        return QuantisedWeight(self.kind, self.codes, self.scale, self.minimum)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias."""
        return self.weight.multiply(x.reshape(-1, x.shape[-1]), self.bias).unflatten(0, x.shape[:-1])


def multiply(
    x: Tensor, w: Weight, bias: Tensor | None = None, *, out: Tensor | None = None,
    dense: Callable[..., Tensor] = ops.linear,
) -> Tensor:  # fmt: skip
    """Return x times the transposed matrix, plus bias; ``dense`` multiplies where it is one of floats."""
    return dense(x, w, bias, out=out) if isinstance(w, Tensor) else w.multiply(x, bias, out=out)


def norm_multiply(
    x: Tensor, gain: Tensor, w: Weight, bias: Tensor | None = None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return the product with rms_norm(x)."""
    if isinstance(w, Tensor):
        return ops.norm_linear(x, gain, w, bias, eps=eps, out=out)
    return ops.norm_linear_codes(x, gain, w.codes, w.scale, w.minimum, bias, eps=eps, out=out)


def multiply_add(
    x: Tensor, w: Weight, residual: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return residual + the product with x."""
    if isinstance(w, Tensor):
        return ops.linear_residual(x, w, residual, bias, out=out)
    return ops.linear_residual_codes(x, w.codes, w.scale, w.minimum, residual, bias, out=out)


def multiply_gated(
    x: Tensor, gain: Tensor | None, w: Weight, bias: Tensor | None = None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return swiglu of the product with rms_norm(x), or with x where there is no gain."""
    if isinstance(w, Tensor):
        return ops.norm_linear_swiglu(x, gain, w, bias, eps=eps, out=out)
    return ops.norm_linear_swiglu_codes(x, gain, w.codes, w.scale, w.minimum, bias, eps=eps, out=out)


def first_rows(w: Weight, num_rows: int) -> Weight:
    """Return a matrix's first rows."""
    return w[:num_rows] if isinstance(w, Tensor) else w.first(num_rows)


@torch.no_grad()
def quantise(w: Tensor, kind: Quantisation) -> QuantisedWeight:
    """Return a matrix of floats as codes, with scales in its own dtype.

    Numbers: int8 and fp8 take the largest magnitude of a row as their largest code; int4 cuts each group of 32 from its
             smallest to its largest value into 15 steps
    Raises:
        ConfigError: int4, and K is no multiple of 32.
    """
    if kind == "int4":
        if w.shape[1] % GROUP:
            raise ConfigError(f"got a matrix of {w.shape[1]} columns; need a multiple of {GROUP} for int4; take int8")
        groups = w.float().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2)
        scale, minimum = ((high - low) / 15).clamp(min=_SMALLEST).to(w.dtype), low.to(w.dtype)
        return QuantisedWeight(kind, ops.quantise_int4(w, scale, minimum), scale, minimum)
    largest = 127 if kind == "int8" else torch.finfo(torch.float8_e4m3fn).max
    scale = (w.float().abs().amax(dim=1, keepdim=True) / largest).clamp(min=_SMALLEST).to(w.dtype)
    codes = (ops.quantise_int8 if kind == "int8" else ops.quantise_fp8)(w, scale)
    return QuantisedWeight(kind, codes, scale, None)


def quantise_model(model: Transformer, kind: Quantisation) -> Transformer:
    """Quantise the projections of every layer and the head in place, one matrix at a time; return the model.

    Raises:
        ConfigError: an unknown kind, or a matrix that int4 does not fit.
    """
    if kind not in QUANTISATIONS:
        raise ConfigError(f"got {kind!r}; need one of {', '.join(QUANTISATIONS)}")
    for block in model.layers:
        attention, mlp = cast("Block", block).self_attn, cast("Block", block).mlp
        for owner in (attention, mlp):
            for name, linear in list(owner.named_children()):
                if isinstance(linear, Linear):
                    setattr(owner, name, QuantisedLinear(quantise(linear.weight, kind), linear.bias))
    head = quantise(cast("Tensor", model.head_weight_VD), kind)
    model.lm_head = cast("Linear", QuantisedLinear(head, None))
    return model


def quantisation_of(model: Transformer) -> Quantisation | None:
    """Return what a model's matrices are quantised to, None where they are floats."""
    head: nn.Module | None = model.lm_head
    return head.kind if isinstance(head, QuantisedLinear) else None


def adjoining(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie one after the other as one, None where they do not."""
    first, num_rows = parts[0], sum(len(part) for part in parts)
    ends = [part.data_ptr() + part.numel() * part.itemsize for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) > 1 or any(p.data_ptr() != end for p, end in zip(parts[1:], ends, strict=False)):
        return None
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def join(linears: Sequence[QuantisedLinear]) -> QuantisedWeight:
    """Return matrices as one, of which theirs become views; those that already are stay as they are."""
    wholes: dict[str, Tensor] = {}
    for name in ("codes", "scale", "minimum"):
        parts = [part for linear in linears if (part := getattr(linear, name)) is not None]
        if parts:
            wholes[name] = whole = _whole(parts)
            for linear, part in zip(linears, whole.split([len(part) for part in parts]), strict=True):
                setattr(linear, name, part)
    return QuantisedWeight(linears[0].kind, wholes["codes"], wholes["scale"], wholes.get("minimum"))


def _whole(parts: Sequence[Tensor]) -> Tensor:
    found = adjoining(parts)
    return torch.cat(list(parts)) if found is None else found
