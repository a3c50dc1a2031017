"""The quality gate: its rule at the edges, its proof of itself, receipts that hold, a run on a tiny model."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from microllm.cli import main
from microllm.errors import ConfigError, EvidenceError
from microllm.evidence.gates import Metrics
from microllm.evidence.rows import QUALITY_FILE, read_rows
from microllm.inference import LLM
from microllm.inference.quantised import quantise_model
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab import quality
from microllm.lab.quality import QualityConfig, parse_quality_row, quality_table, read_texts
from microllm.lab.staircase import make_tables
from microllm.lab.validate import ValidateConfig, VerifyConfig, validate, verify
from microllm.model import load_model


def metrics(agreement, perplexity_change=0.0):
    return Metrics(
        top1_agreement=agreement, kl=0.01, perplexity_change=perplexity_change, max_abs=0.0, relative_l2=0.0, rms=0.0,
        num_non_finite=0, num_rows=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("agreement", "bf16", "change", "reasons"),
    [
        (0.9601, 0.965, 0.0, 0),
        (0.9599, 0.965, 0.0, 1),
        (0.964, 0.975, 0.0, 1),
        (0.97, 0.97, 0.0099, 0),
        (0.97, 0.97, 0.0101, 1),
        (0.97, 0.97, -0.0101, 1),
        (math.nan, 0.97, 0.0, 2),
    ],
)
def test_the_rule_at_its_edges(agreement, bf16, change, reasons):
    found = quality._verdict([metrics(agreement, change)] * 2, [10, 10], bf16)
    assert (found["passed"], len(found["reasons"])) == (reasons == 0, reasons)


def test_windows_count_by_their_tokens():
    found = quality._verdict([metrics(1.0), metrics(0.9)], [300, 100], 0.975)
    assert found["agreement"] == pytest.approx(0.975)


def test_a_gate_that_sees_nothing_is_refused():
    def deaf(ids):
        return torch.eye(5)[: len(ids)]

    class Reference:
        norm = SimpleNamespace(weight=torch.empty(0))

        def __call__(self, ids_BT):
            return torch.eye(5)[None, : ids_BT.shape[1]]

    with pytest.raises(EvidenceError, match="negative control"):
        quality._prove_gate(Reference(), deaf, [1, 2, 3])


@pytest.mark.parametrize("kind", [None, "int8", "int4", "fp8"])
def test_the_engines_pass_is_judged_by_the_logits_of_its_own_steps(tiny, kind):
    checkpoint = open_checkpoint(resolve_model(tiny))
    model = load_model(checkpoint, dtype=torch.float32)
    llm = LLM(model if kind is None else quantise_model(model, kind), load_tokenizer(resolve_model(tiny)))
    ids = [(7 * i) % llm.config.vocab_size for i in range(40)]
    want = llm.logits(ids)
    for way in quality.WAYS:
        torch.testing.assert_close(quality.forced_logits(llm, ids, way), want, atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
def test_profiles_are_judged_on_a_gpu(tiny):
    rows = quality.measure_quality(QualityConfig(model=tiny, device="cuda", window=48, num_windows=2))
    assert [(row.precision, row.way) for row in rows] == [
        (kind, way) for kind in ("int8", "int4", "fp8") for way in quality.WAYS
    ]
    assert all(row.agreement > 0.5 for row in rows)


def test_the_texts_are_small_and_say_where_they_come_from():
    texts = read_texts()
    assert sum(len(text.text.encode()) for text in texts) <= 40_000
    assert all(text.source and text.licence for text in texts)


def test_receipts_are_written_read_and_shown_and_hold(tiny, tmp_path, capsys):
    root = tmp_path / "lab"
    out = root / "rows" / QUALITY_FILE
    words = ("bench", "quality", "--model", tiny, "--precision", "fp32", "--precision", "bf16", "--window", "48")
    assert main([*words, "--num-windows", "2", "--out", str(out), "--json"]) in (0, 1)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = [parse_quality_row(line) for line in out.read_text().splitlines()]
    assert [row.model_dump(mode="json") for row in rows] == shown
    assert [(row.precision, row.way) for row in rows] == [
        ("fp32", "decode"), ("fp32", "prefill"), ("bf16", "decode"), ("bf16", "prefill"),
    ]  # fmt: skip
    exact, low = rows[0], rows[3]
    assert exact.agreement == 1.0
    assert exact.mean_kl < 1e-9
    assert exact.perplexity_ratio == pytest.approx(1.0, abs=1e-5)
    assert low.agreement == low.bf16_agreement == exact.bf16_agreement
    assert {row.num_tokens for row in rows} == {96}
    assert len({row.model_sha256 for row in rows}) == 1
    assert quality_table([*rows, *rows]).count("\n") == 2 + 4, "the last of each"
    assert read_rows(root / "rows") == [], "receipts are no benchmark rows"
    assert "| fp32 | decode | 1.0000 |" in make_tables(root)["quality"]
    assert validate(ValidateConfig(root=root)) == verify(VerifyConfig(root=root)) == []
    out.write_text(out.read_text().replace('"passed":false', '"passed":true', 1).replace("1.0,", "0.5,", 1))
    assert verify(VerifyConfig(root=root))


def test_a_window_too_short_is_refused():
    with pytest.raises(ConfigError, match="need at least 1 of 32"):
        QualityConfig(window=8)
