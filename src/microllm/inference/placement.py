"""Where a model may run and in what: devices and precisions by the names that options use."""

from __future__ import annotations

import re

import torch

from microllm.config import DtypeName
from microllm.errors import ConfigError, UnavailableError

PRECISIONS: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PACKED_PRECISIONS = ("int8", "int4")


def choose_device(device: str) -> torch.device:
    """Return the torch device that a name stands for.

    Raises:
        ConfigError: the name is none of "auto", "cpu", "cuda", "cuda:N".
        UnavailableError: this machine, or this build of torch, has no such GPU.
    """
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    num_gpus = torch.cuda.device_count() if kind in ("auto", "cuda") else 0
    if device in ("auto", "cpu"):
        return torch.device("cuda:0" if num_gpus else "cpu")
    if kind != "cuda" or (":" in device and not re.fullmatch("[0-9]{1,4}", index)):
        raise ConfigError(f"got device {device!r}; need auto, cpu, cuda or cuda:N")
    if int(index or 0) >= num_gpus:
        build = torch.version.cuda or "no CUDA support"
        raise UnavailableError(
            f"got device {device!r}; torch {torch.__version__} ({build}) sees {num_gpus} CUDA devices; "
            "use device='cpu', or a CUDA build of torch on a machine with a GPU"
        )
    return torch.device("cuda", int(index or 0))


def engine_precision(precision: str, device: str) -> str:
    """Return what to ``load`` for an engine: fp32 in place of "auto" on a CPU, where that may be int4."""
    return "fp32" if precision == "auto" and choose_device(device).type == "cpu" else precision
