"""What the tuner tunes: an entry of ``tuned.json`` to be found, the calls that it decides, and how a candidate runs.

Place: under ``lab/tune``. A candidate runs as an entry that stands before the table's, so that what is tested and timed
is what an accepted entry gives. The gate is the operator's contract: values against the reference in fp32, the same
bits from the same call, and in mode B a row's bits whatever rows stand beside it. Decides nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microllm import ops
from microllm.errors import EvidenceError, UnavailableError
from microllm.evidence.timing import Action
from microllm.lab import bench_ops
from microllm.lab.tune_config import ATTENTION
from microllm.ops.attention_paged import split_key
from microllm.ops.contract import Contract, Sizes
from microllm.ops.target import Target, target_of
from microllm.ops.tuned import Tuned, device_name, environment

if TYPE_CHECKING:
    from microllm.ops.kernels.linear_choice import Choice, Matrix

Tile = dict[str, int]
QUANTISED = ("linear_int8", "linear_fp8", "linear_int4")
ORDER_ROWS = (1, 2, 7, 16, 64, 65, 256)
"""Numbers of rows at which an order of K must give a row the same bits."""
SPLITS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One entry that is sought: an operator at sizes (its contract's letters), for which a candidate is timed.

    ``order``: what fixes the order of a linear's sums, one for all rows: timed in mode B, at every one of ``sizes``.
    """

    op: str
    sizes: tuple[Sizes, ...]
    dtype: torch.dtype
    device: str
    order: bool = False

    @property
    def row(self) -> Contract:
        """The operator's contract."""
        return ops.CONTRACTS[self.op]

    @cached_property
    def target(self) -> Target:
        """What the kernels may use."""
        return target_of(torch.device(self.device))

    @cached_property
    def matrix(self) -> Matrix:
        """A linear's weight as its choice sees it."""
        sizes = self.sizes[0]
        return _linears().matrix_of(self.op, sizes["N"] if "N" in sizes else 2 * sizes["F"], columns(sizes), self.dtype)

    @cached_property
    def shape(self) -> Tile:
        """What the entry is known by."""
        if self.op == ATTENTION:
            s = self.sizes[0]
            return split_key(s["A"], (s["H"], s["G"], s["D"]), s["S"], s["N"] * s["S"])
        of_all = {"N": self.matrix.N, "K": self.matrix.K}
        return of_all if self.order else {"M": _linears().bucket_of(rows_of(self.sizes[0])), **of_all}

    @property
    def workload(self) -> str:
        """The subject in words."""
        sizes = " ".join(f"{name}{size}" for name, size in self.shape.items())
        return f"{self.op} {sizes} {str(self.dtype).removeprefix('torch.')}"

    def entry(self, choice: Tile) -> Tuned:
        """Return a candidate as an entry of the table, for this environment."""
        here = environment(self.op, device_name(torch.device(self.device)))
        dtype = str(self.dtype).removeprefix("torch.")
        return Tuned(op=self.op, shape=self.shape, dtype=dtype, choice=choice, **here)

    @contextmanager
    def trying(self, choice: Tile | None) -> Iterator[None]:
        """Let a candidate decide inside the context; None: what decides today."""
        with _linears().trying(*([self.entry(choice)] if choice is not None else [])):
            yield

    def standing(self, choice: Tile | None = None) -> Tile:
        """Return, whole, what a candidate (None: today's table) comes to."""
        if self.op == ATTENTION:
            with self.trying(choice):
                return {"split": self.split()}
        name = device_name(torch.device(self.device))
        with self.trying(choice):
            found = _linears().choose(self.matrix, rows_of(self.sizes[0]), self.target, name, self.order)
        return _linears().order_of(found) if self.order else _linears().entry_of(found)

    def first(self) -> Iterator[Tile]:
        """Yield the candidates that do not depend on what others gave: splits, orders, each form as it stands."""
        if self.op == ATTENTION:
            yield from ({"split": split} for split in SPLITS if split % self.sizes[0]["S"] == 0)
            return
        if self.order:
            yield from _linears().order_candidates(self.matrix)
        else:
            for form in _linears().forms_of(self.matrix, self.shape["M"], self.target):
                yield self.standing({"form": form})

    def near(self, choice: Tile) -> Iterator[Tile]:
        """Yield the candidates one step from ``choice``."""
        if self.op == ATTENTION or self.order:
            return
        yield from _linears().neighbours(self.matrix, self.shape["M"], self._order(), choice, self.target)

    def problem(self, choice: Tile) -> str:
        """Return why a candidate cannot be run here, or nothing."""
        if self.op == ATTENTION:
            split, page = choice.get("split", 0), self.sizes[0]["S"]
            fits = set(choice) == {"split"} and split > 0 and split % page == 0
            return "" if fits else f"{choice}: one number, split, a multiple of the page's {page} slots"
        if (what := _linears().fault(self.matrix, self.shape, choice)) or self.order:
            return what
        whole = self.standing(choice)
        return _linears().problem(self.matrix, self.shape["M"], self._order(), whole, self.target)

    def split(self) -> int:
        """Return the split of keys that the table gives attention now."""
        s = self.sizes[0]
        heads, context, device = (s["H"], s["G"], s["D"]), s["N"] * s["S"], torch.device(self.device)
        return ops.decode_split(s["A"], heads, s["S"], context, self.dtype, device, one_for_all_rows=False)

    @property
    def has_order(self) -> bool:
        """Whether mode B's form for the matrix has an order to choose: not in fp32 on a GPU, nor on AMD."""
        return self._in_mode_b().form == "mma"

    def _order(self) -> Tile:
        return _linears().order_of(self._in_mode_b()) if self.has_order else {"WARPS_K": 1, "KB": 1, "SUMS": 1}

    def _in_mode_b(self) -> Choice:
        return _linears().choose(self.matrix, 2, self.target, device_name(torch.device(self.device)), True)


