"""Discovery: which regions of a host can be bound, seen in one real forward; and for the others, why not.

Place: the first step of every door. A region is found by its slots and shapes, and admitted by what was seen: the
modules were called, siblings shared one input in a fixed order, what was computed is what the structure's reference
computes. No class name, no model id. Assumptions are recorded. Binds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from microllm.errors import StructureError
from microllm.structures.binding import Binding, RegionBinding
from microllm.structures.guard import check_untouched, is_matrix
from microllm.structures.host import Host, find_host, join, look_up
from microllm.structures.impls import cosine
from microllm.structures.structure import Structure

EXAMPLE_ROWS = 8
SAME = 0.9999
"""Least cosine of a host's output with the reference's: below it the host computes something else."""
_ATTENTION = ("qkv_rope", "qk_norm_rope", "attention_core")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A region that is not bound, with the form and shape that stand against it."""

    structure: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A region that may be bound: its host's slots, an example of its inputs, and where its points are measured."""

    structure: Structure
    path: str
    layer: int | None
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Any]
    sizes: Mapping[str, int]
    points: Mapping[str, str]
    example: Mapping[str, Tensor]


@dataclass
class Discovery:
    """What a host offers."""

    host: Host
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """What one module was given and gave, a few rows of it, in the first call of a forward."""

    num_calls: int = 0
    rows: list[int] = field(default_factory=list)
    example: Tensor | None = None
    output: Tensor | None = None
    misfit: str | None = None


def discover(model: nn.Module, bindings: Sequence[Binding], run: Callable[[], object]) -> Discovery:
    """Return what of ``model`` can be bound; ``run`` is one real forward of it.

    Raises:
        StructureError: the model may not be attached to, no binding fits it, or the forward reaches none of its blocks.
    """
    check_untouched(model)
    host = find_host(model, bindings)
    found = Discovery(host)
    if host.head_dim % 2:
        found.assumptions.append(f"head_dim {host.head_dim} is odd: no rotary structure")
    watch = Watch(host)
    with watch, torch.no_grad():
        run()
    if not any(seen.num_calls for seen in watch.seen.values()):
        raise StructureError("got a forward that calls none of the model's blocks; need one of this very model")
    for region in host.binding.regions:
        sites = host.sites(region)
        if region.scope == "head" and not sites:
            found.refused.append(
                Refusal(region.structure.name, "head", "got no module for the head; the host multiplies by its table")
            )
        for path, module in sites:
            _judge(found, watch, region, path, module)
    return found


