"""Structures: measured regions in somebody else's model, and an exact way back (docs/structures.md)."""

from microllm.errors import CaptureRefused, GateRefused, GuardRefused, StructureError
from microllm.structures.adopt import Adoption, adopt_prequantized
from microllm.structures.attach import attach, auto_swaps, get
from microllm.structures.build import AttachConfig
from microllm.structures.capture import CapturedStage, capture
from microllm.structures.loop import DecodeLoop, decode_loop
from microllm.structures.plan import Plan, explain

__all__ = [
    "Adoption", "AttachConfig", "CaptureRefused", "CapturedStage", "DecodeLoop", "GateRefused", "GuardRefused", "Plan",
    "StructureError", "adopt_prequantized", "attach", "auto_swaps", "capture", "decode_loop", "explain", "get",
]  # fmt: skip