def columns(sizes: Sizes) -> int:
    """Return K."""
    return sizes["K"] if "K" in sizes else 2 * sizes["J"]


def rows_letter(row: Contract) -> str:
    """Return the letter of a call's rows."""
    return row.args[0].forms[0][0][0]


def rows_of(sizes: Sizes) -> int:
    """Return the number of rows of a call."""
    return prod(sizes["..."]) if "..." in sizes else sizes["M"] if "M" in sizes else sizes["A"]


def with_rows(row: Contract, sizes: Sizes, rows: int) -> Sizes:
    """Return the sizes with another number of rows."""
    letter = rows_letter(row)
    more = {"P": rows * sizes["N"]} if row.name == ATTENTION else {}
    return {**sizes, letter: (rows,) if letter == "..." else rows, **more}


def _linears() -> ModuleType:
    from microllm.ops.kernels import linear_candidates  # noqa: PLC0415 - brings triton

    return linear_candidates


class Workbench:
    """A subject's calls: held to the contract by ``gate``, made ready to be timed by ``arms``."""

    def __init__(self, subject: Subject, rotate_mib: int) -> None:
        """Draw the operands.

        Raises:
            UnavailableError: there is no memory for them.
        """
        self.subject = subject
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[subject.dtype]
        config = bench_ops.OpsConfig(device=subject.device, dtype=dtype, rotate_mib=rotate_mib)
        try:
            self._sets = [bench_ops._sets(subject.row, sizes, config) for sizes in subject.sizes]
        except (RuntimeError, OverflowError) as error:
            line = (str(error).splitlines() or [""])[0][:120]
            raise UnavailableError(
                f"got {subject.row.name} {subject.sizes[0]}, whose operands {subject.device} does not hold ({line}); "
                "need smaller sizes; take a matrix of a model"
            ) from error
        self._standing: list[Action] | None = None

    def warm(self) -> None:
        """Run today's choice once.

        Raises:
            OperatorError: the operator takes no call of these sizes.
        """
        for sets in self._sets:
            with self._deciding(None):
                self._call(*sets[0])

    def gate(self, choice: Tile) -> str:
        """Return "pass", or what of the contract a candidate does not keep."""
        subject = self.subject
        try:
            for sizes in self._gated():
                if (what := self._values(sizes, choice)) or (what := self._bits(sizes, choice)):
                    return f"{what}, at {rows_of(sizes)} rows"
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a launch raises is a finding
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._values(self._gated()[0], None, still=error)
            return f"does not run: {type(error).__name__}: {lines[-1] if lines else ''}"[:300]
        assert subject.row.forward, "a contract has tolerances"
        return "pass"

    def arms(self, choice: Tile) -> list[tuple[Action, Action]]:
        """Return, for each of the subject's sizes, a call of every set of operands as today and as the candidate."""
        self._standing = self._standing or self._actions(None)
        return list(zip(self._standing, self._actions(choice), strict=True))

    def _actions(self, choice: Tile | None) -> list[Action]:
        return [self._action(choice, sets) for sets in self._sets]

    def _action(self, choice: Tile | None, sets: Sequence[tuple[list[Any], tuple[Tensor, ...]]]) -> Action:
        subject = self.subject
        calls: list[Action] = [partial(self._call, *one) for one in sets]
        turns = max(1, bench_ops.CALLS // len(calls)) if subject.target.backend != "cpu" else 1

        def every() -> None:
            for call in calls * turns:
                call()

        def each_time() -> None:
            with self._deciding(choice):
                every()

        if subject.target.backend == "cpu":
            return each_time
        with self._deciding(choice):
            return bench_ops._captured(every, calls)

    @contextmanager
    def _deciding(self, choice: Tile | None, *, mode_b: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.subject.trying(choice))
            stack.enter_context(ops.use("triton", self.subject.op))
            if mode_b or self.subject.order:
                stack.enter_context(ops.batch_invariant())
            yield

    def _call(self, values: list[Any], outs: tuple[Tensor, ...] | None = None) -> Tensor:
        if self.subject.op == ATTENTION:
            values = [*values[:-1], self.subject.split()]
        result = ops.OPERATORS[self.subject.op](*values, out=outs)
        return result[0] if isinstance(result, tuple) else result

    def _gated(self) -> list[Sizes]:
        """Return the sizes at which the contract is looked at: both ends of what the entry decides, other groups."""
        row, sizes = self.subject.row, self.subject.sizes[0]
        if self.subject.op == ATTENTION:
            return [sizes, {**with_rows(row, sizes, 3), "T": 4}]
        if self.subject.order:
            counts = set(ORDER_ROWS)
        else:
            bucket = self.subject.shape["M"]
            first = max((size for size in _linears().BUCKETS if size < bucket), default=0) + 1
            counts = {first, (first + bucket) // 2, bucket, rows_of(sizes)}
            counts |= {bucket + 1} if bucket == _linears().BUCKETS[-1] and self.subject.op in QUANTISED else set()
        found = [with_rows(row, sizes, count) for count in sorted(counts)]
        other = 1 if sizes.get("U", 1) > 1 else max(1, columns(sizes) // 64)
        if "U" in sizes and other != sizes["U"] and columns(sizes) % (32 * other) == 0:
            found.append({**found[-1], "U": other})
        return found

    def _example(self, sizes: Sizes) -> list[Any]:
        return list(self.subject.row.example(sizes, self.subject.dtype, seed=1, device=self.subject.device).values())

    def _values(self, sizes: Sizes, choice: Tile | None, still: Exception | None = None) -> str:
        """Return how far results are from the reference in fp32, where that is beyond the contract.

        Raises:
            EvidenceError: with ``still``, that today's choice does not run either after what a candidate raised.
        """
        row, values = self.subject.row, self._example(sizes)
        try:
            with self._deciding(choice):
                got, again = self._call(values), self._call(values)
                if torch.equal(_bits(got), _bits(again)) is False:
                    return "two equal calls differ"
        except Exception as error:
            if still is None:
                raise
            raise EvidenceError(
                f"got {error} of today's choice after a candidate's {still}; start again without that candidate"
            ) from error
        want = row.reference(*(_widened(value) for value in values))
        tolerance = row.forward[self.subject.dtype]
        excess = ((got.float() - want.float()).abs() - tolerance.rtol * want.float().abs()).max()
        return (
            "" if float(excess) <= tolerance.atol else f"{float(excess):.1e} beyond rtol; at most {tolerance.atol:.0e}"
        )

    def _bits(self, sizes: Sizes, choice: Tile) -> str:
        """Return what of mode B does not hold: a row's bits alone; but for an order, its bits as they are today."""
        row, values, count = self.subject.row, self._example(sizes), rows_of(sizes)
        if "triton" not in row.invariant:
            return ""
        letter = rows_letter(row)
        of_rows = [arg.forms[0][0][0] == letter for arg in row.args] + [False] * len(row.scalars)
        with self._deciding(choice, mode_b=True):
            whole = self._call(values)
            for i in sorted({0, count // 2, count - 1}):
                one = [v[i : i + 1] if own and v is not None else v for own, v in zip(of_rows, values, strict=True)]
                alone = self._call(one)
                if not torch.equal(_bits(alone), _bits(whole[i : i + 1])):
                    return f"row {i} alone has other bits in mode B"
        if not self.subject.order and self.subject.op != ATTENTION:
            with self._deciding(None, mode_b=True):
                if not torch.equal(_bits(self._call(values)), _bits(whole)):
                    return "mode B has other bits than today"
        return ""


def _widened(value: Any) -> Any:  # noqa: ANN401 - any operand
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
