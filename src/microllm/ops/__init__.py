"""Operators: a contract, a plain-torch reference, and faster levels where they exist.

Every operator is a function here and ``torch.ops.microllm.NAME``. ``CONTRACTS`` is the whole table;
``tests/ops/test_contracts.py`` drives every row of it. ``select`` says which level a call would take and why,
``use`` forces one, ``batch_invariant`` holds rows to bits of their own, ``ledger`` counts what ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microllm.ops.adamw import ADAMW, adamw
from microllm.ops.advance import ADVANCE_ROWS, advance_rows
from microllm.ops.argmax import ARGMAX, LM_HEAD_ARGMAX, argmax, lm_head_argmax
from microllm.ops.arithmetic import ARITHMETIC, add, add_bias, causal_softmax, matmul, multiply, softmax
from microllm.ops.attention import ATTENTION, FULL, VARLEN, attention, attention_full, attention_varlen
from microllm.ops.attention_paged import DECODE, PREFILL, attention_decode, attention_prefill, decode_split
from microllm.ops.attention_step import ATTENTION_STEP, attention_step
from microllm.ops.contract import Contract
from microllm.ops.cross_entropy import LOSSES, cross_entropy, linear_cross_entropy, linear_cross_entropy_gradients
from microllm.ops.embedding import EMBEDDING, embedding
from microllm.ops.interop import as_tensor
from microllm.ops.kv_store import KV_STORE, KV_STORE_PAGED, kv_store, kv_store_paged
from microllm.ops.linear import LINEARS, linear, linear_one_tiling, linear_residual, norm_linear, norm_linear_swiglu
from microllm.ops.linear_codes import (
    CODED_LINEARS,
    linear_codes,
    linear_residual_codes,
    norm_linear_codes,
    norm_linear_swiglu_codes,
)
from microllm.ops.linear_quantised import LINEAR_FP8, LINEAR_INT4, LINEAR_INT8, linear_fp8, linear_int4, linear_int8
from microllm.ops.operator import Operator
from microllm.ops.quantise import (
    QUANTISERS,
    dequantise_fp8,
    dequantise_int4,
    dequantise_int8,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)
from microllm.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACKWARD, add_rms_norm, rms_norm
from microllm.ops.rope import QK_NORM_ROPE, ROPE, qk_norm_rope, rope
from microllm.ops.sample import PENALISE, SAMPLE, penalise, sample
from microllm.ops.select import Choice, batch_invariant, choose, is_watched, ledger, overlapped, use
from microllm.ops.swiglu import SWIGLU, SWIGLU_BACKWARD, swiglu

_ROWS = (
    EMBEDDING, RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACKWARD, *LINEARS, LINEAR_INT8, LINEAR_FP8, LINEAR_INT4,
    *CODED_LINEARS, *QUANTISERS, ROPE, QK_NORM_ROPE, KV_STORE, KV_STORE_PAGED, ATTENTION, FULL, VARLEN, DECODE, PREFILL,
    ATTENTION_STEP, SWIGLU, SWIGLU_BACKWARD, ARGMAX, LM_HEAD_ARGMAX, SAMPLE, PENALISE, *LOSSES, ADAMW, ADVANCE_ROWS,
    *ARITHMETIC,
)  # fmt: skip
OPERATORS: dict[str, Operator] = {operator.contract.name: operator for operator in _ROWS}
"""Every operator by name, called by position with the tensors and then the scalars of its contract."""

CONTRACTS: dict[str, Contract] = {name: operator.contract for name, operator in OPERATORS.items()}
"""Every operator's contract, by name."""


def select(name: str, example: Mapping[str, Any]) -> Choice:
    """Return the level that a call of operator ``name`` with these arguments would take, and why.

    Raises:
        OperatorError: ``use`` forces a level that does not suit.
    """
    return choose(CONTRACTS[name], tuple(example.values()))


__all__ = [
    "CONTRACTS", "OPERATORS", "Choice", "adamw", "add", "add_bias", "add_rms_norm", "advance_rows", "argmax",
    "as_tensor", "attention", "attention_decode", "attention_full", "attention_prefill", "attention_step",
    "attention_varlen", "batch_invariant", "causal_softmax", "cross_entropy", "decode_split", "dequantise_fp8",
    "dequantise_int4", "dequantise_int8", "embedding", "is_watched", "kv_store", "kv_store_paged", "ledger", "linear",
    "linear_codes", "linear_cross_entropy", "linear_cross_entropy_gradients", "linear_fp8", "linear_int4",
    "linear_int8", "linear_one_tiling", "linear_residual", "linear_residual_codes", "lm_head_argmax", "matmul",
    "multiply", "norm_linear", "norm_linear_codes", "norm_linear_swiglu", "norm_linear_swiglu_codes", "overlapped",
    "penalise", "qk_norm_rope", "quantise_fp8", "quantise_int4", "quantise_int8", "rms_norm", "rope", "sample",
    "select", "softmax", "swiglu", "use",
]  # fmt: skip
