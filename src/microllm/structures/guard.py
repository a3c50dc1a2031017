"""Guards: what a seat takes, what it did, and what an attached host refuses.

Place: every seat asks its ``Form`` before it runs and writes into its ``Ledger``. Outside the form the host's own code
runs, bit for bit, and is counted; rows of a band that the seat was not bound for run it too, and that is no fallback.
Knows no structure.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from microllm import ops
from microllm.errors import GuardRefused, StructureError

Band = Literal["decode", "prefill"]
BANDS: tuple[Band, ...] = ("decode", "prefill")
OnFail = Literal["fallback", "raise"]
DECODE_ROWS = 8
"""Rows of the decode band, at most: what the gate judges there."""
PROMPT_ELEMENTS = 1 << 22
"""Rows times width of a prompt up to which it is short: an eager pass over it waits for Python, not for the device."""
RESTORED_AFTER = 32
"""Fallbacks in a row after which a seat gives its place back for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a seat was bound for; ``max_rows``: where buffers or kernels end (None: nowhere)."""

    dtype: torch.dtype
    device: torch.device
    width: int
    bands: frozenset[Band] = frozenset(BANDS)
    max_rows: int | None = None

    def misfit(self, x: Any) -> str | None:
        """Return why x is outside the form, or None."""
        if not isinstance(x, Tensor) or x.dim() < 2:
            return f"got {type(x).__name__} instead of rows"
        if x.dtype != self.dtype:
            return f"dtype {_short(x.dtype)}, bound for {_short(self.dtype)}"
        if x.device != self.device:
            return f"device {x.device}, bound for {self.device}"
        if x.shape[-1] != self.width:
            return f"width {x.shape[-1]}, bound for {self.width}"
        if not x.numel():
            return "no rows"
        if self.max_rows is not None and x.numel() // self.width > self.max_rows:
            return f"{x.numel() // self.width} rows, bound for at most {self.max_rows}"
        if x.requires_grad and torch.is_grad_enabled():
            return "a gradient is wanted, bound for inference"
        if not x.is_contiguous() and not is_matrix(x):
            return f"shape {tuple(x.shape)} with strides {x.stride()}, bound for rows that a view can join"
        return None

    def band(self, x: Tensor) -> Band:
        """Return the band of x by its rows."""
        return "decode" if x.numel() // self.width <= DECODE_ROWS else "prefill"

    def describe(self) -> dict[str, Any]:
        """Return the form as JSON data."""
        return {
            "dtype": _short(self.dtype), "device": str(self.device), "width": self.width,
            "bands": sorted(self.bands), "max_rows": self.max_rows,
        }  # fmt: skip


@dataclass(slots=True)
class Ledger:
    """What a seat did.

    ``calls`` ran the seat's implementation, ``replays`` did so inside a captured graph, ``by_band`` went to the host by
    their number of rows, ``fallbacks`` because they were outside the form.
    """

    calls: int = 0
    replays: int = 0
    by_band: int = 0
    fallbacks: int = 0
    consecutive: int = 0
    restored: bool = False
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def last_reason(self) -> str | None:
        """Return the reason met last among distinct ones, or None."""
        return next(reversed(self.reasons), None)


class Turn:
    """One thread at a time in an attached host; another one is refused, one after another is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._owner not in (None, me):
                raise GuardRefused(
                    "got a second thread inside an attached model; need one at a time; queue the calls, or detach()"
                )
            self._owner = me
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._owner == threading.get_ident():  # a thread that was refused has nothing to leave
                self._depth -= 1
                if not self._depth:
                    self._owner = None


