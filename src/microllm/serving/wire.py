"""Frames between the HTTP process and an engine's: four bytes of length, then JSON.

JSON, so that neither side can make the other run anything, and a frame can be read by a person. NaN and infinities
pass, as Python's JSON writes them.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]
_LENGTH_BYTES = 4


def encode_frame(message: Message) -> bytes:
    """Return a message as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts what a socket brings into messages, wherever its reads end."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take the next bytes; return the messages that are complete now."""
        self._bytes += data
        messages, start = [], 0
        while len(self._bytes) >= (body := start + _LENGTH_BYTES):
            end = body + int.from_bytes(self._bytes[start:body], "big")
            if len(self._bytes) < end:
                break
            messages.append(json.loads(self._bytes[body:end]))
            start = end
        del self._bytes[:start]
        return messages
