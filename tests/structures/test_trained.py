"""Tiny hosts that were trained in floats: four bits by rounding and by GPTQ, side by side, on text held out."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

from microllm import structures
from microllm.evidence.gates import gate_metrics
from microllm.structures.binding import load_bindings
from microllm.structures.host import find_host
from microllm.structures.schemes import WeightOnly
from microllm.structures.stack import forced_logits
from microllm.structures.structure import load_catalog

pytestmark = pytest.mark.slow
WINDOW = 128


@pytest.fixture(params=["tiny-qwen2", "tiny-qwen3"])
def trained(request):
    import fetch_test_data
    import tiny_models

    try:
        directory, text = tiny_models.build(request.param), tiny_models.held_out_text()
    except fetch_test_data.FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def windows(start, count):
        ids = torch.tensor(tokenizer(text[start : start + 12_000])["input_ids"])
        return [ids[i * WINDOW : (i + 1) * WINDOW][None] for i in range(count)]

    return model.eval().requires_grad_(False), windows(0, 8), windows(200_000, 6)


@torch.no_grad()
def test_int8_and_int4_keep_what_a_trained_host_chooses_and_gptq_keeps_more(trained, config):
    model, heldout, fitted = trained
    host = find_host(model, load_bindings(load_catalog()))

    def run():
        return torch.cat([forced_logits(host, ids[:, :-1], 0, 8)[0] for ids in heldout])

    wanted, targets, found = run(), torch.cat([ids[0, 1:] for ids in heldout]), {}
    for scheme in ("w8a16_decode", "w4a16_decode", WeightOnly("gptq", "int4", gptq=True)):
        plan = structures.auto_swaps(
            model, lambda ids: model(ids), observations=fitted, scheme=scheme, config=config
        ).activate()  # fmt: skip
        name = getattr(scheme, "name", scheme)
        found[name] = gate_metrics("distribution", run(), wanted, targets)
        assert plan.summary()["clean"]
        plan.detach()
    assert found["w8a16_decode"].top1_agreement >= 0.99
    assert found["w4a16_decode"].top1_agreement >= 0.95
    assert found["gptq"].top1_agreement > found["w4a16_decode"].top1_agreement
    assert found["gptq"].kl < 0.6 * found["w4a16_decode"].kl
    assert all(abs(metrics.perplexity_change) <= 0.005 for metrics in found.values())
