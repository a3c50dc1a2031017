"""Numbers about one tensor, and about the difference of two, in fp64 and in bounded memory.

Place: under ``trace`` (what a record says) and ``compare`` (what a pair of records says).
Does not judge: limits and verdicts are ``compare``'s.
Every sum walks the tensor in pieces of ``CHUNK`` elements, so that a logits tensor of gigabytes never gets an
fp64 twin, and a tensor that is not contiguous is never copied whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from microllm.errors import EvidenceError

CHUNK = 1 << 20
"""Elements that are widened to fp64 at a time."""


class Record(BaseModel):
    """Frozen data that goes to JSON with NaN and infinities written as strings, and comes back equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class TensorStatistics(Record):
    """What is worth knowing of a tensor without its values; minimum to norm are over finite elements only.

    Numbers: fp64; minimum, maximum and mean are NaN when no element is finite
    """

    numel: int
    finite_count: int
    minimum: float
    maximum: float
    mean: float
    l2_norm: float

    @property
    def all_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return self.finite_count == self.numel


class ErrorStatistics(Record):
    """How a candidate tensor differs from a reference, over the positions where both are finite.

    Numbers: fp64. ``p999_abs`` is the element of rank ceil(0.999 n) of the absolute differences, exactly.
        ``cosine_deficit`` is 1 − cos, computed without cancellation. ``signed_bias`` is the mean of
        (candidate − reference) over the reference's RMS: a systematic error that norms hide.
        ``row_relative_l2`` is the mean over rows (the last axis) of each row's relative L2: every token counts
        alike, where ``relative_l2`` sees only the token whose activations are a thousand times the others'.
        ``special_mismatches`` counts positions where one side is infinite and the other not equally so, and all
        where either is NaN: what is not a number agrees with nothing.
    """

    numel: int
    max_abs: float
    rms: float
    relative_l2: float
    row_relative_l2: float
    p999_abs: float
    cosine_deficit: float
    signed_bias: float
    non_finite: int
    special_mismatches: int
    first_special_index: tuple[int, ...] | None
    worst_index: tuple[int, ...] | None


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order as flat pieces of about ``CHUNK``; the cuts depend on the shape alone."""
    if tensor.numel() <= CHUNK:
        if tensor.numel():
            yield tensor.reshape(-1)
        return
    if tensor.shape[0] == 1:
        yield from chunks(tensor[0])
        return
    rows = max(1, CHUNK * tensor.shape[0] // tensor.numel())
    for piece in tensor.split(rows):
        yield from chunks(piece if rows > 1 else piece[0])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and bytes (NaN payloads and signs of zero count)."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (first, second)]
    return torch.equal(*bits)


def tensor_statistics(tensor: Tensor) -> TensorStatistics:
    """Return the statistics of a tensor of any dtype and layout."""
    count, total, squares, low, high = 0, 0.0, 0.0, math.inf, -math.inf
    for piece in chunks(tensor.detach()):
        finite = piece.double()
        finite = finite[finite.isfinite()]
        if finite.numel():
            count += finite.numel()
            total += finite.sum().item()
            squares += finite.square().sum().item()
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
    return TensorStatistics(
        numel=tensor.numel(), finite_count=count, minimum=low if count else math.nan,
        maximum=high if count else math.nan, mean=total / count if count else math.nan, l2_norm=math.sqrt(squares),
    )  # fmt: skip


class _Sums:
    """Running sums over pieces of a pair; the largest 0.1 % of the differences are kept for the percentile."""

    def __init__(self, numel: int, width: int) -> None:
        self.width = width
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.tail_size = numel - math.ceil(0.999 * numel) + 1
        self.count = self.non_finite = self.mismatches = self.seen = 0
        self.difference_sum = self.difference_squares = 0.0
        self.candidate_squares = self.reference_squares = self.gap = 0.0
        self.worst, self.worst_at, self.special_at = -1.0, -1, -1
        self.tail = torch.empty(0, dtype=torch.float64)

    def add(self, c: Tensor, r: Tensor) -> None:
        finite = c.isfinite() & r.isfinite()
        special = ~finite & (c != r)
        self.non_finite += int((~c.isfinite()).sum())
        if self.special_at < 0 and bool(special.any()):
            self.special_at = self.seen + int(special.int().argmax())
        self.mismatches += int(special.sum())
        zero = torch.zeros((), dtype=torch.float64)
        c, r = torch.where(finite, c, zero), torch.where(finite, r, zero)
        difference = c - r
        self.count += int(finite.sum())
        self.difference_sum += difference.sum().item()
        self.difference_squares += difference.square().sum().item()
        self.candidate_squares += c.square().sum().item()
        self.reference_squares += r.square().sum().item()
        self.gap += (difference * (c + r)).sum().item()  # |c|² − |r|² without cancellation
        if self.width:
            self.rows.append((difference.view(-1, self.width).norm(dim=1), r.view(-1, self.width).norm(dim=1)))
        size = difference.abs_()
        at = int(size.argmax())
        if size[at].item() > self.worst and bool(finite[at]):
            self.worst, self.worst_at = size[at].item(), self.seen + at
        both = torch.cat([self.tail, size[finite]])
        self.tail = both.topk(min(self.tail_size, both.numel())).values
        self.seen += c.numel()

    def row_relative_l2(self) -> float:
        """Return the mean over rows of |c−r| / |r|; a row of zeros counts against the RMS row."""
        error, size = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
        size = torch.where(size > 0, size, size.square().mean().sqrt())
        return torch.where(error > 0, error / size, error).mean().item()

    def cosine_deficit(self) -> float:
        """1 − cos = (|c−r|² − (|c|−|r|)²) / (2 |c| |r|)."""
        c, r = math.sqrt(self.candidate_squares), math.sqrt(self.reference_squares)
        if c == 0.0 or r == 0.0:
            return 0.0 if c == r else 1.0
        return max(0.0, (self.difference_squares - (self.gap / (c + r)) ** 2) / (2 * c * r))


def error_statistics(candidate: Tensor, reference: Tensor) -> ErrorStatistics:
    """Return how ``candidate`` differs from ``reference``; dtypes and devices may differ, shapes may not.

    Raises:
        EvidenceError: the shapes differ.
    """
    if candidate.shape != reference.shape:
        raise EvidenceError(
            f"got shapes {tuple(candidate.shape)} and {tuple(reference.shape)}; need equal ones; "
            "compare what ran on the same tokens"
        )
    width = reference.shape[-1] if reference.ndim > 1 and reference.numel() and reference.shape[-1] <= CHUNK else 0
    sums = _Sums(reference.numel(), width)
    for c, r in zip(chunks(candidate.detach()), chunks(reference.detach()), strict=True):
        sums.add(c.cpu().double(), r.cpu().double())
    count, shape = sums.count, tuple(reference.shape)
    error, size = math.sqrt(sums.difference_squares), math.sqrt(sums.reference_squares)
    rank = count - math.ceil(0.999 * count) + 1
    mean = sums.difference_sum / count if count else 0.0
    rms = size / math.sqrt(count) if count else 0.0
    return ErrorStatistics(
        numel=reference.numel(), max_abs=max(sums.worst, 0.0),
        rms=error / math.sqrt(count) if count else 0.0, relative_l2=_ratio(error, size),
        row_relative_l2=sums.row_relative_l2() if width else _ratio(error, size),
        p999_abs=sums.tail[rank - 1].item() if count else 0.0, cosine_deficit=sums.cosine_deficit(),
        signed_bias=math.copysign(_ratio(abs(mean), rms), mean), non_finite=sums.non_finite,
        special_mismatches=sums.mismatches, first_special_index=_position(sums.special_at, shape),
        worst_index=_position(sums.worst_at, shape),
    )  # fmt: skip


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _position(flat: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Turn a flat index into one an axis; −1 means that there is none."""
    return None if flat < 0 else tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), shape))
