"""From a contract to torch operators: ``torch.ops.microllm.NAME`` and ``NAME_out``, with fakes and gradients.

Place: a file in ``ops/`` makes an ``Operator`` of its ``Contract``; its public function calls that. The checks run in
Python, where torch.compile folds them away; what is registered is opaque to the compiler, chooses the level and runs.

Source:  torch.library; ``Library.define/impl`` costs half of what ``custom_op`` costs a call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler
from torch.library import Library
from torch.nn import Parameter

from microllm.ops.contract import Contract, Outs, Sink
from microllm.ops.select import first_tensor, run

LIBRARY = Library("microllm", "DEF")
"""The namespace ``torch.ops.microllm``."""

_PLAIN = {Tensor, Parameter, type(None), bool, int, float}
_SCALARS = {bool: "bool", int: "int", float: "float"}


class Operator:
    """An operator as torch sees it: registered on construction, and called with checks, by position.

    ``out``: a tensor for each result, filled and returned. ``sink``: a dict that the diagnostic form puts its
    intermediates into; it runs outside autograd and outside the compiler.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract, name = contract, contract.name
        parameters, returns = _parameters(contract), ", ".join(["Tensor"] * len(contract.results))
        LIBRARY.define(f"{name}({', '.join(parameters)}) -> ({returns})")
        if contract.composite:
            LIBRARY.impl(name, self._run, "CompositeImplicitAutograd")
        else:
            _register(name, self._run, self._fake)
        if contract.autograd is not None:
            backward, setup_context = contract.autograd
            torch.library.register_autograd(f"microllm::{name}", backward, setup_context=setup_context, lib=LIBRARY)
        self.call = getattr(torch.ops.microllm, name).default
        self._pure = not contract.composite and not any(arg.mutated for arg in contract.args)
        if contract.results:
            outs = [f"Tensor({chr(122 - i)}!) {result.name}" for i, result in enumerate(contract.results)]
            LIBRARY.define(f"{name}_out({', '.join(parameters + outs)}) -> ()")
            _register(f"{name}_out", self._run_out, lambda *values: None)
            self.call_out = getattr(torch.ops.microllm, f"{name}_out").default

    def __call__(self, *values: Any, out: Tensor | Outs = None, sink: Sink = None) -> Any:
        """Check the call against the contract, then run it.

        Raises:
            OperatorError: the call is not what the contract says.
        """
        contract = self.contract
        contract.check(values)
        follows = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
        if follows and not (contract.takes_grad and out is None and sink is None):
            contract.refuse(values, "no input that requires grad here; call it under torch.no_grad()")
        if sink is not None:
            assert contract.sink, f"{contract.name} has no diagnostic form"
            assert out is None, "a diagnostic form returns its results"
            return run(contract, values, sink=sink)
        if out is None:
            return self._run(*values) if self._pure and not follows and is_plain(values) else self.call(*values)
        outs = out if isinstance(out, tuple) else (out,)
        self._check_out(values, outs)
        self.call_out(*values, *outs)
        return out

    def _run(self, *values: Any) -> Any:
        return run(self.contract, values)

    def _run_out(self, *values: Any) -> None:
        count = len(self.contract.results)
        run(self.contract, values[:-count], out=values[-count:])

    def _fake(self, *values: Any) -> Any:
        like = first_tensor(values)
        results = [like.new_empty(shape, dtype=dtype) for shape, dtype in self.contract.outcome(values)]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def _check_out(self, values: Sequence[Any], outs: tuple[Tensor, ...]) -> None:
        """Refuse outputs of another count, shape, dtype, device or layout, that overlap, or that require grad."""
        contract, device = self.contract, first_tensor(values).device
        call, needs = [*values, *outs], contract.outcome(values)
        if [(tuple(t.shape), t.dtype) for t in outs] != needs or not all(
            t.device == device and result.lies_well(t) for t, result in zip(outs, contract.results, strict=True)
        ):
            contract.refuse(call, f"out= of {needs} on {device}, rows contiguous")
        if torch.is_grad_enabled() and any(t.requires_grad for t in outs):
            contract.refuse(call, "out= that does not require grad")
        if not torch.compiler.is_compiling():
            spans = [_span(t) for t in (*outs, *(v for v in values if isinstance(v, Tensor))) if t.numel()]
            if any(a < d and c < b for i, (a, b) in enumerate(spans[: len(outs)]) for c, d in spans[i + 1 :]):
                contract.refuse(call, "out= that shares no memory with an input or another out=")


def is_plain(values: Sequence[Any]) -> bool:
    """Say whether nobody but the operator has a part in a call: no compiler, mode, transform, profiler or subclass.

    Such a call runs at once: torch's dispatcher costs more than all else that Python does for it.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and not profiler._is_profiler_enabled
        and all(type(v) in _PLAIN for v in values)
    )


def saving(*places: int, outputs: tuple[int, ...] = (), constant: bool = False) -> Callable[..., None]:
    """Return a setup_context that saves the inputs at ``places`` and some outputs, and keeps ctx.scalars.

    ``constant``: of several outputs the first alone carries a gradient.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scalars = [value for value in inputs if isinstance(value, int | float)]
        if constant:
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*(inputs[i] for i in places), *(output[i] for i in outputs))

    return setup_context


def recomputed(reference: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return torch's pair (backward, setup_context) that runs the reference again and differentiates it."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs, needed = list(ctx.others), ctx.needs_input_grad
        for i, value in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[i] = value.detach().requires_grad_(needed[i])
        with torch.enable_grad():
            outputs = reference(*inputs)
            wanted = [value for value, need in zip(inputs, needed, strict=True) if need]
            found = iter(torch.autograd.grad(outputs, wanted, grads if isinstance(outputs, tuple) else grads[0]))
        return tuple(next(found) if need else None for need in needed)

    return backward, setup_context


def _span(t: Tensor) -> tuple[int, int]:
    """Return the first address of t and the first one after it."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _parameters(contract: Contract) -> list[str]:
    """Return the schema's parameters: tensors, then scalars."""
    tensors = []
    for i, arg in enumerate(contract.args):
        marks = f"({chr(97 + i)}!)" * arg.mutated + "[]" * arg.many + "?" * arg.optional
        tensors.append(f"Tensor{marks} {arg.name}")
    return tensors + [f"{_SCALARS[type(value)]} {name}" for name, value in contract.scalars.items()]


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"microllm::{name}", fake, lib=LIBRARY)
