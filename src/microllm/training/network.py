"""The forward pass of training: the model's own parameters, packed documents, the loss at the end.

Place: the trainer's twin of ``Transformer.forward``, on fused operators with gradients. Parameters are fp32 masters; in
bf16 each has a copy (``Copies``) that the products read, and a matrix's gradient comes out of its product in fp32.
A tied embedding's gradient is added by token row to the head's: there is no second [V, D].

Axes:    N = tokens of all documents, D = model dim, H = query heads, G = KV heads, K = head dim, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from microllm import ops
from microllm.model import Transformer
from microllm.model.transformer import Block, RMSNorm
from microllm.training.dataset import Rows
from microllm.training.lora import Adapter

Angles = tuple[Tensor, Tensor]


class Copies:
    """Low-precision copies of fp32 parameters, refreshed after each step; a parameter without one is read itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._by_id: dict[int, Tensor] = {}

    def make(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make a copy of each parameter of another dtype; what is never made is computed with itself."""
        self._masters = [p for p in parameters if p.dtype != self._dtype]
        self._copies = [p.detach().to(self._dtype) for p in self._masters]
        self._by_id = {id(p): copy for p, copy in zip(self._masters, self._copies, strict=True)}

    def refresh(self) -> None:
        """Take over what the masters have become."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._masters)  # pyright: ignore[reportPrivateImportUsage]

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's copy, or None where it is computed with itself."""
        return self._by_id.get(id(parameter))

    def vector(self, parameter: Tensor) -> Tensor:
        """Return a small parameter as operators take it; its gradient goes to the master."""
        copy = self.of(parameter)
        return parameter if copy is None else _Copied.apply(parameter, copy)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ops.linear with the weight's copy."""
        copy = self.of(weight)
        bias = None if bias is None else self.vector(bias)
        return ops.linear(x, weight, bias) if copy is None else _Linear.apply(x, weight, copy, bias)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:  # noqa: ANN401
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grads[0].float(), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, copy)
        return ops.linear(x, copy, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (dy,), (x, copy) = grads, ctx.saved_tensors
        need_x, need_w, _, need_bias = ctx.needs_input_grad
        return (
            dy @ copy if need_x else None,
            _product(dy.T, x) if need_w else None,
            None,
            dy.sum(0, dtype=torch.float32).to(dy.dtype) if need_bias else None,
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a times b in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _Link:
    """Carries the head's gradient to the embedding, whose backward pass comes last."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def take(self) -> Tensor | None:
        grad, self.grad = self.grad, None
        return grad


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, table: Tensor, ids: Tensor, link: _Link | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(ids)
        ctx.link, ctx.like = link, master
        return ops.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:  # noqa: ANN401
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        found = ctx.link.take() if ctx.link is not None else None
        dw = torch.zeros(ctx.like.shape, device=ids.device) if found is None else found
        return dw.index_add_(0, ids, grads[0].float()), None, None, None


class _Loss(torch.autograd.Function):
    """The weighted sum of the tokens' losses; its own gradient is taken to be 1: it is where a backward pass begins."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, master: Tensor, w: Tensor, rows: Rows, link: _Link | None) -> Tensor:  # noqa: ANN401
        total, dh, dw = ops.linear_cross_entropy_gradients(h, w, rows.targets_N, rows.weights_N)
        ctx.save_for_backward(dh, dw)
        ctx.link = link
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        dh, dw = ctx.saved_tensors
        if ctx.link is not None:
            ctx.link.grad = dw
        return dh, dw if ctx.link is None and ctx.needs_input_grad[1] else None, None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """Return causal attention inside each document.

    Shapes:  q [N, H, K], k and v [N, G, K] -> [N, H, K]
    Numbers: bf16 on a GPU: one varlen call; else the library's causal attention, a document at a time
    """
    if q.is_cuda and q.dtype != torch.float32:
        return ops.attention_varlen(q, k, v, rows.starts_E, max_length=rows.max_length, scale=scale)
    lengths = [n for n in rows.starts_E.diff().tolist() if n]
    pieces = zip(*(t.unsqueeze(0).split(lengths, dim=1) for t in (q, k, v)), strict=True)
    return torch.cat([ops.attention_full(*piece, scale=scale) for piece in pieces], dim=1)[0]


class TrainBlock(nn.Module):
    """One layer over packed documents; it holds the model's own block, and its adapters where there are any."""

    def __init__(self, block: nn.Module, copies: Copies, adapters: dict[str, Adapter]) -> None:
        super().__init__()
        assert isinstance(block, Block)
        self.block = block
        self.adapters = nn.ModuleDict(adapters)
        self.copies = copies

    def linear(self, part: nn.Module, name: str, x: Tensor) -> Tensor:
        """Return the matrix called ``name`` of ``part`` times x, plus its adapter's share."""
        matrix = getattr(part, name)
        y = self.copies.linear(x, matrix.weight, matrix.bias)
        if name not in self.adapters:
            return y
        adapter: Any = self.adapters[name]
        down = self.copies.linear(x, adapter.a_RI, None)
        return y + adapter.scale * self.copies.linear(down, adapter.b_OR, None)

    def norm(self, norm: RMSNorm, x: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream with ``addend`` in it, and its norm."""
        weight = self.copies.vector(norm.weight)
        if addend is None:
            return x, ops.rms_norm(x, weight, eps=norm.eps)
        return ops.add_rms_norm(x, addend, weight, eps=norm.eps)

    def forward(self, x_ND: Tensor, addend_ND: Tensor | None, angles: Angles, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the stream and what is to be added to it: the next norm does that."""
        block, attention, mlp = self.block, self.block.self_attn, self.block.mlp
        x_ND, normed = self.norm(block.input_layernorm, x_ND, addend_ND)
        heads = (1, x_ND.shape[0], -1, attention.head_dim)
        q, k, v = (self.linear(attention, name, normed).view(heads) for name in ("q_proj", "k_proj", "v_proj"))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = self.norm(attention.q_norm, q, None)[1], self.norm(attention.k_norm, k, None)[1]
        q, k = ops.rope(q, k, *angles)
        context = attend(q[0], k[0], v[0], rows, attention.scale)
        x_ND, normed = self.norm(
            block.post_attention_layernorm, x_ND, self.linear(attention, "o_proj", context.flatten(1))
        )
        gate, up = self.linear(mlp, "gate_proj", normed), self.linear(mlp, "up_proj", normed)
        return x_ND, self.linear(mlp, "down_proj", ops.swiglu(gate, up))


class TrainNetwork(nn.Module):
    """Rows in, the weighted sum of their losses out. In ``eval`` mode no gradient is prepared."""

    def __init__(
        self, model: Transformer, copies: Copies, adapters: dict[int, dict[str, Adapter]], *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.model, self.copies, self.recompute = model, copies, recompute
        self.blocks = nn.ModuleList(
            TrainBlock(block, copies, adapters.get(i, {})) for i, block in enumerate(model.layers)
        )

    def forward(self, rows: Rows, *, last_logits: bool = False) -> Tensor:
        """Return the sum of weight times loss over all tokens, or the last token's logits.

        Shapes:  rows of N tokens -> a number, fp32, or [1, V]
        """
        model, copies = self.model, self.copies
        table, head = model.embed_tokens.weight, model.head_weight_VD
        link = _Link() if model.lm_head is None and self.training else None
        x = _Embed.apply(table, _read(copies, table), rows.token_ids_N, link)
        angles = model.rotary(rows.positions_N[None])
        addend: Tensor | None = None
        for block in self.blocks:
            run: Callable[..., Any] = block
            if self.recompute and self.training:
                x, addend = checkpoint(run, x, addend, angles, rows, use_reentrant=False)
            else:
                x, addend = run(x, addend, angles, rows)
        assert addend is not None
        h = ops.add_rms_norm(x, addend, copies.vector(model.norm.weight), eps=model.norm.eps)[1]
        if last_logits:
            return ops.linear(h[-1:], _read(copies, head))
        if not self.training:
            losses = ops.linear_cross_entropy(h, _read(copies, head), rows.targets_N, reduction="none")
            return (losses * rows.weights_N).sum()
        return _Loss.apply(h, head, _read(copies, head), rows, link)


def _read(copies: Copies, parameter: Tensor) -> Tensor:
    """Return what a product reads in a parameter's place, outside autograd: the caller makes its gradient."""
    copy = copies.of(parameter)
    return parameter.detach() if copy is None else copy
