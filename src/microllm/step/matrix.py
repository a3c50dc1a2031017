"""A matrix that a step multiplies by, in floats or in codes, with what the operators fold into its product.

Place: the engine's layers and structures' chain hold these, and need not know which of the two they have. Makes no
codes: ``ops.coding`` does.

Axes:    M = rows, K = in, N = out, F = N / 2, U = groups of a weight row, J = columns of the codes
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from microllm import ops


class Matrix(NamedTuple):
    """Floats [N, K], or codes [N, J] with scales [N, U] and (of int4) minima; and a bias [N]."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    minimum: Tensor | None = None

    def first(self, num_out: int) -> Matrix:
        """Return the first rows, as views."""
        return Matrix(*(None if part is None else part[:num_out] for part in self))  # pyright: ignore[reportArgumentType]

    def linear(self, x: Tensor, *, one_tiling: bool = False, out: Tensor | None = None) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, K] -> [M, N].

        ``one_tiling``: floats take the product that gives a row the same bits among any others; codes have no other,
        inside ``ops.batch_invariant``.
        """
        if self.scale is not None:
            return ops.linear_codes(x, self.weight, self.scale, self.minimum, self.bias, out=out)
        return (ops.linear_one_tiling if one_tiling else ops.linear)(x, self.weight, self.bias, out=out)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
        """Return the product of the normed rows: [..., K] -> [..., N]."""
        w, bias, scale, minimum = self
        if scale is not None:
            return ops.norm_linear_codes(x, norm_weight, w, scale, minimum, bias, eps=eps, out=out)
        return ops.norm_linear(x, norm_weight, w, bias, eps=eps, out=out)

    def residual(self, x: Tensor, residual: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return residual plus the product: [..., K], [..., N] -> [..., N]."""
        w, bias, scale, minimum = self
        if scale is not None:
            return ops.linear_residual_codes(x, w, scale, minimum, residual, bias, out=out)
        return ops.linear_residual(x, w, residual, bias, out=out)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor | None, *, eps: float, out: Tensor | None = None) -> Tensor:
        """Return SwiGLU of gate and up, the matrix's two halves, of normed rows: [..., K] -> [..., F]."""
        w, bias, scale, minimum = self
        if scale is not None:
            return ops.norm_linear_swiglu_codes(x, norm_weight, w, scale, minimum, bias, eps=eps, out=out)
        return ops.norm_linear_swiglu(x, norm_weight, w, bias, eps=eps, out=out)
