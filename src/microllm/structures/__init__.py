"""Structures: measured regions in somebody else's model, and an exact way back (docs/structures.md)."""

from microllm.structures.attach import attach, auto_swaps, get
from microllm.structures.build import AttachConfig
from microllm.structures.loop import DecodeLoop, decode_loop
from microllm.structures.plan import Plan, explain

__all__ = ["AttachConfig", "DecodeLoop", "Plan", "attach", "auto_swaps", "decode_loop", "explain", "get"]
