"""A Transformer whose matrices are codes of eight or four bits, dequantised on the way into a product.

Place: ``load(precision="int8" | "int4" | "fp8")`` on a GPU; its engine, and the model's own forward pass, multiply by
the same codes. Norms, biases and the embedding's table stay as they are; the head is quantised too, so that a table
which is the head is held once more. A CPU has a plan of packed weights instead (``plan_weights.py``).

    int8    a scale a row; the head one for each 64 columns, where they divide
    fp8     a scale a row
    int4    a scale and a minimum for each 32 columns; the head as that of int8

Heads of coarser codes were tried on SmolLM2-135M, teacher-forced: int8 with a scale a row agrees with fp32 on 0.961 of
3,495 tokens in place of 0.967, and a head of int4 took int4 from 0.97 to 0.83 of 1,449.

Axes:    N = out, K = in, U = groups a row, J = K / 2
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from microllm import ops
from microllm.errors import ConfigError
from microllm.model import Transformer
from microllm.model.transformer import Block, Linear
from microllm.ops.coding import fp8_parts, int4_ranges, int8_parts
from microllm.step import Matrix

Quantisation = Literal["int8", "int4", "fp8"]
QUANTISATIONS: tuple[Quantisation, ...] = ("int8", "int4", "fp8")
GROUP, HEAD_GROUP = 32, 64
"""Columns that share a scale in int4, and in a head of int8."""


class QuantisedLinear(nn.Module):
    """A quantised matrix with or without bias, in the place of a ``Linear``."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, codes: Matrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        for name, part in (("codes", codes.weight), ("scale", codes.scale), ("minimum", codes.minimum)):
            self.register_buffer(name, part)
        self.bias = bias

    @property
    def matrix(self) -> Matrix:
        """Return codes, scales and bias as a step takes them."""
        return Matrix(self.codes, self.bias, self.scale, self.minimum)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias."""
        return self.matrix.linear(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])


@torch.no_grad()
def quantise(w: Tensor, kind: Quantisation, group: int = 0) -> Matrix:
    """Return a matrix of floats as codes, with scales in its own dtype; ``group``: of int8's columns, 0 for a row.

    Numbers: int8 and fp8 take the largest magnitude of a group as their largest code; int4 takes for each group the
             range of least squared error among some that are shrunken
    Raises:
        ConfigError: int4, and K is no multiple of 32.
    """
    w, columns = w.detach(), w.shape[1]
    if kind == "int4":
        if columns % GROUP:
            raise ConfigError(f"got a matrix of {columns} columns; need a multiple of {GROUP} for int4; take int8")
        scale, minimum = int4_ranges(w, GROUP, None)
        return Matrix(ops.quantise_int4(w, scale, minimum), None, scale, minimum)
    codes, scale = int8_parts(w, group or columns) if kind == "int8" else fp8_parts(w)
    return Matrix(codes, None, scale)


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
    group = 0 if model.config.hidden_size % HEAD_GROUP else HEAD_GROUP
    head = quantise(model.head_weight_VD, "int8" if kind == "int4" else kind, group)
    model.lm_head = cast("Linear", QuantisedLinear(head, None))
    return model.train(model.training)


def quantisation_of(model: Transformer) -> Quantisation | None:
    """Return what a model's matrices are quantised to, None where they are floats."""
    codes: Tensor | None = getattr(cast("Block", model.layers[0]).self_attn.q_proj, "codes", None)
    if codes is None:
        return None
    return "int8" if codes.dtype == torch.int8 else "int4" if codes.dtype == torch.uint8 else "fp8"
