"""SmolLM2-135M in transformers: what real weights and real text say of each scheme."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch.nn import functional

from microllm import structures
from microllm.errors import UnavailableError
from microllm.evidence.logits import greedy_splits
from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.attach_model import text_windows
from microllm.lab.hf_twin import cast_twin, load_twin
from microllm.structures.binding import load_bindings
from microllm.structures.host import find_host
from microllm.structures.stack import forced_logits
from microllm.structures.structure import load_catalog

EPSILON = 0.35
"""Margin under which bf16 may choose another token than fp32, on this model."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source():
    try:
        return resolve_model("demo")
    except UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def twin(source):
    return load_twin(source).requires_grad_(False)


@pytest.fixture(scope="module")
def low(twin):
    return cast_twin(twin, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def windows(source):
    """All of three texts that nothing was fitted to, in windows."""
    found, _ = text_windows(load_tokenizer(source).encode, 256)
    return found


def forced(model, windows):
    """Decoding steps of eight tokens, each behind what came before: the band in which weight-only seats run."""
    host = find_host(model, load_bindings(load_catalog()))
    return torch.cat([forced_logits(host, ids[:, :-1], 0, 8)[0] for ids in windows])


def whole(model, windows):
    return torch.cat([model(ids[:, :-1]).logits[0].float() for ids in windows])


@torch.no_grad()
def test_int8_decoding_chooses_what_fp32_chooses(twin, low, windows, config):
    wanted, bare = whole(twin, windows), whole(low, windows)
    targets = torch.cat([ids[0, 1:] for ids in windows])
    plan = structures.auto_swaps(low, lambda: low(windows[0][:, :32]), scheme="w8a16_decode", config=config).activate()
    found, summary = forced(low, windows), plan.summary()
    plan.detach()
    assert summary["clean"]
    assert summary["never_ran"] == 0

    def agreement(logits):
        return (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()

    def perplexity(logits):
        return math.exp(functional.cross_entropy(logits, targets).item())

    ratio = perplexity(found) / perplexity(wanted)
    assert agreement(found) >= 0.95
    assert agreement(found) >= agreement(bare) - 0.025
    assert ratio <= 1.005
    assert torch.equal(whole(low, windows[:1]), bare[: windows[0].shape[1] - 1])


@torch.no_grad()
def test_structural_tokens_are_the_hosts_in_fp32_and_in_bf16_by_the_margin_rule(twin, low, source, config):
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):", "Once upon a time")]
    with structures.decode_loop(twin, max_len=64) as loop:
        bare = loop.generate(prompts, max_new_tokens=24)
    for model in (twin, low):
        plan = structures.auto_swaps(
            model, lambda model=model: model(torch.tensor([prompts[0]])), scheme="bf16_structural", config=config
        ).activate()  # fmt: skip
        with structures.decode_loop(model, max_len=64) as loop:
            found = loop.generate(prompts, max_new_tokens=24)
        assert plan.summary()["clean"]
        plan.detach()
        if model is twin:
            assert found == bare
            continue
        logits = [
            twin(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
            for prompt, row in zip(prompts, bare, strict=True)
        ]
        assert all(split.accepted for split in greedy_splits(found, bare, logits, epsilon=EPSILON))
