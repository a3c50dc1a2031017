"""The seam to other frameworks: arrays enter as tensors without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.errors import OperatorError


def as_tensor(array: Any) -> Tensor:
    """Return ``array`` as a tensor over the same memory: NumPy, JAX, CuPy, anything with DLPack.

    Raises:
        OperatorError: the object does not speak DLPack, or its memory cannot be shared (read-only, byte-swapped).
    """
    if isinstance(array, Tensor):
        return array
    try:
        return torch.from_dlpack(array)
    except (AttributeError, TypeError, BufferError, RuntimeError) as error:
        raise OperatorError(
            f"as_tensor: got {type(array).__name__} ({error}); need an array whose memory DLPack can share; "
            "copy it into a writable native array first"
        ) from error
