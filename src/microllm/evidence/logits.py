"""Compare logits by what they mean: top-1 agreement, top-2 margin, KL; and judge where greedy tokens split.

Place: beside ``compare`` (which judges a tensor's error); ``lab/align`` and the distribution gates read it.
Does not choose tokens for a user: ``sampling`` does. The reference is the fp32 model's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import CHUNK, ErrorStatistics, Record, error_statistics


class TokenSplit(Record):
    """A place where candidate and reference choose different tokens.

    Units:   logits. ``margin`` is the reference's top-1 minus its top-2; ``gap`` its top-1 minus its logit of the
             candidate's token (≥ margin). Accepted iff both are under ε: the reference was nearly undecided, between
             these very tokens.
    """

    row: int
    position: int
    candidate_token: int
    reference_token: int
    margin: float
    gap: float
    accepted: bool


class LogitsComparison(Record):
    """Two sets of logits over the same positions; margins are the reference's.

    Numbers: log-softmax and KL(reference ‖ candidate) in fp64, nats
    """

    num_positions: int
    top1_agreement: float
    min_margin: float
    median_margin: float
    mean_kl: float
    max_kl: float
    error: ErrorStatistics
    splits: tuple[TokenSplit, ...]

    @property
    def num_refused(self) -> int:
        """Return how many positions disagree although the reference was decided."""
        return sum(not split.accepted for split in self.splits)


def compare_logits(candidate: Tensor, reference: Tensor, *, epsilon: float = 0.0) -> LogitsComparison:
    """Compare teacher-forced logits at every position; ``epsilon`` is the margin under which a split is accepted.

    Shapes:  both (..., V); rows and positions of splits count over the leading axes (the last one: positions)

    Raises:
        EvidenceError: the shapes differ, hold no position, or V < 2.
    """
    if candidate.shape != reference.shape or reference.ndim < 1 or reference.shape[-1] < 2 or not reference.numel():
        raise EvidenceError(
            f"got logits {tuple(candidate.shape)} and {tuple(reference.shape)}; need equal (..., V), V ≥ 2, "
            "at least one position; run both on the same tokens"
        )
    kl, margins, splits, seen = [], [], [], 0
    length = reference.shape[-2] if reference.ndim > 1 else 1
    for c, r in _position_chunks(candidate, reference):
        log_c, log_r = c.log_softmax(-1), r.log_softmax(-1)
        difference = torch.where(log_r.exp() > 0, log_r - log_c, 0.0)  # 0 · log 0 = 0
        kl.append((log_r.exp() * difference).sum(-1))
        top = r.topk(2, -1).values
        margins.append(top[:, 0] - top[:, 1])
        chosen_c, chosen_r = c.argmax(-1), r.argmax(-1)
        for at in (chosen_c != chosen_r).nonzero().flatten().tolist():
            place = divmod(seen + at, length)
            splits.append(_split(place, r[at], int(chosen_c[at]), int(chosen_r[at]), epsilon))
        seen += len(r)
    kl_all, margin_all = torch.cat(kl), torch.cat(margins)
    return LogitsComparison(
        num_positions=seen, top1_agreement=1 - len(splits) / seen, min_margin=margin_all.min().item(),
        median_margin=margin_all.median().item(), mean_kl=kl_all.mean().item(), max_kl=kl_all.max().item(),
        error=error_statistics(candidate, reference), splits=tuple(splits),
    )  # fmt: skip


def greedy_splits(
    candidate_tokens: Sequence[Sequence[int]],
    reference_tokens: Sequence[Sequence[int]],
    reference_logits: Sequence[Tensor],
    *,
    epsilon: float,
) -> tuple[TokenSplit, ...]:
    """Return the first split of every row of two free-running greedy generations; later tokens say nothing.

    Shapes:  ``reference_logits[row]`` (T, V): the fp32 logits from which token t of the reference was chosen
    Raises:
        EvidenceError: the numbers of rows differ, a row lacks logits, or one row is only the start of the other.
    """
    if not len(candidate_tokens) == len(reference_tokens) == len(reference_logits):
        raise EvidenceError(
            f"got {len(candidate_tokens)} candidate rows, {len(reference_tokens)} reference rows and "
            f"{len(reference_logits)} rows of logits; need as many of each"
        )
    splits: list[TokenSplit] = []
    for row, (c, r, logits) in enumerate(zip(candidate_tokens, reference_tokens, reference_logits, strict=True)):
        if len(logits) < len(r):
            raise EvidenceError(f"got {len(logits)} logits for {len(r)} tokens in row {row}; need one a token")
        place = next((t for t, (a, b) in enumerate(zip(c, r, strict=False)) if a != b), None)
        if place is not None:
            splits.append(_split((row, place), logits[place].double(), c[place], r[place], epsilon))
        elif len(c) != len(r):
            raise EvidenceError(
                f"got {len(c)} candidate and {len(r)} reference tokens in row {row}; need equal work; "
                "generate the same number of tokens with both"
            )
    return tuple(splits)


def _position_chunks(candidate: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    vocab = reference.shape[-1]
    rows = max(1, CHUNK // vocab)
    c_NV, r_NV = candidate.detach().reshape(-1, vocab), reference.detach().reshape(-1, vocab)
    for c, r in zip(c_NV.split(rows), r_NV.split(rows), strict=True):
        yield c.cpu().double(), r.cpu().double()


def _split(place: tuple[int, int], logits_V: Tensor, candidate: int, reference: int, epsilon: float) -> TokenSplit:
    first, second = logits_V.topk(2).values.tolist()
    gap = first - logits_V[candidate].item()
    return TokenSplit(
        row=place[0], position=place[1], candidate_token=candidate, reference_token=reference, margin=first - second,
        gap=gap, accepted=first - second < epsilon and gap < epsilon,
    )  # fmt: skip
