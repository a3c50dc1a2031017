"""Record what flows through any ``nn.Module``: inputs, outputs, loss, gradients, optimizer state.

Place: ``lab/align`` records a model and its twin and hands both traces to ``compare``.
Does not time: a pass that records values synchronises and copies, so it never yields a time.

A *site* is a module's path without a leading ``model.``, so that a Hugging Face model and ours give the same names
("layers.3.self_attn.q_proj"); the module itself is ``root``. Of a module's arguments or results one tensor is
recorded: the first floating-point one with an axis, positional before keyword, looking into tuples and mappings;
else the first tensor (token ids). A module called again counts as the next *occurrence*.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pydantic import ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import Record, TensorStatistics, same_bits, tensor_statistics

Keep = Literal["stats", "sample", "whole"]
Kind = Literal["input", "output", "loss", "gradient", "activation_gradient", "parameter", "optimizer"]
Key: TypeAlias = tuple[str, str, int]
Sites: TypeAlias = Sequence[str] | Callable[[str], bool] | None

ROOT = "root"
"""The site of the recorded module itself."""
FORCING: ContextVar[bool] = ContextVar("teacher_forcing", default=False)
"""Whether ``teacher_forcing`` is at work; a trace remembers it, since its errors mean something else then."""
_SHARED_WINDOW = 8  # an input nearly always equals one of the last few records: they share one stored copy


class TensorRecord(Record):
    """One tensor that passed a site: what it was, its statistics, and as much of it as was kept.

    Shapes: ``values`` has ``shape`` when complete; else it is one axis of evenly spread elements, or None
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kind: Kind
    site: str
    occurrence: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    statistics: TensorStatistics
    values_key: str | None = None
    values: Tensor | None = Field(default=None, exclude=True, repr=False)

    @property
    def key(self) -> Key:
        """What a record is paired by."""
        return self.kind, self.site, self.occurrence

    @property
    def complete(self) -> bool:
        """Whether every element was kept."""
        return self.values is not None and tuple(self.values.shape) == self.shape


class _TraceFile(Record):
    schema_version: Literal[1] = 1
    keep: Keep
    sample_size: int
    teacher_forced: bool
    records: tuple[TensorRecord, ...]


