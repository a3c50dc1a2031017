"""Operators: a contract, a plain-torch reference, and faster levels where they exist.

``CONTRACTS`` is the whole table; ``tests/ops/test_contracts.py`` drives every row of it.
"""

from microllm.ops.argmax import CONTRACT as _ARGMAX
from microllm.ops.argmax import argmax
from microllm.ops.attention import CONTRACT as _ATTENTION
from microllm.ops.attention import attention
from microllm.ops.contract import Contract
from microllm.ops.embedding import CONTRACT as _EMBEDDING
from microllm.ops.embedding import embedding
from microllm.ops.interop import as_tensor
from microllm.ops.kv_store import CONTRACT as _KV_STORE
from microllm.ops.kv_store import kv_store
from microllm.ops.linear import CONTRACT as _LINEAR
from microllm.ops.linear import linear
from microllm.ops.rms_norm import CONTRACT as _RMS_NORM
from microllm.ops.rms_norm import rms_norm
from microllm.ops.rope import CONTRACT as _ROPE
from microllm.ops.rope import rope
from microllm.ops.sample import CONTRACT as _SAMPLE
from microllm.ops.sample import sample
from microllm.ops.swiglu import CONTRACT as _SWIGLU
from microllm.ops.swiglu import swiglu

_ROWS = (_EMBEDDING, _RMS_NORM, _LINEAR, _ROPE, _KV_STORE, _ATTENTION, _SWIGLU, _ARGMAX, _SAMPLE)
CONTRACTS: dict[str, Contract] = {row.name: row for row in _ROWS}
"""Every operator's contract, by name, in the order a token meets them."""

__all__ = [
    "CONTRACTS",
    "argmax",
    "as_tensor",
    "attention",
    "embedding",
    "kv_store",
    "linear",
    "rms_norm",
    "rope",
    "sample",
    "swiglu",
]
