"""The matrix on a CPU: a row a cell, efficiency and bytes in it, failures kept, and rows that survive Ctrl-C."""

import pytest

from microllm.cli import main
from microllm.errors import ConfigError
from microllm.evidence.rows import read_rows
from microllm.inference import Engine
from microllm.lab import bench_matrix
from microllm.lab.bench_matrix import MatrixConfig, matrix_table, measure_matrix

TINY = {
    "model": ("tiny",), "dtype": "fp32", "device": "cpu", "tokens": (8,), "borders": (17,), "batch": (1, 3),
    "new_tokens": (12,), "rounds": 2,
}  # fmt: skip


def test_a_row_a_cell_with_efficiency_and_bytes(tmp_path):
    out, said = tmp_path / "rows.jsonl", []
    rows = list(measure_matrix(MatrixConfig(**TINY, out=out), said.append))
    assert [row.workload for row in rows] == [f"tiny B{b} T{t} N12 mode A" for t in (8, 17) for b in (1, 3)]
    assert {(row.target, row.parity, row.status) for row in rows} == {("matrix", "pass", "pass")}
    assert [rows[i].figures["efficiency"] for i in (0, 2)] == [1, 1]
    assert rows[1].figures["efficiency"] == pytest.approx(rows[1].ours / 3 / rows[0].ours)
    one_page = rows[0].figures["kv_active_bytes"] / 2  # 8 and 17 tokens, with their answers of 13 two pages
    for row, sequences in zip(rows, (1, 3, 1, 3), strict=True):
        assert row.figures["kv_active_bytes"] == sequences * 2 * one_page
        assert 0 < row.figures["kv_wasted_bytes"] < sequences * one_page
        assert row.figures["kv_active_bytes"] <= row.figures["kv_allocated_bytes"]
    assert read_rows(out) == rows
    assert len(said) == len(rows)


def test_cells_that_fail_stay_as_rows_and_the_others_run(monkeypatch):
    run = Engine.generate

    def failing(engine, prompts, params):
        if len(prompts) == 3 and len(prompts[0]) == 17:
            raise RuntimeError("out of\nsomething")
        return run(engine, prompts, params)

    monkeypatch.setattr(Engine, "generate", failing)
    rows = list(measure_matrix(MatrixConfig(**TINY | {"tokens": (8, 9000), "model": ("tiny", "none")})))
    assert [(row.status, row.ours is None) for row in rows] == [
        ("pass", False), ("pass", False), ("unsupported", True), ("unsupported", True), ("pass", False),
        ("invalid", True), ("invalid", True),
    ]  # fmt: skip
    assert rows[5].parity == "RuntimeError: out of something"
    assert rows[6].workload == "none, all of it"
    assert "got preset 'none'" in rows[6].parity
    assert "invalid: RuntimeError: out of something" in matrix_table(rows)


def test_a_cell_that_is_too_short_to_time_has_no_speed(monkeypatch):
    monkeypatch.setattr(bench_matrix.Arm, "rate", lambda *_: 0.0)
    (row,) = measure_matrix(MatrixConfig(**TINY | {"borders": (), "batch": (1,)}))
    assert (row.status, row.ours) == ("invalid", None)
    assert "too few to time" in row.parity


def test_the_peer_runs_in_its_own_cells_alone_and_last(monkeypatch):
    monkeypatch.setattr(bench_matrix, "PEER_CELLS", ((8, 3),))
    rows = list(measure_matrix(MatrixConfig(**TINY | {"new_tokens": (1, 12)}, peer=True)))
    assert [row.workload for row in rows if row.peer] == ["tiny B3 T8 N12 mode A"]
    assert rows[-1].ratio_peer > 0
    assert rows[-1].figures["efficiency"] > 0
    assert len(rows) == 9


def test_ctrl_c_keeps_the_rows_that_are_there(monkeypatch, tmp_path, capsys):
    out, run, calls = tmp_path / "rows.jsonl", bench_matrix._Grid._row, []

    def interrupted(grid, cell, *more):
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(grid, cell, *more)

    monkeypatch.setattr(bench_matrix._Grid, "_row", interrupted)
    assert main(["bench", "matrix", "--quick", "--out", str(out)]) == 130
    assert len(read_rows(out)) == 2
    assert capsys.readouterr().out.count("tiny B") == 2


@pytest.mark.parametrize("wrong", [{"model": ()}, {"new_tokens": ()}, {"batch": (0,)}, {"rounds": 3}])
def test_refuses_a_grid_of_nothing(wrong):
    with pytest.raises(ConfigError, match="need"):
        MatrixConfig(**TINY | wrong)


@pytest.mark.gpu
def test_the_grid_runs_captured_on_a_gpu_and_captures_nothing_twice(monkeypatch):
    engines, make = [], bench_matrix.new_engine
    monkeypatch.setattr(bench_matrix, "new_engine", lambda *args: engines.append(make(*args)) or engines[-1])
    grid = {"device": "cuda", "dtype": "bf16", "new_tokens": (4, 16)}
    rows = list(measure_matrix(MatrixConfig(**TINY | grid)))
    assert [row.parity for row in rows] == ["pass"] * 8
    assert all(row.peak_bytes for row in rows)
    decodes = [key for key in engines[0]._runner._bursts if key[1] == "greedy"]
    assert sorted(decodes) == [(1, "greedy"), (4, "greedy")]
