"""``microllm structures``, ``attach`` and ``bench attach``: what they print, write and refuse."""

import json

import pytest

from microllm.cli import main
from microllm.evidence.receipt import verify_chain
from microllm.evidence.rows import read_rows


def test_decisions_are_recorded_shown_moved_and_refused(capsys, tmp_path):
    store, other = str(tmp_path / "a"), str(tmp_path / "b")
    record = ["structures", "record", "decoder_layer_decode", "chain", "--store", store]
    assert main([*record, "--times-ms", "seats", "0.61", "chain", "0.48"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["winner"], entry["times_ms"]) == ("chain", {"seats": 0.61, "chain": 0.48})
    assert main(["structures", "decisions", "--store", store]) == 0
    assert json.loads(capsys.readouterr().out) == entry
    moved = str(tmp_path / "all.jsonl")
    assert main(["structures", "decisions", "--store", store, "--to", moved]) == 0
    assert main(["structures", "decisions", "--store", other, "--take", moved]) == 0
    assert '"imported": 1' in capsys.readouterr().out
    assert main(["structures", "record", "decoder_layer_decode", "warp", "--store", store]) == 2
    assert "need declared candidates: seats, chain" in capsys.readouterr().err
    assert main(["structures", "list"]) == 0
    assert "decoder_ffn@1" in capsys.readouterr().out


def test_a_model_is_attached_judged_on_held_out_text_and_its_receipt_kept(capsys, tiny, tmp_path):
    words = ["attach", "--model", tiny, "--precision", "fp32", "--samples", "2", "--min-speedup", "0"]
    assert main([*words, "--scheme", "bf16_structural", "--store", str(tmp_path), "--report"]) == 0
    shown = capsys.readouterr().out
    assert "bound    decoder_ffn" in shown
    assert "union" in shown
    assert "judged on heldout text" in shown
    assert verify_chain((tmp_path / "receipts.jsonl").read_text().splitlines()) == []
    assert main([*words, "--scheme", "none", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["seats"] > 0
    assert main([*words, "--scheme", "w2"]) == 2
    assert "got scheme 'w2'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_attached_loop_is_timed_beside_a_bare_one(capsys, tiny, tmp_path):
    words = ["bench", "attach", "--model", tiny, "--precision", "fp32", "--num-rows", "1", "--prompt-tokens", "8"]
    words += ["--new-tokens", "32", "--schemes", "none", "--quick", "--no-peer", "--out", str(tmp_path / "rows.jsonl")]
    assert main([*words, "--store", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {row.target for row in rows} == {"A1", "A3"}
    assert all(row.parity == "pass" and row.ours for row in rows)
    assert "nothing attached" in capsys.readouterr().out
