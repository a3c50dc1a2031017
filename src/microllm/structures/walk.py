"""The walk: a block of a ``transformers`` host in one call, region after region, its modules not called.

Place: stands on a block whose norms and rope are bound. One look at the call stands for those of all its seats, whose
inputs follow from the block's; each counts what it did. Whatever is unusual (hooks, a gradient wanted, a mask of graded
values, arguments) goes to the host's own block, whose modules ask seat by seat, refuse and count.

Axes:    M = rows, B = rows of a batch, T = tokens, D = model dim
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from microllm.structures.cache import LoopCache
from microllm.structures.guard import Band, Seat, Turn
from microllm.structures.host import Host
from microllm.structures.impls import Norm
from microllm.structures.sites import AttentionSite, Site

_HARMLESS = {
    "attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position", "output_hidden_states",
}  # fmt: skip
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class Part(NamedTuple):
    """A module of a block, and the seat that may run it."""

    module: nn.Module
    seat: Seat | None

    def __call__(self, x: Tensor, band: Band) -> Tensor:
        """Return what the seat gives, or the host's module."""
        module, seat = self
        if seat is None or not seat.active:
            return module(x)
        if seat.takes(band):
            y = seat.form_for(x)(x.view(-1, x.shape[-1]))
            return y.view(*x.shape[:-1], y.shape[-1])
        return type(module).forward(module, x)


class LayerSite(Site):
    """A block, walked."""

    def __init__(
        self, host: Host, path: str, seats: Mapping[str, Seat], attention: AttentionSite, turn: Turn
    ) -> None:  # fmt: skip
        super().__init__((), turn)
        module = host.model.get_submodule(path)
        self._own, self._module, self._attention = type(module).forward, module, attention

        def part(name: str) -> Part:
            return Part(module.get_submodule(name), seats.get(f"{path}.{name}"))

        self._norm, self._ffn_norm = part("input_layernorm"), part("post_attention_layernorm")
        self._o, self._ffn = part("self_attn.o_proj"), part("mlp")
        self._pack = seats.get(f"{path}.self_attn")
        self._qkv = [module.get_submodule(f"self_attn.{name}_proj") for name in ("q", "k", "v")]
        parts = (self._norm, self._ffn_norm, self._o, self._ffn)
        bound = (*(each.seat for each in parts), self._pack, attention.rope, attention.core)
        self.walked = tuple(seat for seat in bound if seat is not None)
        self._leads = (self._norm.seat, self._ffn_norm.seat, attention.rope)
        self._cache_name = attention.cache_name
        self._allowed = _HARMLESS | {self._cache_name}
        inner = [module, module.get_submodule("self_attn"), *(each.module for each in parts), *self._qkv]
        self._inner, self._parameters = inner, list(module.parameters())
        self._hooks = (*_GLOBAL_HOOKS, *(h for m in inner[1:] for h in (m._forward_hooks, m._forward_pre_hooks)))
        self.places = ((module, self.forward),)

    @property
    def wanted(self) -> bool:
        """Return whether what makes a walk worth it is on: norms and rope."""
        return all(seat is not None and seat.active for seat in self._leads)

    def covers(self, seats: Iterable[Seat]) -> bool:
        """Say whether a plan of these seats walks."""
        return set(self._leads) <= set(seats)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output."""
        with self.turn:
            if args or not self._admits(x, kwargs):
                return self._own(self._module, x, *args, **kwargs)
            return self._walk(x, kwargs)

    def _admits(self, x: Any, given: Mapping[str, Any]) -> bool:
        """Say whether all seats would take the call that follows for each."""
        if torch.compiler.is_compiling() or not self.wanted or any(self._hooks):
            return False
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._parameters):
            return False
        lead = self._norm.seat
        assert lead is not None, "wanted is false without it"
        if lead.form.misfit(x) is not None or x.dim() != 3 or given.get("position_embeddings") is None:
            return False
        for name, value in given.items():
            if name not in self._allowed and value is not None and value is not False:
                return False
        if any(module.training for module in self._inner) or any(seat.broken for seat in self.walked):
            return False
        mask = given.get("attention_mask")
        ours = mask is None or isinstance(given.get(self._cache_name), LoopCache)
        return ours or self._attention.scratch.mask_form(mask) is None

    def _walk(self, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        attention, pack = self._attention, self._pack
        assert self._norm.seat is not None, "looked at before"
        band = self._norm.seat.form.band(x)
        normed = self._norm(x, band)
        if pack is None or not pack.active:
            parts = [module(normed) for module in self._qkv]
        elif pack.takes(band):
            parts = pack.form_for(x)(normed.view(-1, normed.shape[-1]))
        else:
            parts = [type(module).forward(module, normed) for module in self._qkv]
        pair = (attention.rope, attention.core)
        rope, core = (seat is not None and seat.active and seat.takes(band) for seat in pair)
        q, k, v = attention.turned(parts, x, given["position_embeddings"], rope=rope)
        context = attention.attend(q, k, v, given.get("attention_mask"), given.get(self._cache_name), core=core)
        attended = self._o(context.reshape(*x.shape[:-1], -1), band)
        total, normed = self._added(x, attended, band)
        return total + self._ffn(normed, band)

    def _added(self, x: Tensor, attended: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """Return the stream with what attention gave, and its norm: one launch where the norm is ours."""
        seat = self._ffn_norm.seat
        if seat is not None and isinstance(seat.bound, Norm) and seat.takes(band):
            normed, total = seat.form_for(x)(attended, x)
            return total, normed
        total = x + attended
        return total, self._ffn_norm(total, band)
