"""Hosts: a module tree that a binding fits, and how its blocks are called.

Place: discovery, the loop and the seats read a ``Host``; nothing else looks into a model. A host is found by what its
modules hold, never by its class or its config's name. Does not change it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from microllm.errors import StructureError
from microllm.structures.binding import Binding, RegionBinding

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
"""What versions of transformers call a block's cache."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A model, the binding that fits it, and where its stack of blocks lies (a path, "" for the model itself)."""

    model: nn.Module
    binding: Binding
    stack_path: str
    assumptions: tuple[str, ...] = ()

    @property
    def stack(self) -> nn.Module:
        """Return the module that holds blocks, token table and final norm."""
        return self.model.get_submodule(self.stack_path)

    @property
    def layers(self) -> list[nn.Module]:
        """Return the blocks in order."""
        return list(self.stack.get_submodule(self.binding.stack["layers"]).children())

    @property
    def head(self) -> nn.Module | None:
        """Return the module that gives logits; None where the host multiplies by its token table itself."""
        return look_up(self.model, self.binding.head)

    @cached_property
    def head_dim(self) -> int:
        """Return the elements of a head."""
        return int(self.constant("head_dim"))

    @cached_property
    def num_kv_heads(self) -> int:
        """Return the heads of keys and values."""
        weight = look_up(self.layers[0], "self_attn.k_proj.weight")
        assert weight is not None, "a binding's slots were checked"
        return weight.shape[0] // self.head_dim

    @property
    def weight(self) -> Tensor:
        """Return the token table: its dtype and device are the model's."""
        weight = look_up(self.stack, f"{self.binding.stack['embed']}.weight")
        assert weight is not None, "a binding's slots were checked"
        return weight

    @cached_property
    def calls(self) -> Calls:
        """Return how its blocks are called."""
        return OwnCalls(self) if self.binding.protocol == "microllm" else TransformersCalls(self)

    def constant(self, name: str, layer: int = 0) -> float:
        """Return a number that the host keeps as an attribute of a block's module."""
        return look_up(self.layers[layer], self.binding.constants[name])

    def sites(self, region: RegionBinding) -> list[tuple[str, nn.Module]]:
        """Return the modules that a region stands for, with their paths from the model."""
        found = []
        for site in region.sites:
            if region.scope == "layer":
                prefix = join(self.stack_path, self.binding.stack["layers"])
                starts = [(f"{prefix}.{i}", layer) for i, layer in enumerate(self.layers)]
            else:
                starts = [(self.stack_path, self.stack) if region.scope == "stack" else (self.binding.head, self.head)]
            for path, start in starts:
                module = None if start is None else look_up(start, site)
                if isinstance(module, nn.Module):
                    found.append((join(path, "" if site == "." else site), module))
        return found


