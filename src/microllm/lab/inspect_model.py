"""What a checkpoint is, from its headers alone: sizes, bytes, cache cost, and what would be refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from microllm.config import ModelConfig
from microllm.errors import MicroLLMError
from microllm.io.checkpoint import check_tensors, open_checkpoint
from microllm.io.resolve import resolve_model


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint seen without its weights.

    Units:   bytes as stored in the file; ``kv_bytes_per_token`` in the cache dtype that each key names
    """

    name: str
    kind: str
    config: ModelConfig | None
    num_parameters: int
    num_tensors: int
    bytes_by_dtype: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    generation: dict[str, Any]
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as plain values for JSON."""
        return asdict(self)


def inspect_model(name: str) -> Inspection:
    """Return what the model called ``name`` is, reading headers and no payload.

    A model that this project refuses is still reported, with the reason in ``refused``.

    Raises:
        ModelNotFoundError: there is no such model.
    """
    source = resolve_model(name)
    try:
        checkpoint = open_checkpoint(source)
    except MicroLLMError as error:
        return Inspection(source.name, source.kind, None, 0, 0, {}, {}, {}, (str(error),))
    config = checkpoint.config
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.infos.values():
        stored[info.dtype] += info.num_bytes
    report = check_tensors(config.parameter_shapes(), checkpoint)
    refused = [f"missing tensor {n}" for n in report.missing]
    refused += [f"unexpected tensor {n}" for n in report.unexpected]
    refused += [f"tensor {n}: {report.reasons[n]}" for n in report.incompatible]
    return Inspection(
        name=source.name, kind=source.kind, config=config, num_parameters=config.num_parameters(),
        num_tensors=len(checkpoint.tensors.infos), bytes_by_dtype=dict(stored),
        kv_bytes_per_token={dtype: config.kv_bytes_per_token(dtype) for dtype in ("float32", "bfloat16")},
        generation={k: v for k, v in asdict(checkpoint.generation).items() if v not in (None, ())},
        refused=tuple(refused),
    )  # fmt: skip
