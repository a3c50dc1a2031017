"""Candidates of the tuner on the real kernels: what the gate lets through, what it does not, and what then runs."""

from dataclasses import replace

import pytest
import torch

from microllm import ops
from microllm.lab.tune_config import parse_shape
from microllm.lab.tune_subjects import Subject, Workbench
from microllm.ops.kernels import linear, linear_choice

pytestmark = pytest.mark.interpreter
SHAPES = {
    "linear": "M2 K64 N32", "norm_linear_swiglu": "M2 K40 F16", "linear_int8": "M2 K64 N32 U1",
    "linear_int4": "M2 J32 N16 U2", "attention_decode": "A2 H4 G2 D16 S16 N3",
}  # fmt: skip


def subject(op, shape=None, *, order=False):
    sizes = parse_shape(shape or SHAPES[op], ops.CONTRACTS[op])
    return Subject(op=op, sizes=(sizes,), dtype=torch.float32, device="cpu", order=order)


@pytest.fixture(autouse=True)
def _kept_choices():
    yield
    linear_choice.choose.cache_clear()


@pytest.mark.parametrize("op", SHAPES)
def test_what_the_tuner_tries_keeps_the_contract(op):
    """The first neighbour of each kernel's choice, and the tile form, whose entry decides two to eight rows."""
    one = subject(op)
    tried = [next(one.near(one.standing()), {"split": 32}), *([{"form": 2}] if op == "linear" else [])]
    bench = Workbench(one, 1)
    assert [bench.gate(one.standing(choice)) for choice in tried] == ["pass"] * len(tried)


def test_another_order_of_k_changes_mode_b_and_keeps_its_promise():
    one = subject("linear", "M2 K256 N16", order=True)
    order = next(choice for choice in one.first() if choice["WARPS_K"] != one.standing()["WARPS_K"])
    one = replace(one, sizes=(parse_shape("M2 K256 N16", ops.CONTRACTS["linear"]),))
    x, w = torch.randn(9, 256), torch.randn(16, 256)
    with ops.batch_invariant():
        today = ops.linear(x, w)
        with one.trying(order):
            found = ops.linear(x, w)
            assert torch.equal(ops.linear(x[3:4].clone(), w), found[3:4])
        assert not torch.equal(found, today)
        assert torch.equal(ops.linear(x, w), today)


def test_a_kernel_that_is_wrong_with_one_block_is_rejected_for_that_block(monkeypatch):
    multiply = linear.multiply

    def planted(o, into, choice=None):
        multiply(o, into, choice)
        if linear.chosen(o).constants.get("BLOCK_N") == 32:
            into.y[-1, -1] += 0.01

    monkeypatch.setattr(linear, "multiply", planted)
    one = subject("linear")
    bench = Workbench(one, 1)
    assert "beyond rtol" in bench.gate(one.standing({"form": 1, "BLOCK_N": 32}))
    assert bench.gate(one.standing({"form": 1, "BLOCK_N": 16})) == "pass"
