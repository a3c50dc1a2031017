"""Triton kernels: the table that ``select`` reads when a call first may run one.

Place: ``kernels/<op>.py`` holds a kernel and its launcher, named like the operator. This package is imported on the
first such call and not before, so that ``import microllm`` needs no triton; its files may import triton at the top.

``run`` has the reference's signature and ``out=`` besides: None, or a tuple of the results to fill; it returns what
the reference returns. Operators with a diagnostic form take ``sink=`` too: a dict to put the intermediates into.
``suits`` has the reference's signature and says whether the kernel takes the call, and why. A row that lists "triton"
among its levels has an entry here, and an entry here has such a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from microllm.ops.kernels import (
    adamw,
    advance,
    argmax,
    attention_decode,
    attention_prefill,
    cross_entropy,
    kv_store,
    linear,
    linear_choice,
    linear_cross_entropy,
    linear_quantised,
    quantise,
    rms_norm,
    rope,
    sample,
    swiglu,
)
from microllm.ops.kernels.launch import Compiled, Kernel, noting


def _linear(op: str, run: Callable[..., Any], suits: Callable[..., tuple[bool, str]]) -> Kernel:
    return Kernel(run, noting(suits, partial(linear_choice.is_tuned, op)))


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(rms_norm.run, rms_norm.suits),
    "add_rms_norm": Kernel(rms_norm.run_add, rms_norm.suits),
    "rms_norm_backward": Kernel(rms_norm.run_backward, rms_norm.suits_backward),
    "rope": Kernel(rope.run, rope.suits),
    "qk_norm_rope": Kernel(rope.run_normed, rope.suits),
    "swiglu": Kernel(swiglu.run, swiglu.suits),
    "swiglu_backward": Kernel(swiglu.run_backward, swiglu.suits),
    "cross_entropy": Kernel(cross_entropy.run, cross_entropy.suits),
    "cross_entropy_backward": Kernel(cross_entropy.run_backward, cross_entropy.suits_backward),
    "adamw": Kernel(adamw.run, adamw.suits),
    "advance_rows": Kernel(advance.run, advance.suits),
    "quantise_int8": Kernel(quantise.run_to_int8, quantise.suits),
    "quantise_fp8": Kernel(quantise.run_to_fp8, quantise.suits),
    "quantise_fp8_fnuz": Kernel(quantise.run_to_fp8_fnuz, quantise.suits),
    "quantise_int4": Kernel(quantise.run_to_int4, quantise.suits),
    "dequantise_int8": Kernel(quantise.run_from_int8, quantise.suits),
    "dequantise_fp8": Kernel(quantise.run_from_fp8, quantise.suits),
    "dequantise_int4": Kernel(quantise.run_from_int4, quantise.suits),
    "linear": _linear("linear", linear.run, linear.suits),
    "linear_residual": _linear("linear_residual", linear.run_residual, linear.suits),
    "norm_linear": _linear("norm_linear", linear.run_norm, linear.suits),
    "norm_linear_swiglu": _linear("norm_linear_swiglu", linear.run_norm_swiglu, linear.suits),
    "linear_one_tiling": Kernel(linear.run_one_tiling, linear.suits_any),
    "linear_int8": _linear("linear_int8", linear_quantised.run_int8, linear_quantised.suits),
    "linear_fp8": _linear("linear_fp8", linear_quantised.run_fp8, linear_quantised.suits),
    "linear_int4": _linear("linear_int4", linear_quantised.run_int4, linear_quantised.suits),
    "norm_linear_codes": Kernel(linear_quantised.run_norm, linear_quantised.suits_codes),
    "linear_residual_codes": Kernel(linear_quantised.run_residual, linear_quantised.suits_codes),
    "norm_linear_swiglu_codes": Kernel(linear_quantised.run_norm_swiglu, linear_quantised.suits_codes),
    "argmax": Kernel(argmax.run, argmax.suits),
    "lm_head_argmax": _linear("lm_head_argmax", argmax.run_head, argmax.suits_head),
    "sample": Kernel(sample.run, argmax.suits),
    "penalise": Kernel(sample.run_penalise, argmax.suits),
    "linear_cross_entropy": Kernel(linear_cross_entropy.run, linear_cross_entropy.suits),
    "linear_cross_entropy_gradients": Kernel(linear_cross_entropy.run_gradients, linear_cross_entropy.suits),
    "kv_store_paged": Kernel(kv_store.run, kv_store.suits),
    "attention_decode": Kernel(attention_decode.run, noting(attention_decode.suits, attention_decode.is_tuned)),
    "attention_prefill": Kernel(attention_prefill.run, attention_prefill.suits),
    "attention_step": Kernel(
        attention_decode.run_step,
        noting(attention_decode.suits_step, lambda q, k, v, cos, sin, *rest: attention_decode.is_tuned(q, *rest)),
    ),
}
"""Every kernel by its operator's name."""

COMPILED: dict[str, tuple[Compiled, ...]] = {
    "rms_norm": rms_norm.COMPILED,
    "rope": rope.COMPILED,
    "swiglu": swiglu.COMPILED,
    "cross_entropy": cross_entropy.COMPILED,
    "adamw": adamw.COMPILED,
    "advance": advance.COMPILED,
    "quantise": quantise.COMPILED,
    "linear": linear.COMPILED,
    "linear_quantised": linear_quantised.COMPILED,
    "argmax": argmax.COMPILED,
    "sample": sample.COMPILED,
    "kv_store": kv_store.COMPILED,
    "attention_decode": attention_decode.COMPILED,
    "attention_prefill": attention_prefill.COMPILED,
}
"""What is compiled ahead of time, by file."""

__all__ = ["COMPILED", "KERNELS", "Compiled", "Kernel"]
