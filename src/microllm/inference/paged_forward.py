"""One pass over pages through the fused operators, with weights packed once: what a GPU's step is captured from.

Place: ``graph_runner.py`` captures it; ``runner.py`` runs the same mathematics operator by operator, on a CPU. Packing
moves no number: q, k and v (gate and up) come to lie one after the other, and the Transformer's own parameters become
views of them, so that nothing is held twice. Matrices are floats or codes, the pass is the same; the token table stays
in floats, so that one which is the head too is held once more as codes.

A decoding layer is five launches: norm and QKV, attention (with RoPE, norms of heads and the new keys and values),
output and residual, norm with gate, up and SwiGLU, down and residual; with more than one row the two norms are launches
of their own, since every program of a product would norm all rows again (in mode B always: a folded norm rounds
otherwise). A prompt's layer goes through the vendor's products, and in mode B through one tiling.

Axes:    N = tokens of the step (A rows, T each), D = model dim, H = query heads, G = KV heads, K = head dim,
         F = FFN dim, C = context, P = pairs of a head, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from microllm import ops
from microllm.inference.runner import KV_SPLIT
from microllm.model import Transformer
from microllm.model.transformer import Block, Linear
from microllm.step import Matrix, PagePool, RowGroup


class PackedBlock(NamedTuple):
    """A layer's weights as the fused operators take them."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


class Arena:
    """The buffers of one shape of step: nothing is allocated when it runs."""

    def __init__(self, forward: PagedForward, group: RowGroup, num_wanted: int) -> None:
        config, like = forward.model.config, forward.model.norm.weight
        N, D, K, F = group.num_rows * group.width, config.hidden_size, config.head_dim, config.intermediate_size
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.x, self.y, self.normed = (like.new_empty(N, D) for _ in range(3))
        self.qkv, self.context = like.new_empty(N, (H + 2 * G) * K), like.new_empty(N, H * K)
        self.gated = like.new_empty(N, F)
        many = () if group.decodes else (N,)
        self.projected, self.gate_up = (like.new_empty(*many, width) for width in (D, 2 * F))
        self.q, self.turned = like.new_empty(*many, H * K), like.new_empty(*many, (H + 2 * G) * K)
        self.table = torch.zeros(group.num_rows, forward.pages_a_row, dtype=torch.int32, device=like.device)
        self.wanted = torch.zeros(num_wanted, dtype=torch.int64, device=like.device)
        self.picked, self.last = like.new_empty(num_wanted, D), like.new_empty(num_wanted, D)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in vars(self).values())


