"""From logits to a token: argmax, draws and their random numbers, penalties."""

import pytest
import torch

from microllm import ops
from microllm.ops.sample import philox
from microllm.sampling import SamplingParams
from microllm.sampling.sampler import Sampler


def test_philox_known_answers():
    """The vectors that the generator's authors publish for all-zero and all-one counters and keys."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    got = [int(w) for w in philox((zero,) * 4, zero)]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = [int(w) for w in philox((ones,) * 4, torch.full((1,), -1))]
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_sampled_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = 20_000
    columns = {n: torch.full((rows,), v) for n, v in (("temperature", 0.7), ("top_p", 1.0), ("min_p", 0.0))}
    keys = {n: torch.zeros(rows, dtype=torch.int64) for n in ("top_k", "choice", "seed")}
    tokens = ops.sample(logits.repeat(rows, 1), **columns, **keys, position=torch.arange(rows))
    counts = torch.bincount(tokens, minlength=4) / rows
    torch.testing.assert_close(counts, (logits / 0.7).softmax(0), atol=0.012, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_no_token(bad):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    assert ops.argmax(logits).tolist() == [0, -1, 0]
    assert ops.lm_head_argmax(logits, torch.eye(5)).tolist() == [0, -1, 0]


def test_argmax_takes_the_lowest_index_of_a_tie_and_lets_a_mask_pass():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, 0.0, -torch.inf], [-torch.inf] * 3])
    assert ops.argmax(logits).tolist() == [1, 1, -1]


def test_penalties_are_those_of_the_sampler():
    prompt, output = [1, 2, 2], [2, 3, 3, 3]
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    sampler = Sampler(params, seed=0, choice=0, prompt_ids=prompt)
    logits = torch.randn(1, 8)
    want = logits[0].clone()
    sampler.edit(want.clone())  # the first edit starts the counts
    for token in output:
        sampler.accept(token)
    sampler.edit(want)
    seen = torch.zeros(1, 8, dtype=torch.bool)
    seen[0, prompt + output] = True
    counts = torch.bincount(torch.tensor(output), minlength=8)[None].int()
    got = ops.penalise(
        logits,
        seen,
        counts,
        repetition=torch.tensor([1.3]),
        presence=torch.tensor([0.4]),
        frequency=torch.tensor([0.2]),
    )
    torch.testing.assert_close(got[0], want)
