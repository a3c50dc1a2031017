"""The demo's greedy tokens are transformers', from the same GGUF file and the same prompt ids, in fp32."""

import json
from pathlib import Path

import pytest
import torch

from microllm import SamplingParams
from microllm.io.demo import DEMO_SHA256

FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "greedy_parity.json").read_text(encoding="utf-8"))
ROWS = FIXTURE["rows"]
NUM_TOKENS = 32
EXACTLY_32 = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_the_fixture_is_what_this_file_says_it_is(demo):
    assert FIXTURE["gguf_sha256"] == DEMO_SHA256
    assert set(FIXTURE["versions"]) == {"torch", "transformers", "gguf", "numpy"}
    assert demo.dtype == torch.float32
    assert [row["chat"] for row in ROWS] == [True] + [False] * 20
    lengths = [len(row["prompt_ids"]) for row in ROWS]
    assert min(lengths) == 1
    assert max(lengths) > 100
    assert len(set(lengths)) >= 10
    assert all(len(row["token_ids"]) == NUM_TOKENS for row in ROWS)
    assert all(row["margin"] > 2e-3 for row in ROWS)  # decided by the model, not by rounding


@pytest.mark.slow
def test_a_batch_of_all_prompts_generates_the_tokens_of_transformers(demo):
    for rows in (ROWS[:-1], ROWS[-1:]):  # the longest one alone: the others would be padded to it
        completions = demo.generate([row["prompt_ids"] for row in rows], EXACTLY_32)
        for row, completion in zip(rows, completions, strict=True):
            assert list(completion.token_ids) == row["token_ids"], row["text"]


def test_the_question_through_the_chat_template_gives_their_tokens_up_to_the_end_of_the_turn(demo):
    row = ROWS[0]
    completion = demo.chat([{"role": "user", "content": row["text"]}], SamplingParams(temperature=0, max_tokens=32))
    assert list(completion.prompt_token_ids) == row["prompt_ids"]
    end = next(place for place, token in enumerate(row["token_ids"]) if token in demo.eos_ids)
    assert list(completion.token_ids) == row["token_ids"][: end + 1]
    assert "Paris" in completion.text


@pytest.mark.slow
def test_transformers_still_says_what_the_fixture_says():
    import make_parity_fixture

    chosen = [ROWS[0], ROWS[8], ROWS[14], ROWS[-1]]
    live = make_parity_fixture.generate_rows([row["text"] for row in chosen])
    for row, now in zip(chosen, live, strict=True):
        assert now["prompt_ids"] == row["prompt_ids"]
        assert now["token_ids"] == row["token_ids"]
        assert now["margin"] == pytest.approx(row["margin"], abs=1e-3)
