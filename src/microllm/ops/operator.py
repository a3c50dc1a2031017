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
from torch.library import Library

from microllm.ops.contract import Contract
from microllm.ops.select import first_tensor, run

LIBRARY = Library("microllm", "DEF")
"""The namespace ``torch.ops.microllm``."""

_SCALARS = {bool: "bool", int: "int", float: "float"}


class Operator:
    """An operator as torch sees it: registered on construction, and called with checks, by position.

    ``out``: a tensor for each result, filled and returned. ``sink``: a dict that the diagnostic form puts its
    intermediates into; it runs outside autograd and outside the compiler.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        name = contract.name
        LIBRARY.define(f"{name}({', '.join(_parameters(contract))}) -> ({', '.join(['Tensor'] * len(contract.results))})")
        if contract.composite:
            LIBRARY.impl(name, self._run, "CompositeImplicitAutograd")
        else:
            _register(name, self._run, self._fake)
        if contract.autograd is not None:
            backward, setup_context = contract.autograd
            torch.library.register_autograd(f"microllm::{name}", backward, setup_context=setup_context, lib=LIBRARY)
        self.call = getattr(torch.ops.microllm, name).default
        if contract.results:
            outs = [f"Tensor({chr(ord('z') - i)}!) {result.name}" for i, result in enumerate(contract.results)]
            LIBRARY.define(f"{name}_out({', '.join([*_parameters(contract), *outs])}) -> ()")
            _register(f"{name}_out", self._run_out, lambda *values: None)
            self.call_out = getattr(torch.ops.microllm, f"{name}_out").default

    def __call__(
        self, *values: Any, out: Tensor | tuple[Tensor, ...] | None = None, sink: dict[str, Tensor] | None = None
    ) -> Any:  # noqa: ANN401 - what the contract says
        """Check the call against the contract, then run it.

        Raises:
            OperatorError: the call is not what the contract says.
        """
        contract = self.contract
        sizes = contract.check(values)
        follows = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
        if follows and not (contract.takes_grad and out is None and sink is None):
            contract.refuse(values, "no input that requires grad here; call it under torch.no_grad()")
        if sink is not None:
            assert out is None and contract.sink, f"{contract.name} has no diagnostic form that takes out="
            contract.check_values(values)
            return run(contract, values, sink=sink)
        if out is None:
            return self.call(*values)
        outs = out if isinstance(out, tuple) else (out,)
        self._check_out(values, outs, sizes)
        self.call_out(*values, *outs)
        return out

    def _run(self, *values: Any) -> Any:  # noqa: ANN401
        if first_tensor(values).device.type == "cpu":
            self.contract.check_values(values)
        return run(self.contract, values)

    def _run_out(self, *values: Any) -> None:
        count = len(self.contract.results)
        values, outs = values[:-count], values[-count:]
        if first_tensor(values).device.type == "cpu":
            self.contract.check_values(values)
        run(self.contract, values, out=outs)

    def _fake(self, *values: Any) -> Any:  # noqa: ANN401
        sizes, dtype = self.contract.bind(values)
        like = first_tensor(values)
        results = tuple(
            like.new_empty(result.shape(sizes), dtype=result.dtypes[0] if result.dtypes else dtype)
            for result in self.contract.results
        )
        return results if len(results) > 1 else results[0] if results else None

    def _check_out(self, values: Sequence[Any], outs: tuple[Tensor, ...], sizes: dict[str, Any]) -> None:
        """Refuse outputs of another count, shape, dtype, device or layout, that overlap, or that require grad."""
        results, dtype = self.contract.results, self.contract.bind(values)[1]
        needs = [(result.shape(sizes), result.dtypes[0] if result.dtypes else dtype) for result in results]
        fits = len(outs) == len(needs) and all(
            (tuple(t.shape), t.dtype) == need and t.device == first_tensor(values).device and result.lies_well(t)
            for t, need, result in zip(outs, needs, results, strict=True)
        )
        if not fits:
            self.contract.refuse([*values, *outs], f"out= of {needs} on the same device, rows contiguous")
        if torch.is_grad_enabled() and any(t.requires_grad for t in outs):
            self.contract.refuse([*values, *outs], "out= that does not require grad")
        if not torch.compiler.is_compiling():
            tensors = [v for v in values if isinstance(v, Tensor)]
            spans = [_span(t) for t in (*outs, *tensors) if t.numel()]
            if any(a < d and c < b for i, (a, b) in enumerate(spans[: len(outs)]) for c, d in spans[i + 1 :]):
                self.contract.refuse([*values, *outs], "out= that shares no memory with an input or another out=")


def recomputed(reference: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return torch's pair (backward, setup_context) that runs the reference again and differentiates it."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - torch's context
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
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
    tensors = [
        f"Tensor{f'({chr(97 + i)}!)' if arg.mutated else ''}{'[]' if arg.many else ''}{'?' if arg.optional else ''}"
        f" {arg.name}"
        for i, arg in enumerate(contract.args)
    ]
    return tensors + [f"{_SCALARS[type(value)]} {name}" for name, value in contract.scalars.items()]


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"microllm::{name}", fake, lib=LIBRARY)
