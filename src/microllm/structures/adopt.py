"""Adoption: a model that comes quantised is converted once and runs on our operators; there is no way back.

Place: ``adopt_prequantized`` is a door beside ``attach``, which quantises floating weights and can be undone. Reads a
directory of compressed-tensors, a GGUF file, or a loaded model that holds such parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from microllm.errors import GuardRefused, StructureError
from microllm.io.gguf import PACKED_FORMATS, GGUFSource, config_from_gguf
from microllm.io.hf_config import to_hf_config
from microllm.io.safetensors_files import SafetensorsSource
from microllm.structures.bindings.skeleton import make_skeleton
from microllm.structures.formats import hollow
from microllm.structures.guard import Form, Seat, Turn, joined_ledger
from microllm.structures.packed_weights import Stored, from_compressed_tensors, from_gguf
from microllm.structures.sites import Attachment, ModuleSite

FORMATS = ("auto", "compressed-tensors", "gguf")
_CODES = (torch.int8, torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class Adoption:
    """An adopted model: what was replaced, each layer's conversion error, and its ledger."""

    model: nn.Module
    format: str
    relative_l2: Mapping[str, float]
    attachment: Attachment = field(repr=False)

    @property
    def worst(self) -> tuple[str, float]:
        """Return the layer with the largest error."""
        return max(self.relative_l2.items(), key=lambda pair: pair[1])

    def summary(self) -> dict[str, Any]:
        """Return format, errors and what ran."""
        errors = list(self.relative_l2.values())
        found = {"format": self.format, "replaced": len(errors), "median": median(errors), "max": max(errors)}
        return found | joined_ledger(self.attachment.seats)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return each layer's ledger."""
        return {seat.path: seat.entry() for seat in self.attachment.seats}

    def detach(self) -> NoReturn:
        """Refuse: there are no floating weights.

        Raises:
            GuardRefused: always.
        """
        raise GuardRefused("got detach() of an adopted model, which has no floating weights; reload it from its files")


def adopt_prequantized(
    source: Path | str | nn.Module, fmt: str = "auto", *, dtype: torch.dtype = torch.bfloat16
) -> Adoption:  # fmt: skip
    """Convert a quantised model's weights and put them in place; what is not quantised is loaded as it is.

    Raises:
        StructureError: an unknown format, nothing quantised, or tensors missing.
        MissingExtraError: transformers is not installed.
    """
    if fmt not in FORMATS:
        raise StructureError(f"got format {fmt!r}; need one of {', '.join(FORMATS)}")
    if isinstance(source, nn.Module):
        return _adopted(
            source, "compressed-tensors", source.state_dict(), dict(_compressed(source.state_dict(), dtype))
        )
    path = Path(source)
    kind = fmt if fmt != "auto" else "gguf" if path.suffix == ".gguf" else "compressed-tensors"
    if kind == "gguf":
        gguf = GGUFSource(path)
        config, _ = config_from_gguf(gguf)
        model = make_skeleton(to_hf_config(config), dtype)
        stored = dict(_gguf_weights(gguf, dtype))
        plain = {name: gguf.read(name) for name in gguf.infos if name.removesuffix(".weight") not in stored}
        return _adopted(model, kind, plain, stored)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    method = config.get("quantization_config", {}).get("quant_method")
    if method != "compressed-tensors":
        raise StructureError(f"got {path}, quantised by {method!r}; need compressed-tensors, or a GGUF file")
    files = SafetensorsSource(path)
    tensors = {name: files.read(name) for name in files.infos}
    return _adopted(make_skeleton(config, dtype), kind, tensors, dict(_compressed(tensors, dtype)))


def _compressed(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Stored]]:
    for name in tensors:
        path, _, part = name.rpartition(".")
        if part == "weight_packed" or (part == "weight" and tensors[name].dtype in _CODES):
            parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == path}
            yield path, from_compressed_tensors(path, parts, dtype)


def _gguf_weights(source: GGUFSource, dtype: torch.dtype) -> Iterator[tuple[str, Stored]]:
    for name, info in source.infos.items():
        path, _, part = name.rpartition(".")
        if part != "weight" or len(info.shape) != 2 or path.endswith("embed_tokens"):
            continue
        if info.dtype in PACKED_FORMATS:
            blocks, stored = source.read_packed(name)
            bias = source.read(f"{path}.bias").to(dtype) if f"{path}.bias" in source.infos else None
            yield path, from_gguf(path, blocks, stored, bias, dtype)


@torch.no_grad()
def _adopted(
    model: nn.Module, kind: str, tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]
) -> Adoption:  # fmt: skip
    if not stored:
        raise StructureError("got a model without quantised weights; need some; attach() quantises floating ones")
    modules = dict(model.named_modules())
    unknown = [path for path in stored if not isinstance(modules.get(path), nn.Linear)]
    if unknown:
        raise StructureError(f"got quantised {unknown[0]}, which is no linear of the model; need one for each")
    missing = []
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        if path in stored:
            continue
        if name not in tensors or tensors[name].shape != parameter.shape:
            missing.append(name)
        else:
            parameter.copy_(tensors[name])
    if missing:
        raise StructureError(f"got no fitting tensor for {missing[:3]}; need every parameter that is not quantised")
    turn, sites = Turn(), []
    for path, each in stored.items():
        module = modules[path]
        weight = module.get_parameter("weight")
        form = Form(dtype=each.matrix.dtype, device=weight.device, width=each.matrix.num_in)
        seat = Seat("linear_proj", path, each.matrix, form)
        seat.can_fall_back = False
        sites.append(ModuleSite(module, seat, turn))
        if sum(other is weight for each_module in modules.values() for other in each_module.parameters(False)) == 1:
            weight.data = hollow(weight.data)  # a head's may be the token table's too
    attachment = Attachment(model, sites, turn)
    attachment.install(attachment.seats, "raise")
    attachment.refuse_state_dict()
    return Adoption(model, kind, {path: each.relative_l2 for path, each in stored.items()}, attachment)
