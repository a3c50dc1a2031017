"""Implementations: what runs a structure's region, made of this project's operators.

Place: a seat holds what ``bind_region`` returns and calls it with the boundary's inputs by position. ``IMPLS`` is the
whole table; folders given to a door add rows before it. Every bind ends with a call at the bound shape, held against
the structure's reference. Chooses no format: a scheme does.

Axes:    M = rows, B = rows of a batch, T = tokens, D = model dim, F = FFN dim, H and G = query and KV heads,
         K = head dim, P = pairs, S = slots
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm import ops
from microllm.errors import StructureError
from microllm.evidence.tensor_statistics import error_statistics
from microllm.structures.block import Block
from microllm.structures.formats import FLOAT, Format, FormatName, Matrix, stack
from microllm.structures.structure import Structure, load_attribute

FUSED_ROWS = 256
"""Rows up to which gate, up and SwiGLU are one launch."""
SMOKE_COSINE = {"float": 0.9999, "int8": 0.999, "int4": 0.97, "fp8": 0.99}
"""Least cosine with the reference that a bind is accepted with, by format."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A region of a host as an implementation is given it."""

    structure: Structure
    path: str
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Any] = field(default_factory=dict)
    format: FormatName = "float"
    group: int = 0
    amax: Mapping[str, float] = field(default_factory=dict)
    grams: Mapping[str, Tensor] = field(default_factory=dict)
    made: dict[Any, Matrix] = field(default_factory=dict)
    """Matrices made so far for this host: regions that multiply by the same weights share one."""

    def matrix(self, slots: Sequence[str], point: str = "x", biases: Sequence[str] = ()) -> Matrix:
        """Return the slots' matrices, one under the other, in the region's format."""
        bias = stack([self.weights[b] for b in biases]) if biases and biases[0] in self.weights else None
        format = Format(self.format, self.group, self.amax.get(point)) if self.format != "float" else FLOAT
        parts = [self.weights[slot] for slot in slots]
        key = (tuple((w.data_ptr(), tuple(w.shape)) for w in parts), format, bias is None)
        if key not in self.made:
            self.made[key] = Matrix(parts[0] if len(parts) == 1 else stack(parts), bias, format, self.grams.get(point))
        return self.made[key]


@dataclass(frozen=True, slots=True)
class Impl:
    """One implementation of one structure, for some formats."""

    name: str
    structure: str
    formats: tuple[str, ...]
    bind: Callable[[Region], Any]


class Ffn:
    """``decoder_ffn``: gate and up in one product, SwiGLU, down."""

    def __init__(self, region: Region) -> None:
        self._gate_up, self._down = region.matrix(("w_gate", "w_up")), region.matrix(("w_down",), "act_after_mul")
        self.matrices = (self._gate_up, self._down)
        self.kernel = f"{self._gate_up.kernel} + swiglu + {self._down.kernel}"

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [M, D]."""
        if not self._gate_up.format.codes_input and len(x) <= FUSED_ROWS:
            return self._down(self._gate_up.weights.norm_swiglu(x, None, eps=1.0))
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return self._down(ops.swiglu(gate, up))

    def plain(self, x: Tensor) -> Tensor:
        """Return y by torch's own calls; silu is rounded before the product, as hosts do."""
        gate, up = self._gate_up.plain(x).chunk(2, dim=1)
        return self._down.plain(functional.silu(gate) * up)


class Projection:
    """``linear_proj`` and ``lm_head``: one product."""

    def __init__(self, region: Region) -> None:
        self._matrix = region.matrix(("w",), biases=("b",))
        self.matrices, self.kernel = (self._matrix,), self._matrix.kernel

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [M, N]."""
        return self._matrix(x)

    def plain(self, x: Tensor) -> Tensor:
        """Return y by torch's own call."""
        return self._matrix.plain(x)


class QkvPack:
    """``qkv_pack``: three projections in one product, whose columns they are."""

    def __init__(self, region: Region) -> None:
        self._matrix = region.matrix(("w_q", "w_k", "w_v"), biases=("b_q", "b_k", "b_v"))
        self._sizes = tuple(region.weights[f"w_{part}"].shape[0] for part in ("q", "k", "v"))
        self.matrices, self.kernel = (self._matrix,), self._matrix.kernel

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v, views of one tensor made by this call."""
        return self._matrix(x).split(self._sizes, dim=1)

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v by torch's own call."""
        return self._matrix.plain(x).split(self._sizes, dim=1)


class Norm:
    """``residual_norm``: the norm, alone or of a sum."""

    kernel, matrices = "rms_norm", ()

    def __init__(self, region: Region) -> None:
        self._w, self._eps = region.weights["w"].detach(), float(region.constants["eps"])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return y, with a residual y and the sum."""
        if residual is None:
            return ops.rms_norm(x, self._w, eps=self._eps)
        total, y = ops.add_rms_norm(x, residual, self._w, eps=self._eps)
        return y, total

    def plain(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the same by torch's own calls: rounded once, after the product with w."""
        total = x if residual is None else residual + x
        y = torch.rms_norm(total, self._w.shape, self._w, self._eps)
        return y if residual is None else (y, total)


