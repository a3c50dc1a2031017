"""8-bit floats as bytes: decoded and encoded by integer arithmetic, the same on every target and when interpreted.

For a format that the target does not load as such (``Target.fp8``). Exact: every number of the format, times a power
of two, is one of fp32 (the smallest are denormal there), and encoding rounds once, half to even, and saturates.

Format:  e4m3fn has exponent bias 7, NaN at 7F and FF, largest 448; e4m3fnuz has bias 8, NaN at 80 alone, largest 240
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(code, FNUZ: tl.constexpr):
    """Return in fp32 what bytes stand for: their bits in fp32's places, times what the exponents' biases differ by."""
    signed = code.to(tl.int8, bitcast=True).to(tl.int32)
    bits = (signed << 20) & -0x78100000  # 87F00000: the sign lies in all bits above too
    value = bits.to(tl.float32, bitcast=True)
    if FNUZ:
        return tl.where(signed == -128, float("nan"), value * 2.0**119)
    else:
        value *= 2.0**120
        return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def encode_e4m3(x, FNUZ: tl.constexpr):
    """Return the bytes nearest to x in fp32: ties to even, the largest for what is larger, NaN for NaN."""
    BIAS: tl.constexpr = 8 if FNUZ else 7
    LARGEST: tl.constexpr = 0x7F if FNUZ else 0x7E
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # Below the smallest normal number, adding one whose last bit is worth one code rounds as wanted.
    ADDEND: tl.constexpr = 2.0 ** (21 - BIAS)
    small = (tl.abs(x) + ADDEND).to(tl.int32, bitcast=True) - ((148 - BIAS) << 23)
    code = tl.minimum(tl.where(size < ((128 - BIAS) << 23), small, normal), LARGEST)
    sign = (bits >> 24) & 0x80
    if FNUZ:  # no negative zero: its byte is NaN
        code = tl.where(size > 0x7F800000, 0x80, code | tl.where(code == 0, 0, sign))
    else:
        code = tl.where(size > 0x7F800000, 0x7F, code) | sign
    return code.to(tl.uint8)
