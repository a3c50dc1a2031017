"""Operators: a contract, a plain-torch reference, and faster levels where they exist.

Every operator is a function here and ``torch.ops.microllm.NAME``. ``CONTRACTS`` is the whole table;
``tests/ops/test_contracts.py`` drives every row of it. ``select`` says which level a call would take and why,
``use`` forces one, ``ledger`` counts what ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microllm.ops.adamw import OPERATORS as _ADAMW
from microllm.ops.adamw import adamw
from microllm.ops.argmax import OPERATORS as _ARGMAX
from microllm.ops.argmax import argmax, lm_head_argmax
from microllm.ops.arithmetic import OPERATORS as _ARITHMETIC
from microllm.ops.arithmetic import add, add_bias, causal_softmax, matmul, multiply, softmax
from microllm.ops.attention import OPERATORS as _ATTENTION
from microllm.ops.attention import attention, attention_full, attention_varlen
from microllm.ops.attention_paged import OPERATORS as _ATTENTION_PAGED
from microllm.ops.attention_paged import attention_decode, attention_prefill
from microllm.ops.contract import Contract
from microllm.ops.cross_entropy import OPERATORS as _CROSS_ENTROPY
from microllm.ops.cross_entropy import cross_entropy
from microllm.ops.embedding import OPERATORS as _EMBEDDING
from microllm.ops.embedding import embedding
from microllm.ops.interop import as_tensor
from microllm.ops.kv_store import OPERATORS as _KV_STORE
from microllm.ops.kv_store import kv_store, kv_store_paged
from microllm.ops.linear import OPERATORS as _LINEAR
from microllm.ops.linear import linear, linear_one_tiling, linear_residual
from microllm.ops.linear_cross_entropy import OPERATORS as _LINEAR_CROSS_ENTROPY
from microllm.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_gradients
from microllm.ops.linear_quantised import OPERATORS as _LINEAR_QUANTISED
from microllm.ops.linear_quantised import linear_fp8, linear_int4, linear_int8
from microllm.ops.norm_linear import OPERATORS as _NORM_LINEAR
from microllm.ops.norm_linear import norm_linear, norm_linear_swiglu
from microllm.ops.operator import Operator
from microllm.ops.quantise import OPERATORS as _QUANTISE
from microllm.ops.quantise import (
    dequantise_fp8,
    dequantise_int4,
    dequantise_int8,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)
from microllm.ops.rms_norm import OPERATORS as _RMS_NORM
from microllm.ops.rms_norm import add_rms_norm, rms_norm
from microllm.ops.rope import OPERATORS as _ROPE
from microllm.ops.rope import qk_norm_rope, rope
from microllm.ops.sample import OPERATORS as _SAMPLE
from microllm.ops.sample import penalise, sample
from microllm.ops.select import Choice, choose, ledger, use
from microllm.ops.swiglu import OPERATORS as _SWIGLU
from microllm.ops.swiglu import swiglu

_ROWS = (
    *_EMBEDDING, *_RMS_NORM, *_LINEAR, *_NORM_LINEAR, *_QUANTISE, *_LINEAR_QUANTISED, *_ROPE, *_KV_STORE, *_ATTENTION,
    *_ATTENTION_PAGED, *_SWIGLU, *_ARGMAX, *_SAMPLE, *_CROSS_ENTROPY, *_LINEAR_CROSS_ENTROPY, *_ADAMW, *_ARITHMETIC,
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
    "CONTRACTS", "OPERATORS", "Choice", "add", "add_bias", "add_rms_norm", "adamw", "argmax", "as_tensor", "attention",
    "attention_decode", "attention_full", "attention_prefill", "attention_varlen", "causal_softmax", "cross_entropy",
    "dequantise_fp8", "dequantise_int4", "dequantise_int8", "embedding", "kv_store", "kv_store_paged", "ledger",
    "linear", "linear_cross_entropy", "linear_cross_entropy_gradients", "linear_fp8", "linear_int4", "linear_int8",
    "linear_one_tiling", "linear_residual", "lm_head_argmax", "matmul", "multiply", "norm_linear",
    "norm_linear_swiglu", "penalise", "qk_norm_rope", "quantise_fp8", "quantise_int4", "quantise_int8", "rms_norm",
    "rope", "sample", "select", "softmax", "swiglu", "use",
]  # fmt: skip