class Rope:
    """``qkv_rope`` and ``qk_norm_rope``: biases or norms of heads, and the turn."""

    matrices = ()

    def __init__(self, region: Region) -> None:
        w = {slot: t.detach() for slot, t in region.weights.items()}
        self._biases, self._norms = (w.get("b_q"), w.get("b_k")), (w.get("w_q_norm"), w.get("w_k_norm"))
        self._eps = float(region.constants.get("eps", 0))
        self.kernel = "rope" if self._norms[0] is None else "qk_norm_rope"

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the turned heads of queries and keys: [B, T, H, K], [B, T, G, K]."""
        (q_bias, k_bias), (q_norm, k_norm) = self._biases, self._norms
        if q_bias is not None and k_bias is not None:
            q, k = q + q_bias.view(q.shape[2:]), k + k_bias.view(k.shape[2:])
        if q_norm is not None and k_norm is not None:
            return ops.qk_norm_rope(q, k, q_norm, k_norm, cos, sin, eps=self._eps)
        return ops.rope(q, k, cos, sin)

    def plain(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same by torch's own calls, of angles [B, T, 1, K] whose first half of sines is negated."""
        (q_bias, k_bias), (q_norm, k_norm) = self._biases, self._norms
        if q_bias is not None and k_bias is not None:
            q, k = q + q_bias.view(q.shape[2:]), k + k_bias.view(k.shape[2:])
        if q_norm is not None and k_norm is not None:
            q = torch.rms_norm(q, q_norm.shape, q_norm, self._eps)
            k = torch.rms_norm(k, k_norm.shape, k_norm, self._eps)
        half = q.shape[-1] // 2
        return (q * cos).addcmul_(q.roll(half, -1), sin), (k * cos).addcmul_(k.roll(half, -1), sin)


class Attention:
    """``attention_core``: a ladder of what attends; the first rung that takes the call does.

    Our kernel walks a cache of ours up to each query's position; torch's fused attention takes anything else.
    """

    matrices = ()

    def __init__(self, region: Region) -> None:
        self._scale = float(region.constants["scale"])
        self.fallen: list[str] = []
        self.kernel = "attention_decode over our cache, else torch's fused attention"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the context [B, T, H, K] of q [B, H, T, K] over k and v [B, G, S, K]."""
        T = q.shape[2]
        context = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return context.transpose(1, 2)

    def over_cache(self, q: Tensor, keys: Tensor, values: Tensor, pages: Any, positions: Tensor) -> Tensor:
        """Return the context [B, T, H, K] of q [B, T, H, K] over whole caches [B, S, G, K], up to its positions."""
        return ops.attention_decode(
            q, pages.of(keys), pages.of(values), pages.table, positions, scale=self._scale, split=pages.split
        )


def prompt_form(bound: Any) -> Any:
    """Return what runs a short prompt: torch's own calls, where a launch of ours costs Python more than the work takes.

    None where what is bound has no such form.
    """
    return bound.plain if isinstance(bound, Ffn | Projection | QkvPack | Norm | Rope) else None


IMPLS: tuple[Impl, ...] = (
    Impl("ops", "decoder_ffn", ("float", "int8", "int4", "fp8"), Ffn),
    Impl("ops", "linear_proj", ("float", "int8", "int4", "fp8"), Projection),
    Impl("ops", "lm_head", ("float", "int8", "int4", "fp8"), Projection),
    Impl("ops", "qkv_pack", ("float", "int8", "int4", "fp8"), QkvPack),
    Impl("ops", "residual_norm", ("float",), Norm),
    Impl("ops", "qkv_rope", ("float",), Rope),
    Impl("ops", "qk_norm_rope", ("float",), Rope),
    Impl("ops", "attention_core", ("float",), Attention),
    Impl("ops", "decoder_block", ("float", "int8", "int4"), Block),
)


def load_impls(folders: Sequence[Path] = ()) -> list[Impl]:
    """Return the rows that files of ``folders`` define as ``IMPLS``, then the package's."""
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return [impl for path in files for impl in load_attribute(path, "IMPLS")] + list(IMPLS)


def find_impl(impls: Sequence[Impl], region: Region) -> Impl:
    """Return the first implementation of the region's structure in its format.

    Raises:
        StructureError: there is none.
    """
    for impl in impls:
        if impl.structure in (region.structure.name, region.structure.id) and region.format in impl.formats:
            return impl
    raise StructureError(
        f"{region.path}: got {region.structure.id} in {region.format}; need one with an implementation"
    )


def bind_region(region: Region, impls: Sequence[Impl], example: Mapping[str, Tensor]) -> tuple[Any, float]:
    """Return what runs the region, and the least cosine of its outputs with the reference on ``example``.

    Raises:
        StructureError: there is no implementation, it raises, or its output is not the reference's.
    """
    bound = find_impl(impls, region).bind(region)
    try:
        reference = region.structure.reference(dict(example), region.weights, region.constants)
        outputs = bound(*example.values())
    except (RuntimeError, ValueError) as error:
        shapes = {name: tuple(t.shape) for name, t in example.items()}
        raise StructureError(
            f"{region.path}: got {region.structure.id} in {region.format} that fails at {shapes}: {error}"
        ) from error
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    worst = 1.0
    for port, output in zip(region.structure.outputs, outputs, strict=False):
        wanted = reference[port.name]
        if output.shape != wanted.shape:
            raise StructureError(f"{region.path}: got {port.name} {tuple(output.shape)}; need {tuple(wanted.shape)}")
        worst = min(worst, cosine(output, wanted))
    if not worst >= SMOKE_COSINE[region.format]:
        raise StructureError(
            f"{region.path}: got {region.structure.id} in {region.format}, cosine {worst:.5f} with its reference; need "
            f"{SMOKE_COSINE[region.format]}"
        )
    return bound, worst


def cosine(output: Tensor, wanted: Tensor) -> float:
    """Return the cosine of two tensors, NaN where one is not finite."""
    error = error_statistics(output, wanted)
    return float("nan") if error.non_finite else 1.0 - error.cosine_deficit
