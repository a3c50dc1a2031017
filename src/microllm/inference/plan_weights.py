"""A checkpoint's weights as the decode plan wants them: packed once at load, in few matrices.

Place: ``llm.load`` makes them on a CPU; ``plan`` multiplies by them. Query, key and value rows become one matrix, gate
and up rows another. The rows of each query and key head are put in pairs, so that RoPE is one complex product;
scores do not notice, since both sides are reordered alike. Does not run a step.

Axes:    D = model dim, H = query heads, G = KV heads, K = head dim, F = FFN dim, V = vocabulary, N = rows, U = groups
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from microllm.config import ModelConfig
from microllm.ops.packed import (
    GROUP,
    DenseWeight,
    Int4Weight,
    PackedWeight,
    Planes,
    RefinedWeight,
    half_planes,
    int4_planes,
    q8_0_codes,
    quantised_planes,
    rounded,
)

if TYPE_CHECKING:
    from microllm.inference.packed_file import PackedFile
    from microllm.io.checkpoint import Weights

PlanPrecision = Literal["fp32", "bf16", "int8", "int4"]


class Embedding:
    """The token table, kept as the file has it where that is eight-bit blocks.

    Shapes:  values [V, D] of any float dtype, or int8 with scale [V, U]
    """

    def __init__(self, values_VD: Tensor, scale_VU: Tensor | None = None) -> None:
        self._values, self._scale = values_VD, scale_VU

    def __call__(self, ids_M: Tensor) -> Tensor:
        """Return the rows that ids name: [M, D] fp32, exact."""
        x_MD = self._values.index_select(0, ids_M).float()
        if self._scale is None:
            return x_MD
        scale_MU = self._scale.index_select(0, ids_M)
        return x_MD.view(*scale_MU.shape, -1).mul_(scale_MU.unsqueeze(2)).view(x_MD.shape)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: norms in fp32 [D] (or [K] in pairs), and four packed matrices."""

    input_norm: Tensor
    qkv: PackedWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedWeight
    ffn_norm: Tensor
    gate_up: DenseWeight | Int4Weight
    down: PackedWeight


