"""Sites: the forwards that are put in a host's place, each asking its seats first and else running the host's own.

Place: ``Attachment`` sets them as attributes of the host's modules and takes them away again; nothing else in the host
changes, so that its parameters, keys and class stay what they are. A site knows how one kind of region is called; what
runs is the seat's.

Axes:    M = rows, B = rows of a batch, T = tokens, D = model dim, H and G = query and KV heads, K = head dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from microllm.structures.cache import LoopCache
from microllm.structures.guard import Lifecycle, OnFail, Seat, Turn
from microllm.structures.host import Host, attention_interface, look_up

Place = tuple[nn.Module, Callable[..., Any]]
MAX_TOKENS = 8
"""Tokens a row that a decode kernel takes at once."""
_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}


class Site:
    """Some seats, and the forwards by which their modules ask them."""

    def __init__(self, seats: Sequence[Seat], turn: Turn) -> None:
        self.seats, self.turn = tuple(seats), turn
        self.places: tuple[Place, ...] = ()
        self._former: dict[nn.Module, Any] = {}

    def install(self) -> None:
        """Put the forwards in place."""
        for module, forward in self.places:
            former = vars(module).get("forward")
            if former is not None and former is not forward:
                self._former[module] = former
            vars(module)["forward"] = forward
        for seat in self.seats:
            seat.restore = self._restore

    @property
    def wanted(self) -> bool:
        """Return whether one of its seats is on."""
        return any(seat.active for seat in self.seats)

    def remove(self) -> None:
        """Take them away."""
        for module, forward in self.places:
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]
                if module in self._former:
                    vars(module)["forward"] = self._former.pop(module)

    def _restore(self) -> None:
        if not self.wanted:
            self.remove()


class ModuleSite(Site):
    """A module of one tensor in and one out: norm, projection, feed-forward network, head, or a structure to come."""

    def __init__(self, module: nn.Module, seat: Seat, turn: Turn) -> None:
        super().__init__((seat,), turn)
        own = type(module).forward

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            with turn:
                if seat.admits(module, x, "arguments besides rows" if args or kwargs else None):
                    y = seat.form_for(x)(x.view(-1, x.shape[-1]))
                    return seat.spoil(y.view(*x.shape[:-1], y.shape[-1]))
                return own(module, x, *args, **kwargs)

        self.places = ((module, forward),)


class PackSite(Site):
    """Siblings called in turn with one input: the first computes all, the others hand out theirs.

    What is kept between the calls is one result, for the very tensor that made it. A sibling called with another, or
    with that one changed since, runs the host's own.
    """

    def __init__(self, modules: Sequence[nn.Module], seat: Seat, turn: Turn) -> None:
        super().__init__((seat,), turn)
        self._seat = seat
        self._kept: tuple[Any, ...] = ()
        self.places = (
            (modules[0], self._first(modules[0])),
            *((module, self._later(module, i)) for i, module in enumerate(modules) if i),
        )
        self._last = len(modules) - 1

    def _first(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        own, seat = type(module).forward, self._seat

        def forward(x: Tensor) -> Tensor:
            with self.turn:
                self._kept = ()
                if not seat.admits(module, x):
                    return own(module, x)
                parts = seat.form_for(x)(x.view(-1, x.shape[-1]))
                parts = [seat.spoil(part.view(*x.shape[:-1], part.shape[-1])) for part in parts]
                self._kept = (x, _stamp(x), parts)
                return parts[0]

        return forward

    def _later(self, module: nn.Module, index: int) -> Callable[[Tensor], Tensor]:
        own, seat = type(module).forward, self._seat

        def forward(x: Tensor) -> Tensor:
            with self.turn:
                kept = self._kept
                if not kept:
                    return own(module, x)
                if kept[0] is not x or kept[1] != _stamp(x):
                    self._kept = ()
                    seat.admits(module, x, "a sibling called with another input")
                    return own(module, x)
                if index == self._last:
                    self._kept = ()
                return kept[2][index]

        return forward


class Scratch:
    """What the blocks of one pass would each work out anew: angles as the operators take them, the form of a mask."""

    def __init__(self) -> None:
        self._angles: tuple[Any, ...] = ()
        self._turns: tuple[Any, ...] = ()
        self._mask: tuple[Any, ...] = ()

    def angles(self, cos: Tensor, sin: Tensor, num_rows: int, pairs: int) -> tuple[Tensor, Tensor]:
        """Return a pair's cosine and sine for each row and token: fp32 [B, T, P], from [B or 1, T, K or P]."""
        key = (num_rows, _stamp(cos))
        if not self._angles or self._angles[0] is not cos or self._angles[1] != key:
            wide = tuple(t[..., :pairs].float().expand(num_rows, -1, -1).contiguous() for t in (cos, sin))
            self._angles = (cos, key, wide)
        return self._angles[2]

    def turns(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return angles for every head of [B, T, H, K], the first half of sines negated: twice [B or 1, T, 1, K]."""
        key = (dtype, _stamp(cos))
        if not self._turns or self._turns[0] is not cos or self._turns[1] != key:
            first, second = sin.chunk(2, dim=-1)
            wide = tuple(t.to(dtype).unsqueeze(2) for t in (cos, torch.cat((-first, second), dim=-1)))
            self._turns = (cos, key, wide)
        return self._turns[2]

    def mask_form(self, mask: Tensor | None) -> str | None:
        """Return what about a mask is outside the form (one or two contiguous ranges of keys a query), or None."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
            return f"a mask of form {tuple(getattr(mask, 'shape', ())) or type(mask).__name__}"
        if not self._mask or self._mask[0] is not mask:
            seen = mask if mask.dtype == torch.bool else mask == 0
            odd = mask.dtype != torch.bool and bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())
            runs = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0].int()
            bad = "a mask of graded values" if odd else "a mask of more than two ranges" if (runs > 2).any() else None
            self._mask = (mask, bad)
        return self._mask[1]


