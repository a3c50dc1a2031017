"""How a checkpoint becomes a Transformer: names checked first, then tensor by tensor onto the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from microllm.config import warn_of_overflow
from microllm.model.rotary import Rotary
from microllm.model.transformer import Transformer

if TYPE_CHECKING:
    from microllm.io.checkpoint import Checkpoint, LoadReport, MapEntry


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
    if (asked := str(weight_dtype).removeprefix("torch.")) != config.dtype:  # the readers warn of the file's own
        warn_of_overflow(config.family, asked)
    weights = read_tensors(checkpoint, config.parameter_shapes())  # judged before absurd sizes are used
    model = Transformer(config, dtype=weight_dtype, device="meta")
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(device=device, dtype=weight_dtype), requires_grad=False)
        setattr(model.get_submodule(path), leaf, parameter)
    model.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings, torch.device(device))
    return model.eval()


def load_weights(
    model: Transformer, checkpoint: Checkpoint, *, strict: bool = True, name_map: Mapping[str, MapEntry] | None = None
) -> LoadReport:
    """Copy a checkpoint's tensors into a model, in its own dtype, and return what loaded and what did not.

    Every name and shape is checked before the first parameter changes. ``strict=False`` loads what fits and leaves the
    rest of the model as it is; ``name_map`` says which parameter a foreign stored name is, and whether transposed.

    Raises:
        LoadError: strict, and tensors are missing, unexpected or of another shape; the model is as it was.
        CheckpointError: a file is damaged.
    """
    from microllm.io.checkpoint import check_tensors, read_tensors  # noqa: PLC0415  (as above)

    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, tensor in read_tensors(checkpoint, shapes, strict=strict, name_map=name_map):
            parameters[name].copy_(tensor)
    return check_tensors(shapes, checkpoint, name_map)