class PagedForward:
    """A Transformer's weights, packed, over a pool of pages."""

    def __init__(self, model: Transformer, pool: PagePool, *, context: int, one_tiling: bool) -> None:
        self.model, self.pool, self._config = model, pool, model.config
        device = model.norm.weight.device
        self.pages_a_row = -(-context // pool.page_tokens)
        self.blocks = [pack(cast("Block", block)) for block in model.layers]
        cos, sin = model.rotary(torch.arange(context, device=device)[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self.head = model.head
        self._context, self._one_split = context, one_tiling
        self._scale = model.config.head_dim**-0.5

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the tables of rotations."""
        return self._cos.nbytes + self._sin.nbytes

    def hidden(self, group: RowGroup, arena: Arena) -> Tensor:
        """Run all layers over a group's tokens and return the stream after them, [N, D], in the arena."""
        ops.embedding(group.token_ids.flatten(), self.model.embed_tokens.weight, out=arena.x)
        for layer, block in enumerate(self.blocks):
            if group.decodes:
                self._decode(layer, block, group, arena)
            else:
                self._prefill(layer, block, group, arena)
        return arena.x

    def last(self, arena: Arena) -> Tensor:
        """Return the normed stream of the rows that ``arena.wanted`` names."""
        torch.index_select(arena.x, 0, arena.wanted, out=arena.picked)
        return self.norm(arena.picked, arena.last)

    def norm(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the final norm of the stream."""
        return self._norm(x, self.model.norm.weight, out)

    def logits(self, last: Tensor, out: Tensor) -> Tensor:
        """Return the head's product with normed rows."""
        return self.head.linear(last, out=out)

    def best(self, last: Tensor, head: Matrix, logits: Tensor, out: Tensor) -> Tensor:
        """Return the likeliest token of normed rows by a head, which may be part of the model's.

        ``logits`` is where a head of codes leaves them; one of floats never writes them.
        """
        if head.scale is None:
            return ops.lm_head_argmax(last, head.weight, out=out)
        return ops.argmax(head.linear(last, out=logits), out=out)

    def _split_of(self, group: RowGroup) -> int:
        """Return how many keys a program walks: one number where bits must not know their batch, else 0 if untuned."""
        config, weight = self._config, self.model.norm.weight
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return ops.decode_split(
            group.num_rows, heads, self.pool.page_tokens, self._context, weight.dtype, weight.device,
            one_for_all_rows=self._one_split,
        )  # fmt: skip

    def _heads(self, qkv: Tensor, group: RowGroup) -> Sequence[Tensor]:
        """Return a packed projection as views of its queries, keys and values: [A, T, heads, K] each."""
        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        return qkv.view(group.num_rows, group.width, -1, self._config.head_dim).split((heads, groups, groups), dim=2)

    def _norm(self, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        return ops.rms_norm(x, w, eps=self._config.rms_norm_eps, out=out)

    def _decode(self, layer: int, block: PackedBlock, group: RowGroup, arena: Arena) -> None:
        eps, folds = self._config.rms_norm_eps, len(arena.x) == 1 and not self._one_split
        if folds:
            block.qkv.norm_linear(arena.x, block.input_norm, eps=eps, out=arena.qkv)
        else:
            block.qkv.linear(self._norm(arena.x, block.input_norm, arena.normed), out=arena.qkv)
        q, k, v = self._heads(arena.qkv, group)
        ops.attention_step(
            q, k, v, self._cos, self._sin, self.pool.k_pages[layer], self.pool.v_pages[layer], arena.table,
            group.positions, block.q_norm, block.k_norm, scale=self._scale, eps=eps, split=self._split_of(group),
            out=arena.context.view(q.shape),
        )  # fmt: skip
        block.o.residual(arena.context, arena.x, out=arena.y)
        if folds:
            normed, gain = arena.y, block.post_norm
        else:
            normed, gain = self._norm(arena.y, block.post_norm, arena.normed), None
        block.gate_up.norm_swiglu(normed, gain, eps=eps, out=arena.gated)
        block.down.residual(arena.gated, arena.y, out=arena.x)

    def _prefill(self, layer: int, block: PackedBlock, group: RowGroup, arena: Arena) -> None:
        """Run a layer over prompts; the sums of stream and projection change place with the stream."""
        eps = self._config.rms_norm_eps
        if layer == 0:
            self._norm(arena.x, block.input_norm, arena.normed)
        one_tiling = self._one_split
        block.qkv.linear(arena.normed, one_tiling=one_tiling, out=arena.qkv)
        q, k, v = self._heads(arena.qkv, group)
        rotated = arena.q.view(q.shape), self._heads(arena.turned, group)[1]  # k lies as v does
        cos, sin = self._cos, self._sin
        positions = group.positions.clamp(min=0)
        if block.q_norm is not None and block.k_norm is not None:
            ops.qk_norm_rope(
                q, k, block.q_norm, block.k_norm, cos, sin, positions=positions, eps=eps, out=tuple(rotated)
            )
        else:
            ops.rope(q, k, cos, sin, positions=positions, out=rotated)
        pages = self.pool.k_pages[layer], self.pool.v_pages[layer]
        ops.kv_store_paged(*pages, rotated[1], v, arena.table, group.positions)
        context = arena.context.view(q.shape)
        ops.attention_prefill(
            rotated[0], *pages, arena.table, group.positions, scale=self._scale, split=KV_SPLIT, out=context
        )
        block.o.linear(arena.context, one_tiling=one_tiling, out=arena.projected)
        ops.add_rms_norm(arena.x, arena.projected, block.post_norm, eps=eps, out=(arena.y, arena.normed))
        block.gate_up.linear(arena.normed, one_tiling=one_tiling, out=arena.gate_up)
        ops.swiglu(*arena.gate_up.chunk(2, dim=1), out=arena.gated)
        block.down.linear(arena.gated, one_tiling=one_tiling, out=arena.projected)
        after = self.blocks[layer + 1].input_norm if layer + 1 < len(self.blocks) else self.model.norm.weight
        ops.add_rms_norm(arena.y, arena.projected, after, eps=eps, out=(arena.x, arena.normed))


def pack(block: Block) -> PackedBlock:
    """Return a block's weights, those of projections that share an input laid one after the other."""
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = (None if norm is None else norm.weight.data for norm in (attention.q_norm, attention.k_norm))
    return PackedBlock(
        input_norm=block.input_layernorm.weight.data, q_norm=q_norm, k_norm=k_norm, o=attention.o_proj.matrix,
        qkv=_joined((attention.q_proj, attention.k_proj, attention.v_proj)), down=mlp.down_proj.matrix,
        post_norm=block.post_attention_layernorm.weight.data, gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
    )  # fmt: skip


def _joined(linears: Sequence[Linear]) -> Matrix:
    parts = zip(*(linear.matrix for linear in linears), strict=True)
    weight, *others = (None if part[0] is None else _stacked(part) for part in parts)
    assert weight is not None, "a matrix has a weight"
    return Matrix(weight, *others)


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    """Return parameters in one buffer, of which they become views; those that already are stay as they are."""
    first, rows = parameters[0].data, sum(len(p) for p in parameters)
    ends = [p.data_ptr() + p.numel() * p.itemsize for p in parameters]
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    if len(storages) == 1 and all(p.data_ptr() == end for p, end in zip(parameters[1:], ends, strict=False)):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
