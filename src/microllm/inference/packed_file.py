"""Packed weights kept on the disk, so that a second start does not pack again.

Place: beside what ``pull`` fetched; ``plan_weights`` reads and fills it. A file is named after the model file's
contents and everything that decides the packed bytes, so that it is never stale; a damaged or missing one is made
anew, and a disk that takes no file only costs the time. Read through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from microllm.evidence.environment import read_device_name

_FORMAT = 5
"""To be raised with every change of what the packed bytes mean."""
_KEEP = 4
"""Packed files that stay; the least recently used go."""
_SCRATCH, _STALE_S = ".packing.", 3600


class PackedFile:
    """The packed form of one model file at one precision.

    ``facts`` are small decisions that were measured once on this machine and are kept with it.
    """

    def __init__(self, directory: Path, source: Path, precision: str) -> None:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._key = {
            "format": _FORMAT, "source": digest, "precision": precision, "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(), "cpu": read_device_name("cpu"),
        }  # fmt: skip
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:24]
        self.path = directory / f"{name}.safetensors"
        self.facts: dict[str, Any] = {}
        self._kept, self._added = self._read(), False

    def planes(self, key: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor] | None:
        """Return a matrix's planes of so many rows, bytes of codes a row and groups; None where it has none such."""
        codes, scales = (self._kept.get(f"{key}.{part}") for part in ("codes", "scales"))
        rows, num_bytes, groups = shape
        if codes is None or codes.dtype != torch.uint8 or codes.shape != (rows, num_bytes):
            return None
        if scales is None or scales.dtype != torch.bfloat16 or scales.shape != (groups, rows, 2):
            return None
        return codes, scales

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
        tensors = {name: tensor.contiguous() for name, tensor in self._kept.items()}
        header = {"key": json.dumps(self._key), "facts": json.dumps(self.facts), "digest": _digest(tensors)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._clear()
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self.path.parent) as scratch:
                staged = Path(scratch) / self.path.name
                save_file(tensors, staged, header)
                with staged.open("rb") as file:
                    os.fsync(file.fileno())
                staged.replace(self.path)
        except (OSError, SafetensorError):
            return
        self._added = False

    def _clear(self) -> None:
        """Remove the files that make room for one more, and what a killed process left behind."""
        own = [path for path in self.path.parent.glob("*.safetensors") if re.fullmatch("[0-9a-f]{24}", path.stem)]
        for path in sorted(own, key=lambda path: path.stat().st_mtime)[: 1 - _KEEP]:
            path.unlink(missing_ok=True)
        for path in self.path.parent.glob(f"{_SCRATCH}*"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)

    def _read(self) -> dict[str, Tensor]:
        if not self.path.is_file():  # a pipe would never end
            return {}
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                header = file.metadata() or {}
                if json.loads(header.get("key", "{}")) != self._key:
                    return {}
                facts = json.loads(header.get("facts", "{}"))
                kept = {name: file.get_tensor(name) for name in file.keys()}
            if _digest(kept) != header.get("digest"):
                return {}
        except (OSError, SafetensorError, RuntimeError, ValueError):
            return {}
        self.facts = facts if isinstance(facts, dict) else {}
        return kept


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of every tensor's bytes: 0.07 s for the demo."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
