"""The sampler: each edit against plain Python, their order, and rows that do not know each other."""

import math

import pytest
import torch
import transformers

from microllm.sampling import Sampler, SamplingParams, choose_tokens, token_logprobs

V = 50


def row(prompt=(1, 2, 3), *, seed=7, choice=0, stop_ids=(), banned=None, **values):
    params = SamplingParams(**({"temperature": 0} | values))
    banned_ids = None if banned is None else torch.tensor(banned)
    return Sampler(params, seed=seed, choice=choice, prompt_ids=prompt, stop_ids=stop_ids, banned_ids=banned_ids)


def logits_of(*best_first):
    """Logits in which these tokens lead, in this order."""
    logits = torch.full((V,), -5.0)
    for rank, token in enumerate(best_first):
        logits[token] = 10.0 - rank
    return logits[None]


def chosen(logits, *samplers):
    return choose_tokens(logits.expand(len(samplers), -1), samplers).tolist()


def test_temperature_0_is_the_exact_argmax_and_the_lowest_id_wins():
    logits = torch.zeros(1, V)
    logits[0, [9, 4, 30]] = 2.0
    assert chosen(logits, row()) == [4]


def test_logit_bias_bans_and_stop_ids():
    logits = logits_of(5, 6, 7)
    assert chosen(logits, row(logit_bias={7: 3, 6: -100})) == [7]
    assert chosen(logits, row(banned=[5, 6])) == [7]
    assert chosen(logits, row(banned=[5], logit_bias={5: 100})) == [6]  # a bias does not lift a ban
    sampler = row(stop_ids=[5], min_tokens=2)
    for expected in (6, 6, 5):
        assert chosen(logits, sampler) == [expected]
        sampler.accept(expected)
    assert chosen(logits, row(stop_ids=[5])) == [5]


def test_edits_leave_the_models_logits_alone():
    logits = logits_of(5, 6)
    before = logits.clone()
    chosen(logits, row(banned=[5], logit_bias={6: 1}, repetition_penalty=2, temperature=1))
    assert torch.equal(logits, before)


def test_repetition_penalty_is_that_of_transformers():
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    for seed in range(3):
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed))
        sampler = row(prompt=(1, 2, 2), repetition_penalty=1.3)
        ids = [1, 2, 2]
        for token in (9, 9, 11):
            expected = processor(torch.tensor([ids]), logits.clone())
            edited = logits[0].clone()
            sampler.edit(edited)
            assert torch.equal(edited, expected[0])
            sampler.accept(token)
            ids.append(token)


def test_presence_and_frequency_count_the_output_alone():
    sampler = row(prompt=(1, 2), presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0))
    edited = logits.clone()
    sampler.edit(edited)
    assert torch.equal(edited, logits)
    for token in (1, 8, 8, 8):
        sampler.accept(token)
    expected = logits.clone()
    expected[1] -= 0.5 + 0.25
    expected[8] -= 0.5 + 3 * 0.25
    edited = logits.clone()
    sampler.edit(edited)
    assert torch.allclose(edited, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_alone_changes_the_choice(name):
    sampler = row(**{name: 2.0})
    logits = logits_of(5, 6)
    assert chosen(logits, sampler) == [5]
    sampler.accept(5)
    assert chosen(logits, sampler) == [6]


def test_a_row_of_no_finite_logits_gives_minus_1_and_leaves_the_others():
    logits = logits_of(5, 6).repeat(4, 1)
    logits[0, 3] = math.nan
    logits[2, 3] = math.inf
    rows = [row(), row(), row(temperature=1.0), row(banned=list(range(V)))]
    assert choose_tokens(logits, rows).tolist() == [-1, 5, -1, -1]


def test_a_draw_knows_seed_choice_and_position_and_nothing_else():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, V, generator=generator)
    kinds = [
        {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0}, {"temperature": 2.0, "logit_bias": {3: 2.0}},
    ]  # fmt: skip
    rows = [row(prompt=(1,) * (i + 1), seed=i, choice=i % 2, **kind) for i, kind in enumerate(kinds)]
    together = choose_tokens(logits, rows).tolist()
    alone = [choose_tokens(logits[i : i + 1], rows[i : i + 1]).item() for i in range(6)]
    backwards = choose_tokens(logits.flip(0), rows[::-1]).tolist()[::-1]
    assert together == alone == backwards


def test_choices_seeds_and_positions_differ():
    logits = torch.zeros(1, V)
    tokens = {
        name: chosen(logits, *samplers)
        for name, samplers in {
            "choice": [row(choice=i, temperature=1.0) for i in range(8)],
            "seed": [row(seed=i, temperature=1.0) for i in range(8)],
            "position": [row(prompt=(1,) * (i + 1), temperature=1.0) for i in range(8)],
            "none": [row(temperature=1.0) for i in range(8)],
        }.items()
    }
    assert {name: len(set(drawn)) > 1 for name, drawn in tokens.items()} == {
        "choice": True, "seed": True, "position": True, "none": False,
    }  # fmt: skip


def test_negative_and_large_seeds_are_keys_too():
    logits = torch.zeros(1, V)
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]
    assert len(set(chosen(logits, *(row(seed=s, temperature=1.0) for s in seeds)))) > 1


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [row(seed=i, temperature=1.0) for i in range(4000)]
    drawn = choose_tokens(probabilities.log().expand(4000, -1), rows)
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert (shares - probabilities).abs().max() < 0.03  # four standard deviations


def test_logprobs_are_of_the_raw_logits_and_sorted():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.log_softmax(logits.double(), dim=1)
    entries = token_logprobs(logits, [4, 5, 6], [0, 3, V])
    for i, (entry, count) in enumerate(zip(entries, [0, 3, V], strict=True)):
        assert entry.token_id == 4 + i
        assert entry.logprob == pytest.approx(expected[i, 4 + i].item(), abs=1e-5)
        order = sorted(range(V), key=lambda t: (-expected[i, t].item(), t))
        assert [token for token, _ in entry.top] == order[:count]
        assert [p for _, p in entry.top] == pytest.approx([expected[i, t].item() for t in order[:count]], abs=1e-5)
