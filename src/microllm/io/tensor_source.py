"""What every weight file offers once its header has been read: names, shapes, and tensors one at a time.

Place: implemented by ``safetensors_files.SafetensorsSource`` and ``gguf.GGUFSource``; used by ``checkpoint``.
Names are the file's own in Hugging Face spelling (``model.layers.0.mlp.up_proj.weight``); ``names`` maps them to
run-time names. Does not load a model and never holds more than the tensor that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor as its header describes it.

    Shapes:  ``shape`` is the logical shape, also where the file keeps packed blocks
    Units:   ``num_bytes`` as stored; ``dtype`` is torch's name (``bfloat16``) or ggml's, lower case (``q4_1``)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorSource(Protocol):
    """A weight file (or a set of shards) whose header is read and valid."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every stored tensor by its on-disk name, in file order."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, dequantised when the file packs it."""
        ...
