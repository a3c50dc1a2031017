"""Run a step: decoding rows and chunks of prompts, mixed, through the Transformer's weights, over pages.

Place: between the engine's plan and the operators; the model's own ``forward`` is its oracle. Knows no requests' ends.

Same bits whatever else is in the step (``deterministic``), on a CPU: products get at least ``MIN_ROWS`` rows, each row
attends on its own over blocks of a fixed size, rotations come from one table, SwiGLU runs in pieces of whole vectors,
and the rest goes row by row. That was seen to hold at 1 to 6 threads; not, at 3 and more, for a narrow matrix with a
number of rows that 16 does not divide. ``microllm probe batch-invariance`` finds out for a model and a machine.

Axes:    N = tokens of the step, D = model dim, H = query heads, G = KV heads, K = head dim, A = rows, T = tokens a row,
         C = context, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from microllm import ops
from microllm.inference.prewarm import WarmedShape
from microllm.inference.request import Request
from microllm.inference.scheduler import Chunk
from microllm.model import Transformer
from microllm.model.transformer import Block, Linear
from microllm.step import PagePool, PageTables, RowGroup, bucket

KV_SPLIT = 256
"""Tokens of a block of keys, counted from position 0."""
MIN_ROWS = 16
"""Rows of a step from which on torch's products on a CPU give a row the same bits, however many there are."""
VECTOR, THREAD_SHARE = 64, 32_767
"""Elements that torch's loops on a CPU take at once, at most; and below how many they keep to one thread."""


def write_table(tables: PageTables, request: Request) -> None:
    """Set the pages that a running request took since its last step."""
    assert request.slot is not None, "a request that runs has a slot"
    tables.write(request.slot, request.num_tabled, request.pages[request.num_tabled :])
    request.num_tabled = len(request.pages)


