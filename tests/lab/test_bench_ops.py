"""The operators' benchmark on this CPU, in its short form: every case has a row, and no row flatters."""

import json
from dataclasses import replace

import pytest
import torch

from microllm import ops
from microllm.cli import main
from microllm.config import preset
from microllm.errors import ConfigError
from microllm.evidence.environment import read_device_name
from microllm.evidence.rows import read_rows
from microllm.lab import bench_ops
from microllm.lab.bench_ops import MODELS, OpsConfig, cases_of, measure_ops, short, work
from microllm.lab.bench_ops_peers import WRITTEN, peer
from microllm.lab.roofline import Limits

CODED = ("norm_linear_codes", "linear_residual_codes", "norm_linear_swiglu_codes")
SHORT = short(OpsConfig())
LIMITS = Limits(tflops={"bf16": 700.0}, read_gb_s=4000.0, copy_gb_s=4200.0)


def test_every_case_has_a_row_with_a_figure_and_a_peer(tmp_path):
    """One operator of each kind: a norm, a linear, a quantised one, attention, a loss with gradients."""
    names = (
        "rms_norm",
        "norm_linear_swiglu",
        "linear_int4",
        "norm_linear_swiglu_codes",
        "attention_decode",
        "linear_cross_entropy_gradients",
    )
    config = replace(SHORT, op=names, decode_rows=(2,), out=tmp_path / "ops.jsonl")
    rows = measure_ops(config)
    assert [row.workload.split()[0] for row in rows] == [case.op for case in cases_of(config)]
    assert {row.workload.split()[0] for row in rows} == set(names)
    assert [(row.parity, row.status, row.unit) for row in rows] == [("pass", "pass", "TB/s")] * len(rows)
    assert all(row.ours and row.peer and row.peer_name == "torch eager" for row in rows)
    assert all(row.limit is None for row in rows)  # bench roofline has not been here
    for case, row in zip(cases_of(config), rows, strict=True):
        assert bool(row.figures) == bench_ops.writes_much(ops.CONTRACTS[case.op], case.sizes, config.dtype)
    assert read_rows(config.out) == rows


def test_the_shapes_are_those_of_the_models():
    """Every decode linear's weight is one of the model's matrices, or several of them stacked."""
    config = OpsConfig(decode_rows=(1,), training_rows=())
    for name in MODELS:
        shapes = preset(name).parameter_shapes()
        rows = {part: sum(shapes[n][0] for n in names) for part, names in (
            ("qkv", [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"]),
            ("o", ["layers.0.self_attn.o_proj.weight"]), ("down", ["layers.0.mlp.down_proj.weight"]),
            ("gate up", ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]),
            ("head", ["embed_tokens.weight"]),
        )}  # fmt: skip
        for case in cases_of(replace(config, model=(name,))):
            if case.part in rows:
                assert case.sizes.get("N", 2 * case.sizes.get("F", 0)) == rows[case.part], case.workload


def test_every_case_makes_a_valid_call():
    cases = list(cases_of(SHORT))
    assert {case.op for case in cases} <= ops.CONTRACTS.keys()
    assert len(cases) > 10
    for case in cases:  # check raises for a call that its row refuses
        row = ops.CONTRACTS[case.op]
        row.check(list(row.example(case.sizes).values()))


@pytest.mark.parametrize("op", sorted({*WRITTEN, *CODED} - {"linear_cross_entropy_gradients"}))
def test_a_peer_computes_what_the_operator_does(op):
    case = next(case for case in cases_of(SHORT) if case.op == op)
    row = ops.CONTRACTS[op]
    ((values, _), *_) = bench_ops._sets(row, case.sizes, SHORT)
    got, want = peer(op, values, compiled=False)(), row.reference(*values)
    if op == "attention_decode":
        got = got.transpose(1, 2)
        want = row.reference(*values[:5], values[0].shape[-1] ** -0.5, 32)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=not op.startswith("cross")):
        torch.testing.assert_close(a.float(), b.float(), atol=1e-4, rtol=1e-4)


def test_work_is_held_against_what_bounds_it():
    decode = {"...": (1,), "K": 896, "N": 9728}
    amount, unit, limit = work(ops.CONTRACTS["linear"], decode, "bf16", LIMITS)
    assert (unit, limit) == ("TB/s", 4.0)
    assert amount == pytest.approx(2 * 896 * 9728 / 1e12, rel=3e-3)
    prefill = {"...": (16384,), "K": 896, "N": 9728}
    assert work(ops.CONTRACTS["linear"], prefill, "bf16", LIMITS) == (2 * 16384 * 896 * 9728 / 1e12, "TFLOPS", 700.0)
    norm = {"...": (4096,), "D": 896}
    assert work(ops.CONTRACTS["rms_norm"], norm, "bf16", LIMITS)[1:] == ("TB/s", 4.2)


def test_no_figure_above_what_memory_can_do_and_none_of_a_wrong_result(monkeypatch):
    config = replace(SHORT, op=("rms_norm",), decode_rows=(1,), training_rows=())
    name = read_device_name("cpu")
    monkeypatch.setattr(bench_ops, "PUBLISHED", {name: {"GB/s": 1e-6}})
    assert [(row.ours, row.status) for row in measure_ops(config)] == [(None, "invalid")]
    monkeypatch.setattr(bench_ops, "PUBLISHED", {})
    monkeypatch.setattr(bench_ops, "_parity", lambda *_: "y is 3.0 beyond rtol")
    assert [(row.ours, row.status) for row in measure_ops(config)] == [(None, "precision_mismatch")]


def test_operands_rotate_through_more_than_the_caches_hold():
    config = replace(SHORT, rotate_mib=2)
    sizes = {"...": (1,), "K": 256, "N": 512}
    sets = bench_ops._sets(ops.CONTRACTS["linear"], sizes, config)
    assert len(sets) == 4
    assert len({values[1].data_ptr() for values, _ in sets}) == 4
    assert all(torch.equal(values[1], sets[0][0][1]) for values, _ in sets)


@pytest.mark.parametrize("wrong", [{"op": ("nonsense",)}, {"model": ()}, {"decode_rows": (0,), "op": ("argmax",)}])
def test_a_run_of_nothing_is_refused(wrong):
    with pytest.raises(ConfigError, match="need operators with a case, and rows from 1"):
        bench_ops.measure_ops(replace(SHORT, **wrong))


def test_the_command_prints_rows(capsys):
    assert main(["bench", "ops", "--quick", "--json", "--op", "swiglu"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["workload"] for row in rows] == ["swiglu tiny 32 rows (reference)"]