class AttentionSite(Site):
    """A ``transformers`` attention module: projections and cache are the host's, rope and core the seats' or not."""

    def __init__(
        self, host: Host, path: str, seats: tuple[Seat | None, Seat | None], turn: Turn, scratch: Scratch
    ) -> None:  # fmt: skip
        super().__init__([seat for seat in seats if seat is not None], turn)
        self._module, self.scratch = host.model.get_submodule(path), scratch
        self.rope, self.core = seats
        self.cache_name, self._head_dim = host.calls.cache_name, host.head_dim  # pyright: ignore
        self._scale, self._own = float(host.constant("scale")), type(self._module).forward
        self.places = ((self._module, self._forward),)

    def _forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        module = self._module
        with self.turn:
            given = {name for name, value in kwargs.items() if value is not None and value is not False}
            strange = given - _HARMLESS - {self.cache_name} | (given & {"output_attentions"})
            extra = f"arguments {sorted(strange)}" if strange else "positional arguments" if args else None
            if extra is None and position_embeddings is None:
                extra = "no angles"
            rope = self.rope is not None and self.rope.admits(module, hidden_states, extra)
            cache = kwargs.get(self.cache_name)
            mask_form = None if isinstance(cache, LoopCache) else self.scratch.mask_form(attention_mask)
            core = self.core is not None and self.core.admits(module, hidden_states, extra or mask_form)
            if not rope and not core:
                return self._own(module, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
            parts = [getattr(module, f"{part}_proj")(hidden_states) for part in ("q", "k", "v")]
            q, k, v = self.turned(parts, hidden_states, position_embeddings, rope=rope)
            context = self.attend(q, k, v, attention_mask, cache, core=core)
            return module.o_proj(context.reshape(*hidden_states.shape[:-1], -1)), None  # pyright: ignore

    def turned(
        self, parts: Sequence[Tensor], x: Tensor, angles: Any, *, rope: bool
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return queries and keys, turned, and values, of what was projected: [B, H, T, K], twice [B, G, T, K]."""
        module, shape = self._module, (*x.shape[:-1], -1, self._head_dim)
        q, k, v = (part.view(shape) for part in parts)
        cos, sin = angles
        if rope:
            assert self.rope is not None, "a seat that admits"
            run, scratch = self.rope.form_for(x), self.scratch
            ours = run is self.rope.bound
            angles = scratch.angles(cos, sin, len(x), self._head_dim // 2) if ours else scratch.turns(cos, sin, x.dtype)
            q, k = run(q, k, *angles)
            return self.rope.spoil(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if look_up(module, "q_norm") is not None:
            q, k = module.q_norm(q), module.k_norm(k)  # pyright: ignore[reportCallIssue]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (part.transpose(1, 2) for part in (q, k))
        return *(part * cos + _half_turned(part) * sin for part in (q, k)), v.transpose(1, 2)  # pyright: ignore

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Any, *, core: bool
    ) -> Tensor:  # fmt: skip
        """Return the context [B, T, H, K]."""
        module, seat = self._module, self.core
        layer: Any = module.layer_idx
        if core and isinstance(cache, LoopCache) and cache.decoding and q.is_cuda and q.shape[2] <= MAX_TOKENS:
            assert seat is not None, "a seat that admits"
            cache.write(layer, k.transpose(1, 2), v.transpose(1, 2))
            queries = q.transpose(1, 2).contiguous()
            return seat.spoil(
                seat.bound.over_cache(queries, cache.keys[layer], cache.values[layer], cache.pages, cache.positions)
            )
        if cache is not None:
            k, v = cache.update(k, v, layer)
        if core and seat is not None:
            return seat.spoil(seat.bound(q, k, v, mask))
        attend = attention_interface(module)
        return attend(module, q, k, v, mask, dropout=0.0, scaling=self._scale)[0]


class BlockSite(Site):
    """A whole block, run as one chain while the loop decodes over its own cache; else the host's block."""

    def __init__(self, host: Host, path: str, index: int, seat: Seat, turn: Turn) -> None:
        super().__init__((seat,), turn)
        module = host.model.get_submodule(path)
        self.own: Callable[..., Any] = partial(type(module).forward, module)
        """What runs where the chain does not."""
        transformers = host.binding.protocol == "transformers"
        name = getattr(host.calls, "cache_name", "")

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with turn:
                cache: Any = kwargs.get(name) if transformers else next(iter(args[2:]), None)
                loops = isinstance(cache, LoopCache) and cache.decoding and x.dim() == 3 and x.shape[1] <= MAX_TOKENS
                if not loops or cache.tables is None:
                    seat.ledger.by_band += seat.active
                elif seat.admits(module, x):
                    keys, values = cache.keys[index], cache.values[index]
                    return seat.spoil(seat.bound(x, *cache.tables, keys, values, cache.positions))
                return self.own(x, *args, **kwargs)

        self.places = ((module, forward),)


_ATTACHED: WeakKeyDictionary[nn.Module, ref[Attachment]] = WeakKeyDictionary()
"""What is in place in which model; keeps neither of the two."""


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return what is in place in a model: a loop counts the replays of its graphs there."""
    found = _ATTACHED.get(model)
    return None if found is None else found()


class Attachment:
    """Sites in a model: on, off, and away again without a trace."""

    def __init__(self, model: nn.Module, sites: Iterable[Site], turn: Turn) -> None:
        self.model, self.sites, self.turn = model, list(sites), turn
        self.seats = [seat for site in self.sites for seat in site.seats]
        self._lifecycle = Lifecycle(model)
        self._hooks: list[Any] = []

    def install(self, seats: Iterable[Seat], on_fail: OnFail = "fallback") -> None:
        """Turn exactly these seats on; the model refuses changes from now on. Undone whole if anything fails."""
        wanted = {id(seat) for seat in seats}
        self.remove()
        try:
            for seat in self.seats:
                seat.active, seat.on_fail = id(seat) in wanted and not seat.ledger.restored, on_fail
            for site in self.sites:
                if site.wanted:
                    site.install()
            self._hooks = [
                self.model.register_forward_pre_hook(lambda *_: self.turn.__enter__(), prepend=True),
                self.model.register_forward_hook(lambda *_: self.turn.__exit__(), always_call=True),
            ]
            self._lifecycle.hold()
            _ATTACHED[self.model] = ref(self)
        except BaseException:
            self.remove()
            raise

    def refuse_state_dict(self) -> None:
        """Refuse to give a state whose bytes are gone."""
        self._lifecycle.refuse_state_dict()

    def remove(self) -> None:
        """Take every site away; the model is what it was."""
        for site in self.sites:
            site.remove()
        for seat in self.seats:
            seat.active = seat.broken = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._lifecycle.release()
        _ATTACHED.pop(self.model, None)


def _stamp(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