class Seat:
    """A region of a host in our hands: what runs it, its form, its ledger, and whether it is on.

    ``prompt``: what runs it for a short prompt (default: what runs it else).
    """

    def __init__(self, structure: str, path: str, bound: Any, form: Form, prompt: Any = None) -> None:
        self.structure, self.path, self.bound, self.form = structure, path, bound, form
        self.prompt = bound if prompt is None else prompt
        self.ledger = Ledger()
        self.active = False
        self.broken = False
        self.on_fail: OnFail = "fallback"
        self.restore: Callable[[], None] = lambda: None
        self.can_fall_back = True

    def admits(self, module: nn.Module, x: Any, extra: str | None = None) -> bool:
        """Say whether this call is the seat's; count it. ``extra``: what else is outside the form.

        Raises:
            GuardRefused: the host trains, or the form is left and the seat may not fall back.
        """
        if not self.active:
            return False
        if module.training:
            raise GuardRefused(f"{self.path}: got training mode; need eval() while attached; detach() first to train")
        reason = extra or self.form.misfit(x)
        if torch.compiler.is_compiling():
            return reason is None and self.form.band(x) in self.form.bands
        if reason is not None:
            self._leave(reason)
            return False
        return self.takes(self.form.band(x))

    def takes(self, band: Band) -> bool:
        """Say whether a call inside the form, of this band, is the seat's; count it.

        Raises:
            GuardRefused: it is not, and the seat may not fall back.
        """
        ledger = self.ledger
        ledger.consecutive = 0
        if band in self.form.bands:
            ledger.calls += 1
            return True
        if not self.can_fall_back:
            raise GuardRefused(f"{self.path}: got rows outside its band, its host's weights gone; reload the model")
        ledger.by_band += 1
        return False

    def form_for(self, x: Tensor) -> Callable[..., Any]:
        """Return what runs the region where its host was given x [B, T, D]."""
        short = x.dim() == 3 and x.shape[1] > DECODE_ROWS and x.numel() <= PROMPT_ELEMENTS
        return self.prompt if short and not ops.is_watched() else self.bound

    def spoil(self, y: Tensor) -> Tensor:
        """Return the seat's output, or while a gate plants a break, the same numbers in wrong places."""
        return y.roll(1, dims=-1) if self.broken else y

    def _leave(self, reason: str) -> None:
        ledger = self.ledger
        if self.on_fail == "raise" or not self.can_fall_back:
            ledger.reasons[reason] += 0
            raise GuardRefused(f"{self.path} ({self.structure}): got {reason}; call it so, or detach()")
        if reason not in ledger.reasons:
            warnings.warn(
                f"{self.path} ({self.structure}) runs the host's own code: {reason}", RuntimeWarning, stacklevel=3
            )
        ledger.reasons[reason] += 1
        ledger.fallbacks += 1
        ledger.consecutive += 1
        if ledger.consecutive >= RESTORED_AFTER:
            self.active, ledger.restored = False, True
            warnings.warn(
                f"{self.path} ({self.structure}): {RESTORED_AFTER} fallbacks in a row, the host is restored for good",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
            self.restore()

    def entry(self) -> dict[str, Any]:
        """Return the seat's ledger as JSON data."""
        ledger, kernel = self.ledger, getattr(self.bound, "kernel", "")
        return {
            "structure": self.structure, "kernel": kernel, "calls": ledger.calls, "replays": ledger.replays,
            "by_band": ledger.by_band, "fallbacks": ledger.fallbacks, "restored": ledger.restored,
            "last_reason": ledger.last_reason, "form": self.form.describe(),
        }  # fmt: skip


def joined_ledger(seats: Iterable[Seat]) -> dict[str, Any]:
    """Return what all seats did together; clean: no fallback anywhere, and something ran."""
    every = [seat.ledger for seat in seats]
    ran = sum(each.calls + each.replays for each in every)
    return {
        "seats": len(every), "calls": sum(e.calls for e in every), "replays": sum(e.replays for e in every),
        "by_band": sum(e.by_band for e in every), "fallbacks": sum(e.fallbacks for e in every),
        "fell_back": sum(e.fallbacks > 0 for e in every), "restored": sum(e.restored for e in every),
        "never_ran": sum(e.calls + e.replays == 0 for e in every),
        "clean": ran > 0 and not any(e.fallbacks or e.restored for e in every),
    }  # fmt: skip


_REFUSED = {
    "_apply": "a dtype or device move",
    "load_state_dict": "load_state_dict",
    "__deepcopy__": "deepcopy",
    "__reduce_ex__": "pickle",
}


class Lifecycle:
    """What an attached host does not do: train, move, load, be copied; held by attributes of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())

    def hold(self) -> None:
        """Refuse from now on."""
        for module in self._modules:
            for name, words in _REFUSED.items():
                vars(module)[name] = _refusal(words)
            vars(module)["train"] = _eval_only(module)

    def refuse_state_dict(self) -> None:
        """Refuse ``state_dict`` too: some of its bytes are gone."""
        for module in self._modules:
            vars(module)["state_dict"] = _refusal("state_dict after consume()")

    def release(self) -> None:
        """Allow everything again, and leave no trace."""
        for module in self._modules:
            for name in (*_REFUSED, "train", "state_dict"):
                vars(module).pop(name, None)


def _refusal(words: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise GuardRefused(f"got {words} while attached; need the host as it was; detach() first")

    return refuse


def _eval_only(module: nn.Module) -> Callable[..., nn.Module]:
    def train(mode: bool = True) -> nn.Module:  # noqa: FBT001  torch's own signature
        if mode:
            raise GuardRefused("got train() while attached; need eval(); detach() first")
        return type(module).train(module, False)

    return train


def check_untouched(model: nn.Module) -> None:
    """Raise unless the model may be attached to.

    Raises:
        StructureError: it trains, is attached already, has replaced forwards (hooks of accelerate), meta tensors, or
            tensors on several devices.
    """
    name = type(model).__name__
    for path, module in model.named_modules():
        if "_apply" in vars(module):
            raise StructureError(f"got a {name} that is attached already; need it bare; detach() the other plan first")
        if not _is_class_forward(module) or "_hf_hook" in vars(module):
            raise StructureError(
                f"got {path or name} with a forward of its own (a hook of accelerate, a patch); need the class's; "
                "remove it first (accelerate.hooks.remove_hook_from_module(model, recurse=True))"
            )
        if module.training:
            raise StructureError(f"got {path or name} in training mode; need model.eval() first")
    tensors = [*model.parameters(), *model.buffers()]
    devices = {t.device for t in tensors}
    if any(t.is_meta for t in tensors):
        raise StructureError(f"got a {name} with meta tensors; need loaded weights; load it without a device map")
    if len(devices) != 1:
        raise StructureError(f"got a {name} on {sorted(map(str, devices))}; need one device; move it there first")


def _is_class_forward(module: nn.Module) -> bool:
    """Say whether a call runs the class's own code; accelerate leaves a bound method of it behind."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def is_matrix(x: Tensor) -> bool:
    """Say whether all leading axes of x can be seen as one, without a copy, and its last lies together."""
    if x.stride(-1) != 1:
        return False
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
