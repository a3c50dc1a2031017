"""How a checkpoint becomes a Transformer: names checked first, then tensor by tensor onto the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from microllm.model.rotary import Rotary
from microllm.model.transformer import Transformer

if TYPE_CHECKING:
    from microllm.io.checkpoint import Checkpoint


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """Return the checkpoint's model with its weights, ready for inference.

    Every name and shape is checked before the first weight is read; weights stream to the device one at a time, so
    that the host holds at most one of them beside what the target is.

    Raises:
        LoadError: tensors are missing, unexpected or of another shape; all of them are named.
        CheckpointError: a file is damaged.
    """
    from microllm.io.checkpoint import read_tensors  # noqa: PLC0415  (readers load with the first model)

    config = checkpoint.config
    weight_dtype: torch.dtype = getattr(torch, config.dtype) if dtype is None else dtype
    model = Transformer(config, dtype=weight_dtype, device="meta")
    for name, tensor in read_tensors(checkpoint, config.parameter_shapes()):
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(device=device, dtype=weight_dtype), requires_grad=False)
        setattr(model.get_submodule(path), leaf, parameter)
    model.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings, torch.device(device))
    return model.eval()
