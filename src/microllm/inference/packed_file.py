"""Packed weights kept on the disk, so that a second start does not pack again.

Place: beside what ``pull`` fetched; ``plan_weights`` reads and fills it. A file is named after the model file's
contents and everything that decides the packed bytes, so that it is never stale; a damaged or missing one is made
anew, and a disk that takes no file only costs the time. Read through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = 3
"""To be raised with every change of what the packed bytes mean."""
_KEEP = 4
"""Packed files that stay; the least recently used go."""


class PackedFile:
    """The packed form of one model file at one precision.

    ``facts`` are small decisions that were measured once on this machine and are kept with it.
    """

    def __init__(self, directory: Path, source: Path, precision: str) -> None:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._key = {
            "format": _FORMAT, "source": digest, "precision": precision, "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
        }  # fmt: skip
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:24]
        self.path = directory / f"{name}.safetensors"
        self.facts: dict[str, Any] = {}
        self._kept, self._added = self._read(), False

    def planes(self, key: str) -> tuple[Tensor, Tensor] | None:
        """Return a matrix's planes, or None where they have not been kept."""
        codes, scales = f"{key}.codes", f"{key}.scales"
        return (self._kept[codes], self._kept[scales]) if {codes, scales} <= self._kept.keys() else None

    def add(self, key: str, planes: tuple[Tensor, Tensor]) -> None:
        """Keep a matrix's planes for ``save``."""
        self._added = True
        self._kept[f"{key}.codes"], self._kept[f"{key}.scales"] = planes

    def save(self) -> None:
        """Write what has been added, whole or not at all; the least recently used files make room."""
        if not self._added:
            with suppress(OSError):
                os.utime(self.path)
            return
        header = {"key": json.dumps(self._key), "facts": json.dumps(self.facts)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".packing.", dir=self.path.parent) as scratch:
                staged = Path(scratch) / self.path.name
                save_file({name: tensor.contiguous() for name, tensor in self._kept.items()}, staged, header)
                staged.replace(self.path)
            files = sorted(self.path.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_KEEP]:
                path.unlink(missing_ok=True)
        except (OSError, SafetensorError):
            return
        self._added = False

    def _read(self) -> dict[str, Tensor]:
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                header = file.metadata() or {}
                if json.loads(header.get("key", "{}")) != self._key:
                    return {}
                facts = json.loads(header.get("facts", "{}"))
                kept = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError, RuntimeError, ValueError):
            return {}
        self.facts = facts if isinstance(facts, dict) else {}
        return kept