class Calls(Protocol):
    """How a family's stack is run over a cache of ours."""

    def tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions below ``capacity``: fp32 [S, P]."""
        ...

    def angles(self, x: Tensor, positions: Tensor) -> Any:
        """Return the rotary angles of positions [B, T], as blocks take them."""
        ...

    def layer(self, module: nn.Module, x: Tensor, angles: Any, positions: Tensor, cache: Any) -> Tensor:
        """Run one block."""
        ...


class TransformersCalls:
    """Blocks of ``transformers``: (hidden_states, attention_mask, position_ids, CACHE, position_embeddings)."""

    def __init__(self, host: Host) -> None:
        parameters = inspect.signature(type(host.layers[0]).forward).parameters
        named = [name for name in CACHE_NAMES if name in parameters]
        missing = {"hidden_states", "attention_mask", "position_embeddings"} - set(parameters)
        if missing or not named:
            raise StructureError(
                f"got blocks that take {sorted(parameters)}; need hidden_states, attention_mask, position_embeddings "
                f"and one of {', '.join(CACHE_NAMES)}; use a version of transformers that the binding was tested with"
            )
        self.cache_name, self._host = named[0], host
        self._rotary = host.stack.get_submodule(host.binding.stack["rotary"])
        attention = look_up(host.layers[0], "self_attn")
        self.implementation = getattr(getattr(attention, "config", None), "_attn_implementation", "sdpa")

    def tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions, as the host rounds them: fp32 [S, P]."""
        like = self._host.weight
        cos, sin = self._rotary(like[:1][None], torch.arange(capacity, device=like.device)[None])
        pairs = self._host.head_dim // 2
        return cos[0, :, :pairs].float().contiguous(), sin[0, :, :pairs].float().contiguous()

    def angles(self, x: Tensor, positions: Tensor) -> Any:
        """Return cosines and sines [B, T, K]."""
        return self._rotary(x, positions)

    def layer(self, module: nn.Module, x: Tensor, angles: Any, positions: Tensor, cache: Any) -> Tensor:
        """Run one block; its mask is the cache's."""
        mask = cache.mask
        if mask is not None and self.implementation == "eager":  # which adds its mask
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        out = module(
            x, attention_mask=mask, position_ids=positions, position_embeddings=angles, use_cache=True,
            **{self.cache_name: cache},
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out


class OwnCalls:
    """Blocks of this project's Transformer: (x, angles, positions, cache)."""

    def __init__(self, host: Host) -> None:
        self._rotary = host.stack.get_submodule(host.binding.stack["rotary"])
        self._device = host.weight.device

    def tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions: fp32 [S, P]."""
        cos, sin = self._rotary(torch.arange(capacity, device=self._device)[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def angles(self, x: Tensor, positions: Tensor) -> Any:
        """Return cosines and sines [B, T, P], fp32."""
        return self._rotary(positions)

    def layer(self, module: nn.Module, x: Tensor, angles: Any, positions: Tensor, cache: Any) -> Tensor:
        """Run one block."""
        return module(x, angles, positions, cache)


def attention_interface(attention: nn.Module) -> Any:
    """Return what a ``transformers`` attention module would call for its scores, as its own module says."""
    home = vars(sys.modules[type(attention).__module__])
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    return home["ALL_ATTENTION_FUNCTIONS"].get_interface(implementation, home["eager_attention_forward"])


def find_host(model: nn.Module, bindings: Sequence[Binding]) -> Host:
    """Return the model as the first binding that fits it sees it.

    Raises:
        StructureError: none fits; the text says for each what it lacks.
    """
    reasons = []
    for binding in bindings:
        for path, module in model.named_modules():
            layers = look_up(module, binding.stack["layers"])
            if not isinstance(layers, nn.ModuleList) or not len(layers):
                continue
            missing = _missing(module, layers, binding)
            if not missing:
                return Host(model=model, binding=binding, stack_path=path)
            reasons.append(f"{binding.name}: {missing[0]}")
    raise StructureError(
        f"got a {type(model).__name__} that no binding fits ({'; '.join(reasons) or 'no blocks'}); need one of "
        f"{', '.join(b.name for b in bindings)}, or a binding of its own (docs/structures.md)"
    )


def _missing(stack: nn.Module, layers: Iterable[nn.Module], binding: Binding) -> list[str]:
    found = [f"no {path!r} beside the blocks" for path in binding.stack.values() if look_up(stack, path) is None]
    for i, layer in enumerate(layers):
        for path, wanted in binding.has.items():
            if (look_up(layer, path) is not None) != wanted:
                found.append(f"block {i} has {'no ' if wanted else ''}{path}")
        for region in binding.regions:
            slots = {slot.name: slot.optional for slot in region.structure.weights}
            sites = region.sites if region.scope == "layer" else ()
            for site in sites:
                start = look_up(layer, site)
                for slot, path in region.weights.items():
                    if not slots[slot] and (start is None or look_up(start, path) is None):
                        found.append(f"block {i} has no {join(site.strip('.'), path)}")
    return found


def look_up(start: Any, path: str) -> Any:
    """Return what lies at a dotted path ("." is the start itself), or None."""
    for name in () if path == "." else path.split("."):
        if isinstance(start, nn.ModuleList | nn.Sequential) and name.isdigit():
            start = start[int(name)] if int(name) < len(start) else None
        else:
            start = getattr(start, name, None)
        if start is None:
            return None
    return start


def join(*parts: str) -> str:
    """Return a dotted path from parts that may be empty."""
    return ".".join(part for part in parts if part)