class Watch:
    """Hooks that look on during a forward: examples of rows, shared inputs, and what flows into the stream."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.seen: dict[str, Seen] = {}
        self.shared: dict[str, bool] = {}
        self.whole: dict[str, bool] = {}
        self.order: dict[str, list[str]] = {}
        self._stack, self._live = ExitStack(), {}

    def __enter__(self) -> Watch:
        prefix = join(self.host.stack_path, self.host.binding.stack["layers"])
        for i, layer in enumerate(self.host.layers):
            self._watch_layer(f"{prefix}.{i}", layer)
        watched = set(self.seen)
        for region in self.host.binding.regions:
            for path, module in self.host.sites(region):
                if path not in watched:
                    self._watch(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _watch(self, path: str, module: nn.Module, keep: Callable[[str, Any, Any], None] | None = None) -> None:
        seen = self.seen.setdefault(path, Seen())

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
            y = output[0] if isinstance(output, tuple) else output
            seen.num_calls += 1
            if x is None or not isinstance(y, Tensor):
                return
            seen.rows.append(x.numel() // max(1, x.shape[-1]))
            if seen.example is None and x.numel():
                seen.example, seen.output = _rows(x), _rows(y)
                seen.misfit = None if is_matrix(x) else f"shape {tuple(x.shape)} with strides {x.stride()}"
            if keep is not None:
                keep(path, x, y)

        self._stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _watch_layer(self, path: str, layer: nn.Module) -> None:
        live: dict[str, Any] = {}
        self.order[path] = []
        names = (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn",
            "post_attention_layernorm", "mlp",
        )  # fmt: skip

        def keep(site: str, x: Tensor, y: Tensor) -> None:
            name = site[len(path) + 1 :]
            self.order[path].append(name)
            live[name] = (x, y)

        def close(_: str, x: Tensor, y: Tensor) -> None:
            if all(name in live for name in names):
                inputs = [live[f"self_attn.{part}_proj"][0] for part in ("q", "k", "v")]
                in_order = [n for n in self.order[path] if n.endswith(("q_proj", "k_proj", "v_proj"))]
                once = in_order == [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
                shared = all(each is inputs[0] for each in inputs) and once
                self.shared[path] = self.shared.get(path, True) and shared
                self.whole[path] = self.whole.get(path, True) and shared and _flows(live, x, y)
            live.clear()
            self.order[path].clear()

        for name in names:
            module = look_up(layer, name)
            if isinstance(module, nn.Module):
                self._watch(f"{path}.{name}", module, keep)
        self._watch(path, layer, close)


def _flows(live: Mapping[str, tuple[Tensor, Tensor]], x: Tensor, y: Tensor) -> bool:
    """Say whether a block is norm, attention, sum, norm, network, sum, and no norm has another reader."""
    attended = live["self_attn"][1]
    middle = live["post_attention_layernorm"][0]
    return (
        live["input_layernorm"][0] is x
        and live["self_attn.q_proj"][0] is live["input_layernorm"][1]
        and live["mlp"][0] is live["post_attention_layernorm"][1]
        and torch.equal(middle, x + attended)
        and torch.equal(y, middle + live["mlp"][1])
    )


def _judge(found: Discovery, watch: Watch, region: RegionBinding, path: str, module: nn.Module) -> None:
    structure, host = region.structure, found.host
    try:
        weights = _weights(host, region, module, path)
        constants = _constants(host, region, module)
        seen = watch.seen.get(path, Seen())
        if not seen.num_calls:
            raise StructureError("got no call of it in the forward; need one to see what it is given")
        if seen.misfit and structure.name not in (*_ATTENTION, "decoder_block"):
            raise StructureError(f"got an input of {seen.misfit}; need rows that lie together")
        example = _example(host, structure, seen, path, watch)
        sizes = structure.check_weights(weights, path)
        sizes = structure.check_inputs(example, sizes, path)
        if len(structure.inputs) >= 1 and structure.inputs[0].name == "x" and len(example) == 1:
            outputs = (
                [seen] if structure.name != "qkv_pack" else [watch.seen[f"{path}.{p}_proj"] for p in ("q", "k", "v")]
            )
            _same(structure, example, weights, constants, outputs)
    except StructureError as error:
        found.refused.append(Refusal(structure.name, path, str(error).removeprefix(f"{path}: ")))
        return
    points = {name: join(path, "" if place == "." else place) for name, place in region.points.items()}
    found.candidates.append(
        Candidate(
            structure=structure, path=path, layer=_layer(host, path), weights=weights, constants=constants,
            sizes=sizes, points=points, example=example,
        )
    )  # fmt: skip


def _weights(host: Host, region: RegionBinding, module: nn.Module, path: str) -> dict[str, Tensor]:
    for place in region.without:
        extra = look_up(module, place)
        if extra is not None:
            raise StructureError(
                f"got {place} {tuple(extra.shape)}; need none: {region.structure.id} has no slot for it"
            )
    weights = {slot: tensor for slot, place in region.weights.items() if (tensor := look_up(module, place)) is not None}
    dtypes = {t.dtype for t in weights.values()} | {host.weight.dtype}
    if len(dtypes) != 1 or not host.weight.is_floating_point():
        raise StructureError(f"{path}: got dtypes {sorted(map(str, dtypes))}; need one floating dtype")
    return weights


def _constants(host: Host, region: RegionBinding, module: nn.Module) -> dict[str, Any]:
    structure = region.structure
    constants = {name: look_up(module, place) for name, place in region.constants.items()}
    missing = [place for name, place in region.constants.items() if constants[name] is None]
    if missing:
        raise StructureError(f"got no {missing[0]}; need it: {structure.id} computes with it")
    if structure.name not in (*_ATTENTION, "decoder_block"):
        return constants
    attention = module if structure.name in _ATTENTION else look_up(module, "self_attn")
    if getattr(attention, "sliding_window", None) is not None:
        raise StructureError(f"got a sliding window of {attention.sliding_window}; need attention to all keys")
    if structure.name != "attention_core" and host.head_dim % 2:
        raise StructureError(f"got head_dim {host.head_dim}; need an even one: pairs are turned")
    eps = host.binding.constants["eps"].rpartition(".")[2]
    found = {value for each in module.modules() if (value := vars(each).get(eps)) is not None}
    if "eps" in constants and len(found) != 1:
        raise StructureError(f"got norms of eps {sorted(found)}; need one: {structure.id} has one")
    return constants


def _example(host: Host, structure: Structure, seen: Seen, path: str, watch: Watch) -> dict[str, Tensor]:
    """Return inputs of the bound shape: rows that were seen, or for heads and caches drawn ones."""
    H, G, K = _heads(host, path)
    like = host.weight

    def draw(*shape: int) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)

    turns = torch.linspace(0, 3, K // 2, device=like.device).expand(1, 2, -1).contiguous()
    angles = {"cos": turns.cos(), "sin": turns.sin()}
    match structure.name:
        case "attention_core":
            return {"q": draw(1, H, 4, K), "k": draw(1, G, 4, K), "v": draw(1, G, 4, K)}
        case "qkv_rope" | "qk_norm_rope":
            return {"q": draw(1, 2, H, K), "k": draw(1, 2, G, K), **angles}
        case "decoder_block":
            if not watch.whole.get(path, False):
                raise StructureError(
                    "got a block whose parts do not flow as norm, attention, sum, norm, network, sum, a norm with one "
                    "reader; need it"
                )
            assert seen.example is not None, "a block that was called was given rows"
            cache = {"keys": draw(1, 16, G, K), "values": draw(1, 16, G, K)}
            turns = torch.linspace(0, 3, 16 * (K // 2), device=like.device).view(16, -1)
            angles = {"cos": turns.cos(), "sin": turns.sin()}
            positions = torch.tensor([[3, 4]], device=like.device)
            x = draw(2, seen.example.shape[1]) * seen.example.float().std().to(like.dtype)
            return {"x": x[None], **angles, **cache, "positions": positions}
        case "qkv_pack":
            layer = path.rpartition(".")[0]
            if not watch.shared.get(layer, False):
                raise StructureError("got siblings that do not share one input in the order q, k, v; need that")
            seen = watch.seen[f"{path}.q_proj"]
    if seen.example is None:
        raise StructureError("got no tensor in its call; need rows")
    return {"x": seen.example}


def _heads(host: Host, path: str) -> tuple[int, int, int]:
    layer, K = host.layers[_layer(host, path) or 0], host.head_dim
    query, key = (look_up(layer, f"self_attn.{part}_proj.weight").shape[0] for part in ("q", "k"))
    if query % K or key % K or query % key:
        raise StructureError(f"got {query} and {key} rows of queries and keys; need whole heads of {K}, grouped evenly")
    return query // K, key // K, K


def _same(
    structure: Structure, example: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any],
    seen: Sequence[Seen],
) -> None:  # fmt: skip
    """Raise unless the host gave what the reference gives."""
    outputs = structure.reference(example, weights, constants)
    for port, each in zip(structure.outputs, seen, strict=False):
        assert each.output is not None, "an example has its output"
        agreement = cosine(outputs[port.name], each.output)
        if not agreement >= SAME:
            raise StructureError(
                f"got {port.name} of cosine {agreement:.5f} with the reference of {structure.id}; need {SAME}: it "
                "computes something else"
            )


def _layer(host: Host, path: str) -> int | None:
    prefix = join(host.stack_path, host.binding.stack["layers"]) + "."
    return int(path[len(prefix) :].split(".")[0]) if path.startswith(prefix) else None


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])[-EXAMPLE_ROWS:].clone()
