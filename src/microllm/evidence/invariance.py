"""Probe whether a row's result depends on the rows around it: alone, first, last, duplicated, among strangers.

Place: on any callable from rows to rows (a model's logits, an operator, a step); bitwise, because a batch-invariant
function is so exactly or not at all. Does not judge numeric error against a reference: ``compare`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import Record, error_statistics


class InvarianceCase(Record):
    """One row in one arrangement, against the same row alone.

    Units:   ``first_index`` counts inside the row's result; ``max_abs`` is over elements finite in both
    """

    arrangement: str
    row: int
    batch_size: int
    position: int
    equal: bool
    num_different: int
    first_index: tuple[int, ...] | None
    max_abs: float


class InvarianceReport(Record):
    """All cases of a probe; ``repeatable`` says whether the same call gives the same bits twice."""

    repeatable: bool
    cases: tuple[InvarianceCase, ...]

    @property
    def passed(self) -> bool:
        """Whether every arrangement gave the same bits as the row alone."""
        return self.repeatable and all(case.equal for case in self.cases)

    @property
    def failures(self) -> tuple[InvarianceCase, ...]:
        """Return the cases that differ."""
        return tuple(case for case in self.cases if not case.equal)


def probe_invariance(
    function: Callable[[Tensor], Tensor], rows: Tensor, *, probed: tuple[int, ...] = (0,)
) -> InvarianceReport:
    """Run ``function`` on arrangements of ``rows`` and compare each probed row's result with that row run alone.

    Shapes:  rows (N, ...), N ≥ 3; function (B, ...) → (B, ...) for every B from 1 to N
    Raises:
        EvidenceError: fewer than three rows, a probed row that is not there, or a result of another row count.
    """
    count = len(rows)
    if count < 3 or not all(0 <= row < count for row in probed):
        raise EvidenceError(f"got {count} rows and probed={probed}; need at least 3 rows, and probed among them")
    cases: list[InvarianceCase] = []
    repeatable = True
    for row in probed:
        alone = _call(function, rows[row : row + 1])[0]
        case = _compare("again", row, 1, 0, _call(function, rows[row : row + 1])[0], alone)
        repeatable = repeatable and case.equal
        cases.append(case)
        for name, order in _arrangements(row, count):
            result = _call(function, rows[torch.tensor(order, device=rows.device)])
            cases.extend(
                _compare(name, row, len(order), at, result[at], alone)
                for at, source in enumerate(order)
                if source == row
            )
    return InvarianceReport(repeatable=repeatable, cases=tuple(cases))


def _arrangements(row: int, count: int) -> Iterator[tuple[str, list[int]]]:
    others = [index for index in range(count) if index != row]
    half = len(others) // 2
    yield "first", [row, *others]
    yield "last", [*others, row]
    yield "duplicated", [row] * count
    yield "among strangers", [*others[:half], row, *others[half:]]
    yield "pair", [others[0], row]


def _call(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    with torch.no_grad():
        result = function(rows).clone()  # a captured step may return the same buffer each time
    if len(result) != len(rows):
        raise EvidenceError(f"got {len(result)} result rows for {len(rows)} rows; need one a row")
    return result


def _compare(
    arrangement: str, row: int, batch_size: int, position: int, result: Tensor, alone: Tensor
) -> InvarianceCase:
    size = result.element_size()
    bits = [t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for t in (result, alone)]
    different = (bits[0] != bits[1]).any(-1)
    where = different.nonzero().flatten()
    place = None
    if len(where):
        place = tuple(int(index) for index in torch.unravel_index(where[0], alone.shape))
    return InvarianceCase(
        arrangement=arrangement, row=row, batch_size=batch_size, position=position, equal=place is None,
        num_different=len(where), first_index=place, max_abs=error_statistics(result, alone).max_abs,
    )  # fmt: skip
