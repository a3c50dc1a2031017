"""Weights of one byte or half a byte on the device: codes to fp32, in integer arithmetic on every target.

Place: read by the linears. A byte becomes a float by being put among a float's bits, because conversion instructions
run at a quarter of the rate of others. All values are exact.

Formats: "plain" is no code; "int8"; "int4", whose byte j of a block of 32 columns holds column j low and 16 + j high;
         "e4m3fn" and "e4m3fnuz" as ``fp8`` has them
"""

from __future__ import annotations

import triton
import triton.language as tl

from microllm.ops.kernels.fp8 import decode_e4m3


@triton.jit
def column(j, FORMAT: tl.constexpr):
    """Return the column of x that position j of a weight row meets first; int4's second one is 16 further on."""
    if FORMAT == "int4":
        return j + (j // 16) * 16
    else:
        return j


@triton.jit
def decoded(raw, plane: tl.constexpr, FORMAT: tl.constexpr):
    """Return weights as fp32, or the codes of one plane (int4 has two): 0x4B000000 | b is the float 2^23 + b."""
    if FORMAT == "plain":
        value = raw.to(tl.float32)
    elif FORMAT == "int8":
        bits = raw.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080  # 2^23 + 128 + code
        value = bits.to(tl.float32, bitcast=True) - 8388736.0
    elif FORMAT == "int4" and plane == 0:
        bits = (raw.to(tl.int32) & 0x0F) | 0x4B000000
        value = bits.to(tl.float32, bitcast=True) - 8388608.0
    elif FORMAT == "int4":
        bits = (raw.to(tl.int32) & 0xF0) | 0x49000000  # 2^19, whose last bits are sixteenths
        value = bits.to(tl.float32, bitcast=True) - 524288.0
    else:
        value = decode_e4m3(raw, FORMAT == "e4m3fnuz")
    return value