@dataclass(frozen=True, slots=True)
class PlanWeights:
    """Everything that a plan multiplies by."""

    config: ModelConfig
    precision: PlanPrecision
    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedWeight

    def matrices(self) -> list[PackedWeight]:
        """Return every packed matrix, the head last."""
        return [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [self.head]

    @property
    def kernels(self) -> dict[str, int]:
        """Return what multiplies one row, and for how many matrices."""
        return dict(Counter(matrix.kernel for matrix in self.matrices()))


def pack_weights(
    weights: Weights, config: ModelConfig, precision: PlanPrecision, *, wide_dtype: torch.dtype,
    packed_file: PackedFile | None = None,
) -> PlanWeights:  # fmt: skip
    """Return a checkpoint's weights packed for this CPU.

    "int4" takes four- and eight-bit blocks of a GGUF file as they are (an eight-bit head refined), and rounds floats to
    16 steps a group (the head to 256); "int8" rounds floats to 256 steps. What cannot be packed so stays bf16.
    ``wide_dtype`` is what products of many rows are made in. ``packed_file`` gives what an earlier load packed, and
    takes what this one does.

    Raises:
        CheckpointError: a file is damaged.
    """
    packer = _Packer(weights, config, precision, wide_dtype, packed_file)
    layers = tuple(packer.layer(f"layers.{index}.") for index in range(config.num_hidden_layers))
    embedding, head = packer.table("embed_tokens.weight"), "lm_head.weight"
    tied = config.tie_word_embeddings
    return PlanWeights(
        config=config, precision=precision, embedding=embedding, layers=layers, norm=packer.vector("norm.weight"),
        head=packer.head("embed_tokens.weight", lambda: embedding) if tied else packer.head(head),
    )  # fmt: skip


class _Packer:
    """Reads tensors by name and packs them; ``packed_file`` gives planes that an earlier load has made."""

    def __init__(
        self, weights: Weights, config: ModelConfig, precision: PlanPrecision, wide_dtype: torch.dtype,
        packed_file: PackedFile | None,
    ) -> None:  # fmt: skip
        self._weights, self._config, self._precision = weights, config, precision
        self._wide_dtype, self._file = wide_dtype, packed_file
        self._shapes = config.parameter_shapes()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._pairs = {name: _pairs(count, config.head_dim) for name, count in heads.items()}

    def layer(self, prefix: str) -> LayerWeights:
        """Return one layer's weights."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        pairs = _pairs(1, self._config.head_dim)
        norms = [
            self.vector(f"{attention}{name}.weight")[pairs].contiguous() if self._config.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=self.matrix(f"{prefix}qkv", [f"{attention}{name}_proj" for name in "qkv"]),
            q_norm=norms[0],
            k_norm=norms[1],
            output=self.matrix(f"{prefix}output", [f"{attention}o_proj"]),
            ffn_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.matrix(f"{prefix}gate_up", [f"{mlp}gate_proj", f"{mlp}up_proj"]),
            down=self.matrix(f"{prefix}down", [f"{mlp}down_proj"]),
        )

    def vector(self, name: str) -> Tensor:
        """Return a norm's weight in fp32."""
        return self._weights.read(name).float()

    def table(self, name: str) -> Embedding:
        """Return a table of rows."""
        if self._precision in ("int4", "int8") and self._weights.packed_type(name) == "q8_0":
            return Embedding(*q8_0_codes(self._weights.read_packed(name)))
        values = self._weights.read(name)
        return Embedding(values if self._precision != "bf16" else values.to(torch.bfloat16))

    def head(self, name: str, table: Callable[[], Embedding] | None = None) -> PackedWeight:
        """Return the matrix that gives logits; ``table`` returns its rows where they are at hand."""
        rows, columns = self._shapes[name]
        if self._precision != "int4" or self._weights.packed_type(name) != "q8_0" or rows % 16 or columns % GROUP:
            return self.matrix("head", [name.removesuffix(".weight")], bits=8)
        halves: list[tuple[Planes, Planes]] = []

        def half(index: int) -> Planes:
            if not halves:
                halves.append(half_planes(self._weights.read_packed(name)))
            return halves[0][index]

        high, low = (
            self._kept(f"head.{part}", _shape(rows, columns, 1), lambda index=index: half(index))
            for index, part in enumerate(("high", "low"))
        )
        return RefinedWeight((high, low), self.table(name) if table is None else table())

    def matrix(self, key: str, parts: list[str], bits: int = 4) -> DenseWeight | Int4Weight:
        """Return matrices stacked along their rows, packed."""
        names = [f"{part}.weight" for part in parts]
        biases = [f"{part}.bias" for part in parts if f"{part}.bias" in self._shapes]
        assert len(biases) in (0, len(parts)), f"{key}: some parts have a bias"
        bias = torch.cat([self._rows(name, self._weights.read(name)) for name in biases]).float() if biases else None

        def floats() -> Tensor:
            return torch.cat([self._rows(name, self._weights.read(name).float()) for name in names])

        num_rows, num_columns = sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]
        if self._precision in ("fp32", "bf16") or num_rows % 16 or num_columns % GROUP:
            return DenseWeight(floats().to(torch.float32 if self._precision == "fp32" else torch.bfloat16), bias)
        types = {self._weights.packed_type(name) for name in names}
        if self._precision == "int4" and len(types) > 1:
            return DenseWeight(floats().to(torch.bfloat16), bias)  # blocks of several types: floats hold them all
        if self._precision == "int4" and (stored := types.pop()) is not None:

            def from_blocks() -> Planes:
                return int4_planes(torch.cat([self._rows(n, self._weights.read_packed(n)) for n in names]), stored)

            planes = self._kept(key, _shape(num_rows, num_columns, 2 if stored == "q8_0" else 1), from_blocks)
            return Int4Weight(planes, floats().to(self._wide_dtype), bias, gated=key.endswith("gate_up"))
        bits, w_NK = 8 if self._precision == "int8" else bits, floats()
        shape = _shape(num_rows, num_columns, bits // 4)
        planes = self._kept(key, shape, lambda: quantised_planes(w_NK, bits))
        wide_NK = rounded(w_NK, bits).to(self._wide_dtype)
        return Int4Weight(planes, wide_NK, bias, gated=key.endswith("gate_up"))

    def _kept(self, key: str, shape: tuple[int, int, int], make: Callable[[], Planes]) -> Planes:
        """Return planes of rows, bytes of codes a row and groups from the packed file, or make and put them there."""
        planes = None if self._file is None else self._file.planes(key, shape)
        if planes is None:
            planes = make()
            if self._file is not None:
                self._file.add(key, planes)
        return planes

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        """Return a query or key matrix (or bias) with each head's rows in pairs; others as they are."""
        pairs = self._pairs.get(name.rsplit(".", 2)[1])
        return rows if pairs is None else rows[pairs]


def _shape(num_rows: int, num_columns: int, num_planes: int) -> tuple[int, int, int]:
    return num_rows, num_planes * num_columns // 2, num_planes * num_columns // GROUP


def _pairs(num_heads: int, head_dim: int) -> Tensor:
    """Return the order that puts row j of a head's first half beside row j of its second."""
    halves = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return halves.transpose(1, 2).flatten()
