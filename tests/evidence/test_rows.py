"""Benchmark rows: ratios that always read the same way, what has no speed, tables that are current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from microllm.errors import EvidenceError
from microllm.evidence.environment import capture_environment
from microllm.evidence.journal import read_lines
from microllm.evidence.rows import (
    HIGHER_IS_BETTER,
    Row,
    environment_fields,
    fill_tables,
    latest_rows,
    read_rows,
    rows_table,
    write_row,
)
from microllm.lab.staircase import RenderConfig, render

REPOSITORY = Path(__file__).parents[2]

SPEC_FIELDS = {
    "target", "workload", "device", "dtype", "ours", "peer_name", "peer", "limit", "unit", "ratio_peer", "ratio_limit",
    "num_forwards", "peak_bytes", "peer_peak_bytes", "parity", "status", "versions", "commit", "command", "date",
}  # fmt: skip


def make_row(**changes):
    fields = {
        "target": "D1", "workload": "decode B1", "device": "cpu x", "dtype": "bf16", "ours": 200.0, "peer_name": "peer",
        "peer": 100.0, "limit": 400.0, "unit": "tok/s", "parity": "pass", "versions": {"torch": "2"},
        "commit": "c" * 40, "command": "microllm bench decode", "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Row.model_validate(fields | changes)


def test_fields_are_the_published_ones():
    assert set(Row.model_fields) == SPEC_FIELDS | {"digest", "figures"}


def test_figures_besides_are_read_back_and_leave_no_mark_where_there_are_none(tmp_path):
    for figures in (None, {"kv_wasted_bytes": 12.0}):
        path = tmp_path / f"{figures is None}.jsonl"
        written = write_row(path, make_row(figures=figures))
        assert read_rows(path) == [written]
        assert ("figures" in path.read_text()) == (figures is not None)
        assert ("figures" in written.model_dump_json()) == (figures is not None)


@pytest.mark.parametrize("unit", HIGHER_IS_BETTER)
def test_above_one_always_means_ours_is_better(unit):
    better, worse = (200.0, 100.0) if HIGHER_IS_BETTER[unit] else (100.0, 200.0)
    assert make_row(unit=unit, ours=better, peer=worse, limit=None).ratio_peer == 2.0
    assert make_row(unit=unit, ours=worse, peer=better, limit=None).ratio_peer == 0.5
    assert make_row(unit=unit, ours=worse, limit=better).ratio_limit == 0.5, "the share of the limit that is reached"


def test_unknown_unit_is_refused_by_name():
    with pytest.raises(ValidationError, match="need one of tok/s"):
        make_row(unit="furlongs")


@pytest.mark.parametrize(("unit", "ours"), [("tok/s", 400.1), ("ms", 399.9)])
def test_above_a_physical_limit_is_invalid_and_stays(unit, ours, tmp_path):
    row = make_row(unit=unit, ours=ours, limit=400.0, status="pass")
    assert row.status == "invalid"
    write_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path)[0].ours == ours
    assert make_row(ours=400.0).status == "pass"


def test_no_parity_no_speed():
    with pytest.raises(ValidationError, match="no parity, no speed"):
        make_row(parity="max-abs 0.3")
    row = make_row(parity="max-abs 0.3", ours=None)
    assert (row.status, row.ratio_peer, row.ratio_limit) == ("precision_mismatch", None, None)
    assert make_row(parity="not run", ours=None, status="oom").status == "oom"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ours": None}, "passes without a figure"),
        ({"ours": 0.0}, "above 0"),
        ({"peer": -1.0}, "above 0"),
        ({"limit": float("nan")}, "above 0"),
        ({"ratio_peer": 2.1}, "it computes to 2.0"),
        ({"ratio_peer": float("nan")}, "it computes to 2.0"),
        ({"unit": "ms", "ours": 0.0}, "above 0"),
        ({"unit": "ms", "ours": "x"}, "ours"),
        ({"unit": []}, "unit"),
        ({"ratio_limit": 0.5, "limit": None}, "it computes to None"),
        ({"status": "fast"}, "status"),
        ({"speed": 1}, "Extra inputs"),
    ],
)
def test_row_refuses(changes, expected):
    with pytest.raises(ValidationError, match=expected):
        make_row(**changes)


def test_written_row_reads_back_equal_and_any_edit_is_named(tmp_path):
    path = tmp_path / "D1.jsonl"
    written = write_row(path, make_row(**environment_fields(capture_environment("cpu")) | {"num_forwards": 128}))
    write_row(path, make_row(ours=None, status="unavailable", parity="not run"))
    assert read_rows(path)[0] == written
    assert [row.status for row in read_rows(tmp_path)] == ["pass", "unavailable"]
    original = path.read_text()
    document = json.loads(read_lines(path)[0])
    for name, value in document.items():
        tampered = {**document, name: value + 1 if isinstance(value, int | float) else "x"}
        path.write_text(
            json.dumps(tampered, sort_keys=True, separators=(",", ":")) + "\n" + original.split("\n")[1] + "\n"
        )
        with pytest.raises(EvidenceError, match=r"D1.jsonl:1"):
            read_rows(path)


def test_torn_row_is_left_out(tmp_path):
    path = tmp_path / "D1.jsonl"
    write_row(path, make_row())
    with path.open("a") as file:
        file.write('{"target":"D')
    assert len(read_rows(path)) == 1


def test_latest_row_of_each_workload_and_peer():
    rows = [
        make_row(ours=1.0),
        make_row(ours=2.0),
        make_row(peer_name="other", ours=3.0),
        make_row(dtype="int8", ours=4.0),
    ]
    assert [row.ours for row in latest_rows(rows)] == [2.0, 3.0, 4.0]


def test_table_shows_figures_with_units_and_failures_with_reasons():
    rows = [
        make_row(ours=12345.6),
        make_row(workload="a|b", ours=None, parity="argmax differs", peer=None, peer_name=None),
    ]
    lines = rows_table(rows).splitlines()
    assert "| 12,346 tok/s | peer: 100 tok/s | 123.46 | 30.86 | invalid |" in lines[2]
    assert "a\\|b" in lines[3]
    assert "precision_mismatch: argmax differs" in lines[3]
    assert {line.count("|") - line.count("\\|") for line in lines} == {11}


TEXT = "# T\n<!-- table:D1 -->\nold\n<!-- /table -->\nmiddle\n<!-- table:x -->\n<!-- /table -->\nend\n"


def test_tables_are_filled_between_their_marks_only():
    filled = fill_tables(TEXT, {"D1": "| new |\n", "x": "| y |\n"})
    assert filled == TEXT.replace("old\n", "| new |\n").replace("<!-- table:x -->\n", "<!-- table:x -->\n| y |\n")
    assert fill_tables(filled, {"D1": "| new |\n", "x": "| y |\n"}) == filled
    with pytest.raises(EvidenceError, match="table 'x'; need one of D1"):
        fill_tables(TEXT, {"D1": ""})


@pytest.mark.parametrize("cell", ["a\nb", "<!-- /table -->", "|", "a\r\nb\u2028c"])
def test_no_cell_breaks_out_of_its_table(cell):
    table = rows_table([make_row(workload=cell)])
    assert len(table.splitlines()) == 3
    filled = fill_tables("<!-- table:D1 -->\n<!-- /table -->\nend\n", {"D1": table})
    assert fill_tables(filled, {"D1": ""}) == "<!-- table:D1 -->\n<!-- /table -->\nend\n"


def test_an_unclosed_mark_is_named_and_eats_nothing():
    with pytest.raises(EvidenceError, match="<!-- table:D1 --> without its end"):
        fill_tables(TEXT.replace("<!-- /table -->\n", "", 1), {"D1": "", "x": ""})
    inline = "write `<!-- table:NAME -->` and `<!-- /table -->` around it\n"
    assert fill_tables(inline, {}) == inline


def test_this_repository_shows_current_tables_and_pictures():
    assert render(RenderConfig(root=REPOSITORY / "lab", check=True)) == []