class Trace:
    """Records in the order in which the tensors appeared (dataflow order); values lie in host memory.

    Raises:
        EvidenceError: ``sample_size`` is not positive.
    """

    def __init__(self, keep: Keep = "stats", sample_size: int = 4096) -> None:
        if sample_size < 1:
            raise EvidenceError(f"got sample_size={sample_size}; need at least 1")
        self.keep: Keep = keep
        self.sample_size = sample_size
        self.teacher_forced = False
        self.records: list[TensorRecord] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._recent: deque[Tensor] = deque(maxlen=_SHARED_WINDOW)

    def add(self, kind: Kind, site: str, tensor: Tensor, occurrence: int | None = None) -> int:
        """Record one tensor (a loss, say) and return its occurrence, counted unless given."""
        if occurrence is None:
            occurrence = self._counts[kind, site]
            self._counts[kind, site] += 1
        self.teacher_forced = self.teacher_forced or FORCING.get()
        tensor = tensor.detach()
        made = TensorRecord(
            kind=kind, site=site, occurrence=occurrence, shape=tuple(tensor.shape), device=str(tensor.device),
            dtype=str(tensor.dtype).removeprefix("torch."), statistics=tensor_statistics(tensor),
            values=self._kept(tensor),
        )  # fmt: skip
        self.records.append(made)
        return occurrence

    def add_gradients(self, module: nn.Module, prefix_strip: str = "model.") -> None:
        """Record the gradient of every parameter that has one; a tied weight counts once."""
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                self.add("gradient", name.removeprefix(prefix_strip), parameter.grad)

    def add_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer, prefix_strip: str = "model.") -> None:
        """Record every parameter as it is now, and each tensor that the optimizer keeps for it.

        Raises:
            EvidenceError: the optimizer holds a parameter that is not the module's.
        """
        names = {parameter: name.removeprefix(prefix_strip) for name, parameter in module.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in names:
                raise EvidenceError(
                    f"got an optimizer parameter of shape {tuple(parameter.shape)} that is not the module's; "
                    "need the optimizer of this module"
                )
            self.add("parameter", names[parameter], parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self.add("optimizer", f"{names[parameter]}.{key}", value)

    def find(self, kind: Kind, site: str, occurrence: int = 0) -> TensorRecord | None:
        """Return the record of that kind, site and occurrence, or None."""
        return next((r for r in self.records if r.key == (kind, site, occurrence)), None)

    def save(self, directory: Path) -> None:
        """Write ``trace.json`` and ``trace.safetensors`` into ``directory``; equal neighbours are stored once."""
        stored: dict[int, str] = {}
        tensors: dict[str, Tensor] = {}
        records: list[TensorRecord] = []
        for record in self.records:
            if record.values is not None:
                key = stored.setdefault(id(record.values), f"{len(stored):06d}")
                tensors[key] = record.values
                record = record.model_copy(update={"values_key": key})
            records.append(record)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "trace.safetensors")
        body = _TraceFile(
            keep=self.keep, sample_size=self.sample_size, teacher_forced=self.teacher_forced, records=tuple(records)
        )
        (directory / "trace.json").write_text(body.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def _kept(self, tensor: Tensor) -> Tensor | None:
        if self.keep == "stats":
            return None
        if self.keep == "whole" or tensor.numel() <= self.sample_size:
            values = tensor.to("cpu", copy=True).contiguous()
        else:
            places = torch.unravel_index(_spread(tensor.numel(), self.sample_size), tensor.shape)
            values = tensor[tuple(place.to(tensor.device) for place in places)].cpu()
        for earlier in self._recent:
            if same_bits(earlier, values):
                return earlier
        self._recent.append(values)
        return values


def load_trace(directory: Path) -> Trace:
    """Read what ``Trace.save`` wrote.

    Raises:
        EvidenceError: a file is missing or damaged, or the two do not belong together.
    """
    try:
        body = _TraceFile.model_validate(json.loads((directory / "trace.json").read_text(encoding="utf-8")))
        tensors = load_file(directory / "trace.safetensors")
    except (OSError, ValueError, ValidationError, SafetensorError) as error:
        raise EvidenceError(f"got an unreadable trace in {directory} ({error}); record it again") from error
    trace = Trace(body.keep, body.sample_size)
    trace.teacher_forced = body.teacher_forced
    for record in body.records:
        values = tensors.get(record.values_key) if record.values_key is not None else None
        if record.values_key is not None and (
            values is None
            or str(values.dtype) != f"torch.{record.dtype}"
            or tuple(values.shape) not in (record.shape, (body.sample_size,))
        ):
            raise EvidenceError(f"got no fitting values for {record.key} in {directory}; record it again")
        trace.records.append(record.model_copy(update={"values": values}))
        trace._counts[record.kind, record.site] += 1
    return trace


@contextmanager
def record(
    module: nn.Module,
    *,
    sites: Sites = None,
    keep: Keep = "stats",
    gradients: bool = False,
    sample_size: int = 4096,
    prefix_strip: str = "model.",
) -> Iterator[Trace]:
    """Record the input and output of every matching module while the context is open.

    ``gradients`` also records the gradient of each recorded output, if the backward pass runs inside the context.
    Hooks are gone after it, whatever happened; recorders nest.

    Raises:
        EvidenceError: no module matches, or two give the same site.
    """
    trace, matches, seen = Trace(keep, sample_size), site_matcher(sites), set[str]()
    with ExitStack() as stack:
        for name, child in module.named_modules():
            site = site_name(name, prefix_strip)
            if not matches(site):
                continue
            if site in seen:
                raise EvidenceError(f"got two modules for site {site!r}; need another prefix_strip")
            seen.add(site)
            _watch(stack, trace, child, site, gradients)
        if not seen:
            raise EvidenceError(f"got sites {sites!r}, which match no module; need names such as 'layers.*'")
        yield trace


def site_name(module_name: str, prefix_strip: str = "model.") -> str:
    """Return the site of a module's dotted name."""
    return module_name.removeprefix(prefix_strip) or ROOT


def site_matcher(sites: Sites) -> Callable[[str], bool]:
    """Return a test for site names: ``*`` stands for one dotted part, ``**`` for any number; None takes all."""
    if sites is None:
        return lambda site: True
    if callable(sites):
        return sites
    if isinstance(sites, str):
        raise EvidenceError(f"got sites={sites!r}; need a list of patterns; write [{sites!r}]")
    alternatives = (re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*") for pattern in sites)
    compiled = re.compile("|".join(alternatives) or r"(?!)")
    return lambda site: compiled.fullmatch(site) is not None


def main_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor] | None:
    """Return where a call's main tensor stands (position or keyword) and the tensor, or None."""
    tensors = [(at, value) for at, value in [*enumerate(args), *kwargs.items()] if isinstance(value, Tensor)]
    return next((pair for pair in tensors if _is_activation(pair[1])), tensors[0] if tensors else None)


def main_output(output: object) -> Tensor | None:
    """Return the main tensor of a module's result, or None."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    tensors = [tensor for part in parts if (tensor := main_output(part)) is not None]
    return next((tensor for tensor in tensors if _is_activation(tensor)), tensors[0] if tensors else None)


def _is_activation(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 0


def _watch(stack: ExitStack, trace: Trace, module: nn.Module, site: str, gradients: bool) -> None:  # noqa: FBT001
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = main_input(args, kwargs)
        if found is not None:
            trace.add("input", site, found[1])

    def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        tensor = main_output(output)
        if tensor is None:
            return
        occurrence = trace.add("output", site, tensor)
        if gradients and tensor.requires_grad:

            def arrived(gradient: Tensor) -> None:
                trace.add("activation_gradient", site, gradient, occurrence)

            stack.callback(tensor.register_hook(arrived).remove)

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _spread(numel: int, count: int) -> Tensor:
    """Return ``count`` flat indices, one in each equal stretch, at a golden-ratio place inside it.

    An even stride would hit the same columns of every row.
    """
    steps = torch.arange(count, dtype=torch.float64)
    places = ((steps + (steps * 0.6180339887498949).frac()) * numel / count).long()
    return places.clamp_(max=numel - 1)
