"""The plain loop: batches equal single runs, chunks equal the whole, ended rows make room."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers

from microllm import SamplingParams
from microllm.inference import generator
from microllm.inference.generator import chunk_tokens, generate_tokens, prefill
from microllm.inference.sequence import GeneratedSequence
from microllm.model import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=30, seed=5),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=3, seed=5),
    SamplingParams(temperature=1.5, top_p=0.9, max_tokens=25, seed=-1, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=17, repetition_penalty=1.3, min_tokens=17),
    SamplingParams(temperature=1.0, min_p=0.02, max_tokens=1, logit_bias={70: 4.0}, seed=9),
]


def sequence_of(llm, prompt, params, *, choice=0):
    padding = torch.arange(llm.tokenizer.num_tokens, llm.config.vocab_size)
    return GeneratedSequence(
        tuple(llm.tokenizer.encode(prompt)), params, llm.tokenizer, seed=params.seed or 0, choice=choice,
        context=llm.config.max_position_embeddings, eos_ids=llm.eos_ids, banned_ids=padding,
    )  # fmt: skip


def run(llm, sequences):
    for _ in generate_tokens(llm.model, sequences):
        pass
    return [sequence.completion() for sequence in sequences]


def without_numbers(completion):
    """All of a completion but its times, with log-probabilities left out: they move in the last bits with the batch."""
    return dataclasses.replace(completion, timings=None, logprobs=None, prompt_logprobs=None)


def greedy_without_cache(llm, ids, count):
    ids = list(ids)
    for _ in range(count):
        logits = llm.logits(ids, last_only=True)[0, : llm.tokenizer.num_tokens]
        ids.append(int(logits.argmax()))
    return tuple(ids[-count:])


def test_a_batch_of_unequal_prompts_gives_what_full_passes_give(llm, prompts):
    completions = run(llm, [sequence_of(llm, prompt, GREEDY) for prompt in prompts])
    assert [c.token_ids for c in completions] == [
        greedy_without_cache(llm, c.prompt_token_ids, 12) for c in completions
    ]
    assert len({c.token_ids for c in completions}) == len(prompts)


def test_rows_of_every_kind_equal_their_single_runs(llm, prompts):
    together = run(llm, [sequence_of(llm, p, kind) for p, kind in zip(prompts, KINDS, strict=True)])
    alone = [run(llm, [sequence_of(llm, p, kind)])[0] for p, kind in zip(prompts, KINDS, strict=True)]
    assert [without_numbers(c) for c in together] == [without_numbers(c) for c in alone]
    assert len({len(c.token_ids) for c in together}) >= 4, "rows should end at different steps"


@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunks_give_what_the_whole_prompt_gives(llm, prompts, monkeypatch, size):
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, max_tokens=4)
    whole = run(llm, [sequence_of(llm, prompt, params) for prompt in prompts])
    monkeypatch.setattr(generator, "MAX_CHUNK_TOKENS", size)
    parts = run(llm, [sequence_of(llm, prompt, params) for prompt in prompts])
    for one, other in zip(whole, parts, strict=True):
        assert without_numbers(one) == without_numbers(other)
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(one.prompt_token_ids)
        for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


def test_chunk_sizes_bound_what_a_chunk_holds():
    config = SimpleNamespace(num_attention_heads=16, intermediate_size=4096, vocab_size=150_000)
    model = SimpleNamespace(config=config)
    for rows, longest in [(1, 100), (1, 30_000), (32, 2048), (32, 30_000)]:
        for keeps_logits in (False, True):
            size = chunk_tokens(model, rows, longest, keeps_logits=keeps_logits)
            scores = 4 * rows * size * 16 * longest
            logits = 4 * rows * size * 150_000 * keeps_logits
            assert 1 <= size <= 512
            assert size == 1 or scores + logits <= 256 << 20
    assert chunk_tokens(model, 1, 100, keeps_logits=False) == 512


def test_prefill_refuses_nothing_and_forgets_nothing_across_chunks(llm, monkeypatch):
    monkeypatch.setattr(generator, "MAX_CHUNK_TOKENS", 5)
    prompts = [tuple(range(4, 4 + n)) for n in (1, 4, 5, 6, 13)]
    last, _ = prefill(llm.model, prompts, llm.model.new_cache(5, 13))
    for row, prompt in zip(last, prompts, strict=True):
        assert torch.allclose(row, llm.logits(prompt, last_only=True)[0], atol=1e-4)


def test_choices_share_one_prefill(llm, monkeypatch):
    rows, forward = [], Transformer.forward

    def counted(self, ids, **options):
        rows.append(ids.shape[0])
        return forward(self, ids, **options)

    monkeypatch.setattr(Transformer, "forward", counted)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    sequences = [sequence_of(llm, p, params, choice=c) for p in ("the cat", "x") for c in range(3)]
    together = run(llm, sequences)
    assert rows == [2] + [6] * 7
    alone = [run(llm, [sequence_of(llm, p, params, choice=c)])[0] for p in ("the cat", "x") for c in range(3)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together}) == 6
    assert [c.index for c in together] == [0, 1, 2] * 2


def test_an_ended_long_row_makes_room_for_a_short_one(llm):
    context = llm.config.max_position_embeddings
    long = sequence_of(llm, "y" * (context - 3), dataclasses.replace(GREEDY, max_tokens=1))
    short = sequence_of(llm, "x", dataclasses.replace(GREEDY, max_tokens=60))
    completions = run(llm, [long, short])
    assert [len(c.token_ids) for c in completions] == [1, 60]
    assert completions[1].token_ids == greedy_without_cache(llm, completions[1].prompt_token_ids, 60)


def test_the_context_ends_a_sequence(llm):
    context = llm.config.max_position_embeddings
    for length in (context - 2, context - 11):
        (completion,) = run(llm, [sequence_of(llm, "y" * length, dataclasses.replace(GREEDY, max_tokens=1000))])
        assert len(completion.prompt_token_ids) + len(completion.token_ids) == context
        assert completion.finish_reason == "length"


def test_logits_that_are_not_finite_end_one_row_alone(spoiled):
    healthy = ["the cat", "x"]
    params = dataclasses.replace(GREEDY, logprobs=1)
    bad, *others = run(spoiled, [sequence_of(spoiled, p, params) for p in ["wow!", *healthy]])
    assert (bad.finish_reason, bad.token_ids, bad.logprobs) == ("error", (), ())
    assert "non-finite logits at step 0 (position 5)" in bad.error
    alone = [run(spoiled, [sequence_of(spoiled, p, params)])[0] for p in healthy]
    assert [c.token_ids for c in others] == [c.token_ids for c in alone]
    assert [c.error for c in others] == [None, None]


def test_an_error_in_the_middle_keeps_what_came_before(spoiled):
    forced = {spoiled.tokenizer.encode("!")[-1]: 100}
    completion = run(spoiled, [sequence_of(spoiled, "the cat", dataclasses.replace(GREEDY, logit_bias=forced))])[0]
    assert (completion.finish_reason, completion.text) == ("error", "!")
    assert "at step 1 (position" in completion.error


def test_stopping_early_cancels_and_frees_the_cache(llm, monkeypatch):
    caches, make = [], type(llm.model).new_cache

    def watched(*arguments):
        cache = make(*arguments)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(type(llm.model), "new_cache", watched)
    sequences = [sequence_of(llm, "the cat", dataclasses.replace(GREEDY, max_tokens=n)) for n in (2, 12)]
    steps = generate_tokens(llm.model, sequences)
    for _ in range(3):
        next(steps)
    steps.close()
    gc.collect()
    assert [c() for c in caches] == [None]
    first, second = [s.completion() for s in sequences]
    assert (first.finish_reason, second.finish_reason) == ("length", "cancelled")
    assert len(second.token_ids) == 3
    assert second.text == llm.tokenizer.decode(second.token_ids)


def test_one_sequence_may_be_ended_from_outside(llm):
    sequences = [sequence_of(llm, p, GREEDY) for p in ("the cat", "x")]
    for step, _ in enumerate(generate_tokens(llm.model, sequences)):
        if step == 4:
            sequences[0].finish("cancelled")
    one, other = [s.completion() for s in sequences]
    assert (one.finish_reason, len(one.token_ids)) == ("cancelled", 5)
    assert other.token_ids == run(llm, [sequence_of(llm, "x", GREEDY)])[0].token_ids


def test_greedy_and_penalised_tokens_are_those_of_transformers(llm):
    c = llm.config
    hf_config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads, head_dim=c.head_dim,
        num_key_value_heads=c.num_key_value_heads, rms_norm_eps=c.rms_norm_eps, eos_token_id=1, pad_token_id=0,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(hf_config).eval()
    names = reference.state_dict().keys()
    state = llm.model.state_dict()
    reference.load_state_dict({name: state[name.removeprefix("model.")] for name in names})
    padding = list(range(llm.tokenizer.num_tokens, c.vocab_size))
    for penalty in (1.0, 1.4):
        for prompt in ("the cat", "Once upon a time"):
            ids = torch.tensor([llm.tokenizer.encode(prompt)])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40,
                repetition_penalty=penalty, suppress_tokens=padding,
            )[0, ids.shape[1] :]  # fmt: skip
            got = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40, repetition_penalty=penalty))
            assert got.token_ids == tuple(expected.tolist())
