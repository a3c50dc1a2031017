"""The published reference model: whole, what its card says, and what its samples say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import microllm
import publish_reference as publish
from microllm.config import PRESETS
from microllm.evidence.journal import read_lines
from microllm.evidence.receipt import read_receipts, verify_chain

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "release" / "model_s"


def test_the_card_the_page_and_the_samples_say_what_the_records_say():
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert card == publish.card_text(MODEL)
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    assert page == publish.filled(page, MODEL)
    rows = [json.loads(line) for line in read_lines(MODEL / "metrics.jsonl")]
    validation = [row for row in rows if row["kind"] == "validation"]
    assert f"| validation loss | {validation[-1]['loss']:.4f} at step {validation[-1]['step']} " in card
    assert validation[-1]["loss"] < validation[0]["loss"] < 8
    assert len(validation) >= 5
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert publish.figures(MODEL)["stops"], "it was to be stopped and resumed"
    assert (MODEL / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_greedy_samples_come_again():
    samples = (MODEL / "samples.md").read_bytes().decode()
    made = publish.greedy_samples(MODEL)
    assert [f"```text\n{p}{text}\n```" in samples for p, text in zip(publish.PROMPTS, made, strict=True)] == [True] * 6


def test_it_is_model_s_in_small_shards_and_transformers_gives_the_same_logits():
    shards = sorted(MODEL.glob("*.safetensors"))
    assert len(shards) >= 3
    assert all(path.stat().st_size <= 15_000_000 for path in shards)
    ours = microllm.load(MODEL, device="cpu", precision="fp32")
    shape = PRESETS["model_s"]
    assert (ours.config.hidden_size, ours.config.num_hidden_layers) == (shape.hidden_size, shape.num_hidden_layers)
    twin = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert sum(p.numel() for p in twin.parameters()) == 15_586_176
    ids = transformers.AutoTokenizer.from_pretrained(MODEL)("In the beginning God created")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ids), twin(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)


def test_int8_keeps_what_fp32_chooses_and_receipts_are_whole():
    record = json.loads((MODEL / "structures.json").read_text(encoding="utf-8"))
    found = {row["scheme"]: row for row in record["schemes"]}
    assert found.keys() == {"w8a16_decode", "w4a16_decode", "w4a16_gptq"}
    assert found["w8a16_decode"]["agreement"] >= 0.95
    assert found["w8a16_decode"]["agreement_below_host"] <= 0.025
    assert found["w8a16_decode"]["perplexity_change"] <= 0.005
    assert all(row["clean"] and row["seats"] for row in found.values())
    assert verify_chain(read_lines(MODEL / "receipts.jsonl")) == []
    assert [row["receipt"] for row in found.values()] == [r.digest for r in read_receipts(MODEL / "receipts.jsonl")]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "sources.json", "structures.json", "receipts.jsonl"])
def test_records_name_no_machines_path(name):
    text = (MODEL / name).read_text(encoding="utf-8")
    assert [mark for mark in ('"/tmp', '"/work', '"/root', '"/home') if mark in text] == []