class ModelRunner:
    """A model with a page pool.

    ``same_bits``: a token's keys and values have the same bytes whether a prompt's chunk or decoding wrote them.
    """

    num_cold = arena_bytes = passing_bytes = 0

    def __init__(
        self, model: Transformer, pool: PagePool, *, num_slots: int, context: int, deterministic: bool, max_drafts: int
    ) -> None:
        self.model, self.pool, self.deterministic = model, pool, deterministic
        self.device = model.norm.weight.device
        self.same_bits = deterministic and self.device.type == "cpu"
        self._max_drafts = max_drafts
        self._tables = PageTables(num_slots, -(-context // pool.page_tokens), self.device)
        self._decode_groups: dict[tuple[int, int], RowGroup] = {}
        self._cos_CK, self._sin_CK = (t[0] for t in model.rotary(torch.arange(context, device=self.device)[None]))
        self._one_tiling = deterministic and not self.same_bits

    def prewarm(
        self, buckets: Sequence[int] | None, lengths: Sequence[int], num_tokens: int | None
    ) -> list[WarmedShape]:
        """Return nothing: a step runs operator by operator, and no shape of it is made ahead."""
        return []

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[int]]:
        """Run a step; return the logits that its chunks want, and at which row those of each chunk begin.

        Shapes:  -> [rows, V] in the model's dtype, a number a chunk
        """
        for chunk in chunks:
            write_table(self._tables, chunk.request)
        groups, firsts = self._groups(chunks)
        wanted, starts = [], []
        for chunk, first in zip(chunks, firsts, strict=True):
            starts.append(len(wanted))
            end = first + len(chunk.token_ids)
            wanted += range(end - chunk.num_logits, end)
        return self._forward(groups, torch.tensor(wanted, dtype=torch.int64, device=self.device)), starts

    def _groups(self, chunks: Sequence[Chunk]) -> tuple[list[RowGroup], list[int]]:
        """Return the step's groups, and where each chunk's first token lies when they are laid end to end."""
        members: list[tuple[RowGroup, list[int]]] = []
        for width in sorted({1, 1 + self._max_drafts}):
            picked = [
                i for i, chunk in enumerate(chunks)
                if chunk.kind == "decode" and (len(chunk.token_ids) > 1) == (width > 1)
            ]  # fmt: skip
            if picked:
                members.append((self._decode_group(bucket(len(picked)), width), picked))
        for i, chunk in enumerate(chunks):
            if chunk.kind == "prefill":
                members.append((RowGroup(1, len(chunk.token_ids), decodes=False, device=self.device), [i]))
        firsts, total = [0] * len(chunks), 0
        for group, picked in members:
            group.fill([(cast("int", chunks[i].request.slot), chunks[i].start, chunks[i].token_ids) for i in picked])
            for row, i in enumerate(picked):
                firsts[i] = total + row * group.width
            total += group.num_rows * group.width
        return [group for group, _ in members], firsts

    def _decode_group(self, num_rows: int, width: int) -> RowGroup:
        """Return the one group of that shape: its buffers stay where a captured step reads them."""
        group = self._decode_groups.get((num_rows, width))
        if group is None:
            group = RowGroup(num_rows, width, decodes=True, device=self.device)
            self._decode_groups[num_rows, width] = group
        return group

    def _forward(self, groups: Sequence[RowGroup], wanted: Tensor) -> Tensor:
        tables = [self._tables.rows(group.slots) for group in groups]
        ids_N = self._with_idle_rows(torch.cat([group.token_ids.flatten() for group in groups]))
        positions_N = self._with_idle_rows(torch.cat([group.positions.flatten() for group in groups]))
        x_ND = ops.embedding(ids_N, self.model.embed_tokens.weight)
        for layer, block in enumerate(self.model.layers):
            x_ND = self._block(
                layer, cast("Block", block), x_ND, positions_N.clamp(min=0), list(zip(groups, tables, strict=True))
            )
        if not len(wanted):  # chunks that end within their prompts
            return x_ND.new_empty(0, self.model.config.vocab_size)
        last_AD = self._with_idle_rows(self.model.norm(x_ND[wanted]))
        return self.model.head.linear(last_AD, one_tiling=self._one_tiling)[: len(wanted)]

    def _with_idle_rows(self, rows: Tensor) -> Tensor:
        """Return rows with as many of zeros after them as the same bits need."""
        missing = MIN_ROWS - rows.shape[0]
        if not self.same_bits or missing <= 0:
            return rows
        return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))

    def _block(
        self, layer: int, block: Block, x_ND: Tensor, positions_N: Tensor, groups: Sequence[tuple[RowGroup, Tensor]]
    ) -> Tensor:
        """Return the stream after a layer; its keys and values are in the pages then."""
        attention, mlp = block.self_attn, block.mlp
        normed_ND = block.input_layernorm(x_ND)
        q_1NHK, k_1NGK, v_1NGK = (
            self._project(normed_ND, linear).view(1, x_ND.shape[0], -1, attention.head_dim)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            q_1NHK, k_1NGK = attention.q_norm(q_1NHK), attention.k_norm(k_1NGK)
        q_1NHK, k_1NGK = ops.rope(q_1NHK, k_1NGK, self._cos_CK, self._sin_CK, positions=positions_N[None])
        pages, contexts, first = (self.pool.k_pages[layer], self.pool.v_pages[layer]), [], 0
        for group, table in groups:
            shape, part = (group.num_rows, group.width), slice(first, first + group.num_rows * group.width)
            q, k, v = (t[0, part].unflatten(0, shape) for t in (q_1NHK, k_1NGK, v_1NGK))
            ops.kv_store_paged(*pages, k, v, table, group.positions)
            attend = ops.attention_decode if group.decodes else ops.attention_prefill
            context = attend(q, *pages, table, group.positions, scale=attention.scale, split=KV_SPLIT)
            contexts.append(context.flatten(2).flatten(0, 1))
            first = part.stop
        x_ND = x_ND + self._project(self._with_idle_rows(torch.cat(contexts)), attention.o_proj)
        normed_ND = block.post_attention_layernorm(x_ND)
        gated_NF = self._swiglu(self._project(normed_ND, mlp.gate_proj), self._project(normed_ND, mlp.up_proj))
        return x_ND + self._project(gated_NF, mlp.down_proj)

    def _swiglu(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """Gate; for the same bits in pieces that torch neither shares among threads nor ends within a vector.

        Its SiLU rounds the last few elements of a thread's share otherwise than the rest.
        """
        width = gate_NF.shape[1]
        if not self.same_bits:
            return ops.swiglu(gate_NF, up_NF)
        if width % VECTOR:
            gate_NF, up_NF = (functional.pad(t, (0, -width % VECTOR)) for t in (gate_NF, up_NF))
        num_rows = max(1, THREAD_SHARE // gate_NF.shape[1])
        pieces = zip(gate_NF.split(num_rows), up_NF.split(num_rows), strict=True)
        return torch.cat([ops.swiglu(gate, up)[:, :width] for gate, up in pieces])

    def _project(self, x_ND: Tensor, linear: Linear) -> Tensor:
        return linear.matrix.linear(x_ND, one_tiling=self._one_tiling)
