"""The tuner, with kernels and times that are made up: what is gated, what is timed, what wins, what is written.

The fake kernel takes the choice that a real one would launch with, and may be planted with a fault; the fake clock says
how fast a choice is. tests/ops/interpreter has the real kernels.
"""

import json
import os
import re

import pytest
import torch
from torch.nn import functional

from microllm import ops
from microllm.cli import main
from microllm.errors import ConfigError, EvidenceError, OperatorError, UnavailableError
from microllm.evidence.timing import PairedTiming, Round
from microllm.lab import tune as tuner
from microllm.lab import tune_config, tune_subjects
from microllm.lab.tune import TuneReport, why_not
from microllm.lab.tune_config import TuneConfig
from microllm.lab.tune_subjects import Subject, Workbench
from microllm.ops import kernels, tuned
from microllm.ops.kernels import linear, linear_candidates, linear_choice
from microllm.ops.kernels.linear import Operands
from microllm.ops.kernels.linear_choice import BUCKETS, FORMS, matrix_of
from microllm.ops.target import TARGETS

pytestmark = pytest.mark.slow

EMPTY = '{"format": 1, "entries": []}\n'
ROWS = (1, 2, 7, 16, 64, 65, 256)
H200 = TARGETS["sm_90"]


class Bench:
    """The kernels and the clock: ``fault(choice, M)`` is added to results, ``speed(choice)`` is against today's."""

    def __init__(self):
        self.fault = lambda choice, M: 0.0
        self.speed = lambda choice: 1.0
        self.launched, self.timed = [], []

    def linear(self, x, w, bias, *, out=None):
        choice = linear.chosen(Operands(op="linear", x=x, w=w, bias=bias))
        self.launched.append(choice)
        rows = [functional.linear(row.double(), w.double(), bias.double()) for row in x]  # one by one: the same bits
        y = (torch.stack(rows) + self.fault(choice, len(x))).to(x.dtype)
        return y if out is None else out[0].copy_(y)

    def attention(self, *values, out=None):
        self.launched.append(values[-1])
        y = ops.CONTRACTS["attention_decode"].reference(*values) + self.fault(values[-1], len(values[0]))
        return y if out is None else out[0].copy_(y)

    def time(self, baseline, candidate, *, device, config):
        self.launched.clear()
        candidate()
        (choice,) = {str(each): each for each in self.launched}.values()
        self.timed.append(choice)
        return timing(self.speed(choice), config)


def timing(ratio, config, *, control=1.0, jitter=0.001):
    def rounds(pairs, ratio):
        return tuple(
            Round(arm=arm, repetitions=10, host_s=seconds, second_s=seconds)
            for i in range(pairs)
            for arm, seconds in (("A", 1.0), ("B", (1 + jitter * (i % 2)) / ratio))
        )

    return PairedTiming(
        device="cuda", config=config, rounds=rounds(config.pairs, ratio),
        control_rounds=rounds(config.control_pairs, control), foreign_cpus=None,
    )  # fmt: skip


@pytest.fixture
def bench(monkeypatch, tmp_path):
    bench = Bench()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # select takes kernels on a CPU; those that run here are the fakes
    for name, run in (("linear", bench.linear), ("attention_decode", bench.attention)):
        monkeypatch.setitem(kernels.KERNELS, name, kernels.KERNELS[name]._replace(run=run))
    monkeypatch.setattr(tuner, "time_pairs", bench.time)
    path = tmp_path / "table" / "tuned.json"
    path.parent.mkdir()
    path.write_text(EMPTY)
    monkeypatch.setattr(tuned, "PATH", path)
    linear_choice.choose.cache_clear()
    yield bench
    linear_choice.choose.cache_clear()
    tuned._find.cache_clear()


def config(tmp_path, **changes):
    plain = {"shape": ("M2 K64 N32",), "dtype": "fp32", "rotate_mib": 1, "device": "cpu", "out": tmp_path / "x.json"}
    return TuneConfig(**(plain | changes))


@pytest.fixture
def accepting(monkeypatch):
    """Let a CPU's winners in, whose times are made up here."""
    monkeypatch.setattr(TuneConfig, "check", lambda self: None)


def faster(**wanted):
    """Return a clock for which choices with these constants are twice as fast."""
    return lambda choice: 2.0 if all(choice.constants.get(k) == v for k, v in wanted.items()) else 0.9


# ---- what is timed, and what wins


def test_the_fastest_candidate_within_the_contract_wins_and_is_run_as_an_entry(bench, tmp_path):
    bench.speed = faster(BLOCK_N=32)
    (found,) = tuner.tune(config(tmp_path)).searches
    assert found.winner is not None
    assert found.winner["BLOCK_N"] == 32
    assert found.today["BLOCK_N"] == 64
    assert (found.shape, found.accepted) == ({"M": 8, "N": 32, "K": 64}, False)
    assert {one.outcome for one in found.attempts} == {"winner", "beaten", "screened"}
    assert all(choice.tuned for choice in bench.timed)
    (winner,) = [one for one in found.attempts if one.outcome == "winner"]
    assert winner.confirmed[0] == pytest.approx(2.0, rel=0.01)
    assert 1.9 < winner.lower[0] <= winner.confirmed[0]


@pytest.mark.parametrize("at", [None, 3, 8])
def test_a_candidate_that_fails_parity_is_never_timed_and_never_wins(bench, tmp_path, at):
    """``at``: the one number of rows that it is wrong for: also another than what is timed, if the entry decides it."""
    bench.speed = lambda choice: 100.0 if choice.constants.get("BLOCK_N") == 32 else 1.05
    bench.fault = lambda choice, M: 0.1 * (choice.constants.get("BLOCK_N") == 32 and at in (None, M))
    (found,) = tuner.tune(config(tmp_path, shape=("M3 K64 N32",))).searches
    broken = [one for one in found.attempts if one.choice.get("BLOCK_N") == 32]
    assert broken
    assert all(one.outcome == "rejected" and not one.screened + one.confirmed for one in broken)
    assert all("beyond rtol" in one.why for one in broken)
    assert not any(choice.constants.get("BLOCK_N") == 32 for choice in bench.timed)
    assert found.winner is not None
    assert found.winner.get("BLOCK_N") != 32


def test_a_candidate_whose_equal_calls_differ_or_that_does_not_compile_is_rejected(bench, tmp_path):
    def fault(choice, M):
        if choice.constants.get("BLOCK_N") == 32:
            raise RuntimeError("no\n  out of resource: shared memory")
        return 1e-6 * len(bench.launched) * (choice.form == "tile")

    bench.fault = fault
    (found,) = tuner.tune(config(tmp_path, quick=True)).searches
    why = {one.why for one in found.attempts if one.outcome == "rejected"}
    assert "does not run: RuntimeError: out of resource: shared memory" in why
    assert any("two equal calls differ" in text for text in why)
    assert found.winner is None
    assert all(one.outcome != "winner" for one in found.attempts)


def test_a_device_that_a_candidate_broke_ends_the_run(bench, tmp_path):
    broken = []

    def fault(choice, M):
        if choice.tuned:
            broken.append(choice)
        if broken:
            raise RuntimeError("an illegal memory access")
        return 0.0

    bench.fault = fault
    with pytest.raises(EvidenceError, match=r"today's choice after a candidate's an illegal.*start again"):
        tuner.tune(config(tmp_path))
    assert not bench.timed


def test_one_order_for_all_rows_is_timed_in_mode_b_at_each_and_must_keep_a_rows_bits(bench, tmp_path):
    bench.speed = lambda choice: (
        3.0 if choice.constants["WARPS_K"] == 4 else 2.0 if choice.constants["SUMS"] == 2 else 1.0
    )
    bench.fault = lambda choice, M: 1e-6 * M * (choice.tuned and choice.constants["WARPS_K"] == 4)
    (found,) = tuner.tune(config(tmp_path, what="order", shape=("M1 K512 N32", "M8 K512 N32"))).searches
    assert (found.shape, found.mode_b) == ({"N": 32, "K": 512}, True)
    assert {choice.form for choice in bench.timed} == {"mma"}
    four = [one for one in found.attempts if one.choice["WARPS_K"] == 4]
    assert four
    assert all("alone has other bits in mode B" in one.why for one in four)
    assert found.winner is not None
    assert found.winner["SUMS"] == 2
    assert all(len(one.screened) == 2 for one in found.attempts if one.outcome != "rejected")


def test_the_search_goes_on_from_the_best_and_stops_at_most(bench, tmp_path):
    bench.speed = lambda choice: 128.0 / choice.constants["BLOCK_M"] if choice.form == "mma" else 0.5
    (found,) = tuner.tune(config(tmp_path, quick=True, shape=("M200 K64 N32",))).searches
    best = max(found.attempts, key=lambda one: one.gain)
    assert best.choice["BLOCK_M"] == 16  # 64 as it stands, then a step, then two
    (found,) = tuner.tune(config(tmp_path, quick=True, most=3)).searches
    assert len(found.attempts) == 3


LONG = tuner.TimingConfig(round_s=0.15)


@pytest.mark.parametrize(
    ("timings", "why"),
    [
        ([timing(1.1, LONG)], ""),
        ([timing(1.1, LONG), timing(1.0, LONG)], ""),
        ([timing(1.005, LONG)], "less than 1 % faster"),
        ([timing(1.3, LONG), timing(0.98, LONG)], "at one size it may be slower"),
        ([timing(1.2, LONG, jitter=0.3)], "at one size it may be slower"),
        ([timing(1.03, LONG, control=1.02)], "equal arms differed by"),
        ([timing(1.1, tuner.TimingConfig(round_s=5.0))], "pairs dropped"),
    ],
)
def test_what_wins_and_why_not(timings, why):
    assert bool(why) == bool(why_not(timings))
    assert re.search(why, why_not(timings))


# ---- mode B


@pytest.mark.parametrize("form", range(3))
def test_no_entry_of_some_rows_changes_mode_b(bench, form):
    """Forms, tiles and order of mode B are the same with an entry for every bucket, for every number of rows."""
    matrix = matrix_of("linear", 896, 4864, torch.bfloat16)

    def chosen(one_order):
        linear_choice.choose.cache_clear()
        return [linear_choice.choose(matrix, M, H200, "interpreter", one_order) for M in ROWS]

    before, in_mode_a = chosen(True), chosen(False)
    one = Subject(op="linear", sizes=({"...": (1,), "K": 4864, "N": 896},), dtype=torch.bfloat16, device="cpu")
    entry = one.entry({"form": form})
    every = [entry.model_copy(update={"shape": {"M": bucket, "N": 896, "K": 4864}}) for bucket in BUCKETS]
    with linear_candidates.trying(*every):
        assert chosen(True) == before
        assert {choice.form for choice in chosen(False)} == {FORMS[form]}
        assert chosen(False) != in_mode_a
    order = entry.model_copy(update={"shape": {"N": 896, "K": 4864}, "choice": {"WARPS_K": 4, "SUMS": 4}})
    with linear_candidates.trying(order):
        found = chosen(True)
        assert {(c.form, c.constants["WARPS_K"], c.constants["KB"], c.constants["SUMS"]) for c in found} == {
            ("mma", 4, before[0].constants["KB"], 4)
        }
    assert chosen(True) == before


def test_mode_b_has_one_split_of_keys_whatever_is_tuned():
    def split(rows, one):
        return ops.decode_split(rows, (8, 2, 64), 16, 4096, torch.bfloat16, torch.device("cpu"), one_for_all_rows=one)

    assert [split(rows, True) for rows in ROWS] == [128] * len(ROWS)
    assert [split(rows, False) for rows in (1, 8, 9, 256)] == [0, 0, 0, 0]  # follows the load
    few = ops.decode_split(8, (8, 2, 64), 16, 1024, torch.bfloat16, torch.device("cpu"), one_for_all_rows=False)
    assert few == 64
    sizes = {"A": 1, "T": 1, "H": 8, "G": 2, "D": 64, "S": 16, "N": 256, "P": 256}
    subject = Subject(op="attention_decode", sizes=(sizes,), dtype=torch.bfloat16, device="cpu")
    with subject.trying({"split": 512}):
        assert split(1, False) == 512
        assert split(2, False) == 0
        assert [split(rows, True) for rows in ROWS] == [128] * len(ROWS)
    with subject.trying({"split": 40}), pytest.raises(OperatorError, match=r"tuned.json: got \{'split': 40\}"):
        split(1, False)


def test_attentions_split_is_gated_timed_and_found(bench, tmp_path):
    bench.speed = lambda split: 2.0 if split == 32 else 9.0 if split == 256 else 0.8
    bench.fault = lambda split, A: 1.0 * (split == 256 and A == 3)
    shape = ("A2 H4 G2 D16 S16 N8",)
    (found,) = tuner.tune(config(tmp_path, op=("attention_decode",), shape=shape)).searches
    assert found.winner == {"split": 32}
    assert found.today == {"split": 64}
    assert 256 not in bench.timed
    assert {one.choice["split"] for one in found.attempts} == {32, 128, 256, 512, 1024}
    (subject,) = tuner._subjects(config(tmp_path, op=("attention_decode",), shape=shape))
    call = subject.row.example(subject.sizes[0]) | {"split": 32}
    with ops.use("triton", "attention_decode"), subject.trying(found.winner):
        assert ops.select("attention_decode", call).reason.endswith("; tuned")
        assert not ops.select("attention_decode", call | {"split": 64}).reason.endswith("tuned")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "shape"),
    [("linear", "M1 K896 N1152"), ("linear_int4", "M8 J448 N1152 U14"), ("attention_decode", "A2 H14 G2 D64 S16 N64")],
)
def test_candidates_are_timed_on_a_gpu(tmp_path, op, shape):
    """Real kernels, captured, in bf16; nothing is accepted."""
    words = ["tune", "--device", "cuda", "--op", op, "--shape", shape, "--most", "4", "--climbs", "0", "--quick"]
    assert main([*words, "--out", str(tmp_path / "x.json")]) == 0
    (found,) = TuneReport.model_validate_json((tmp_path / "x.json").read_text()).searches
    timed = [one for one in found.attempts if one.outcome == "screened"]
    assert timed, [one.why for one in found.attempts]
    assert all(0.05 < one.screened[0] < 20 for one in timed)


# ---- the table


def test_only_accepted_winners_are_written_and_then_the_reason_says_tuned(bench, tmp_path, accepting):
    bench.speed = faster(BLOCK_N=32)
    x, w = torch.randn(2, 64), torch.randn(32, 64)
    call = {"x": x, "w": w, "bias": torch.randn(32)}
    tuner.tune(config(tmp_path))
    assert tuned.PATH.read_text() == EMPTY
    with ops.use("triton", "linear"):
        assert "tuned" not in ops.select("linear", call).reason
    (found,) = tuner.tune(config(tmp_path, accept=True)).searches
    (entry,) = tuned.entries()
    assert found.accepted
    assert entry.choice == found.winner
    assert (entry.device, entry.torch) == ("interpreter", torch.__version__.partition("+")[0])
    assert entry.source == tuned.source_of("linear")
    with ops.use("triton", "linear"):
        assert ops.select("linear", call).reason.endswith("; tuned")
        assert not ops.select("linear", call | {"x": torch.randn(9, 64)}).reason.endswith("tuned")
        with ops.batch_invariant():
            assert not ops.select("linear", call).reason.endswith("tuned")
        with ops.ledger() as counts:
            ops.linear(**call)
    assert bench.launched[-1].constants["BLOCK_N"] == 32
    assert [ran.reason.endswith("; tuned") for ran in counts] == [True]
    (again,) = tuner.tune(config(tmp_path, accept=True)).searches
    assert again.today == found.winner  # from here on it is what is to be beaten
    assert len(tuned.entries()) == 1


@pytest.mark.parametrize("change", [{"device": "GPU A"}, {"torch": "2.0.0"}, {"triton": "1.0"}, {"source": "0" * 16}])
def test_an_entry_of_another_environment_is_not_used_and_said_to_be(bench, tmp_path, accepting, change, capsys):
    bench.speed = faster(BLOCK_N=32)
    tuner.tune(config(tmp_path, accept=True))
    (entry,) = tuned.entries()
    tuned.accept((entry.model_copy(update=change),))
    content = json.loads(tuned.PATH.read_text())
    assert len(content["entries"]) == 2  # the other environment's stands beside this one's
    tuned.PATH.write_text(json.dumps(content | {"entries": content["entries"][1:]}))
    tuned._read.cache_clear()
    with linear_candidates.trying():
        today = Subject(
            op="linear", sizes=({"...": (2,), "K": 64, "N": 32},), dtype=torch.float32, device="cpu"
        ).standing()
    assert today["BLOCK_N"] == 64
    bench.speed = lambda choice: 0.5
    report = tuner.tune(config(tmp_path))
    assert [next(iter(change)) in text for text in report.ignored] == [True]
    main(["doctor"])
    assert "1 not used here" in " ".join(capsys.readouterr().out.split())


def test_the_packaged_table_is_as_the_tuner_writes_it():
    """So that a run that finds nothing leaves no change."""
    whole = tuned.TunedFile(format=1, entries=tuned.entries())
    assert tuned.PATH.read_text() == whole.model_dump_json(indent=1) + "\n"


def test_the_source_of_every_tunable_operator_is_read_from_files_that_are_there():
    launched = {kernel.fn.__module__ for kernel in linear.KERNELS.values()}
    assert {f"{name.rpartition('.')[2]}.py" for name in launched} <= set(tuned._LINEAR)
    digests = {op: tuned.source_of(op) for op in tune_config.TUNABLE}
    assert len(set(digests.values())) == 2
    assert digests["linear"] == digests["linear_int4"] != digests["attention_decode"]


def test_accepting_an_order_takes_the_entries_found_with_the_one_before_along(bench):
    subject = Subject(op="linear", sizes=({"...": (2,), "K": 64, "N": 32},), dtype=torch.float32, device="cpu")
    of_rows = subject.entry({"form": 1, "BLOCK_N": 32})
    other = of_rows.model_copy(update={"shape": {"M": 8, "N": 33, "K": 64}})
    order = of_rows.model_copy(update={"shape": {"N": 32, "K": 64}, "choice": {"WARPS_K": 2}})
    assert tuned.accept((of_rows, other)) == []
    assert tuned.accept((order,)) == [of_rows]
    assert tuned.entries() == (other, order)
    assert list(tuned.PATH.parent.iterdir()) == [tuned.PATH]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "tuned.json"),
        ("{", "tuned.json"),
        ('{"format": 2, "entries": []}', "format"),
        ('{"format": 1, "entries": [{}]}', "entries"),
        ('{"format": 1}', "entries"),
        ("[]", "tuned.json"),
        (EMPTY + "\0", "tuned.json"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_it(bench, text, what):
    tuned.PATH.write_text(text)
    with (
        ops.use("triton", "linear"),
        pytest.raises(OperatorError, match=r"tuned\.json: got .*; need .*; restore") as info,
    ):
        ops.linear(torch.randn(2, 8), torch.randn(4, 8), torch.randn(4))
    assert what in str(info.value)
    assert main(["doctor"]) in (0, 1)


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        ({"form": 7}, "form 7"),
        ({"BLOCK_N": 32}, "form None"),
        ({"form": 1, "BLOCKN": 32}, "BLOCKN, which is none of form, BLOCK_M"),
        ({"form": 1, "BLOCK_N": 33}, "BLOCK_N 33"),
        ({"form": 1, "BLOCK_N": 0}, "BLOCK_N 0"),
        ({"form": 2, "SPLIT": 2, "BLOCK_M": -16}, "BLOCK_M -16"),
        ({"form": 2, "num_warps": 3}, "num_warps 3"),
        ({"form": 1, "WARPS_K": 2}, "WARPS_K, which is none"),
    ],
)
def test_an_entry_that_no_launch_takes_is_an_error_that_names_the_file(bench, choice, what):
    subject = Subject(op="linear", sizes=({"...": (2,), "K": 64, "N": 32},), dtype=torch.float32, device="cpu")
    tuned.accept((subject.entry(choice),))
    with pytest.raises(OperatorError, match=rf"tuned\.json: got {what}.* in the entry for linear"):
        subject.standing()


def test_two_entries_for_one_shape_are_an_error(bench):
    subject = Subject(op="linear", sizes=({"...": (2,), "K": 64, "N": 32},), dtype=torch.float32, device="cpu")
    entry = subject.entry({"form": 1}).model_dump()
    tuned.PATH.write_text(json.dumps({"format": 1, "entries": [entry, entry | {"choice": {"form": 2}}]}))
    with pytest.raises(OperatorError, match=r"tuned\.json: got two entries for linear"):
        subject.standing()


# ---- the report, Ctrl-C, mistakes


def test_a_stopped_run_leaves_a_whole_report_of_what_was_done_and_no_other_file(bench, tmp_path, accepting):
    bench.speed = faster(BLOCK_N=32)
    time, calls = bench.time, []

    def stopping(*args, **kwargs):
        if any("M1" in text for text in calls):
            raise KeyboardInterrupt
        return time(*args, **kwargs)

    tuner.time_pairs = stopping  # the fixture puts the real one back
    out = tmp_path / "reports" / "x.json"
    shapes = ("M2 K64 N32", "M1 K64 N32")
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(config(tmp_path, accept=True, shape=shapes, out=out), calls.append)
    report = TuneReport.model_validate_json(out.read_text())
    assert [found.shape["M"] for found in report.searches] == [8]
    assert not report.complete
    assert len(tuned.entries()) == 1
    assert list(out.parent.iterdir()) == [out]
    assert list(tuned.PATH.parent.iterdir()) == [tuned.PATH]


def test_what_cannot_be_written_is_told_before_anything_is_timed(bench, tmp_path, accepting, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tuner.tune(config(tmp_path, out=tmp_path / "file" / "x.json"))

    def refused(path, data):
        if path == tuned.PATH:
            raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(tuned, "write_atomic", refused)
    with pytest.raises(PermissionError):
        tuner.tune(config(tmp_path, accept=True))
    assert not bench.timed


def test_the_report_reads_back_and_holds_what_was_rejected(bench, tmp_path):
    bench.fault = lambda choice, M: 1.0 * (choice.form == "tile")
    report = tuner.tune(config(tmp_path, quick=True))
    assert TuneReport.model_validate_json((tmp_path / "x.json").read_text()) == report
    assert report.complete
    assert report.environment.device_name
    assert any(one.outcome == "rejected" for one in report.searches[0].attempts)


PAGES_OF_48 = ["--op", "attention_decode", "--shape", "A2 H4 G2 D16 S48 N8"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--op", "swiglu"], "got operator 'swiglu'; need one of linear,"),
        (["--op", "lm_head_argmax"], "got operator 'lm_head_argmax'"),
        (["--shape", "M2 K64"], "got shape 'M2 K64' for linear; need M K N"),
        (["--shape", "M2 K64 N0"], "got shape 'M2 K64 N0'"),
        (["--shape", "M2 K64 N32 U2"], "got shape"),
        (["--shape", "two rows"], "got shape 'two rows'"),
        (["--shape", "M2 K64 K64 N32"], "got shape"),
        (["--op", "linear_int4", "--shape", "M2 J32 N32 U2", "--candidate", '{"form": "tile", "SPLIT": 3}'], "SPLIT 3"),
        (["--candidate", "{"], "need JSON"),
        (["--candidate", "{}"], "got candidate '{}'; need an object with at least one option"),
        (["--candidate", '{"form": "wide"}'], "got form 'wide'; need one of fma, mma, tile"),
        (["--candidate", '{"form": "tile", "BLOCK_N": "64"}'], "need a whole number for BLOCK_N"),
        (["--candidate", '{"form": "tile", "BLOCK": 64}'], "BLOCK, which is none of form, BLOCK_M"),
        (["--candidate", '{"form": "fma"}'], "form fma does not take 8 rows"),
        (["--candidate", '{"split": 64}'], 'got candidate {"split": 64} for linear M8 N32 K64 float32: form None'),
        ([*PAGES_OF_48, "--candidate", '{"split": 64}'], "a multiple of the page's 48 slots"),
        (PAGES_OF_48, "got no candidate for attention_decode"),
        (["--what", "order", "--op", "attention_decode"], "got --what order for attention_decode; need linears"),
        (["--quick", "--accept"], "decides nothing"),
        (["--accept"], "need a GPU"),
        (["--most", "0"], "got most 0"),
        (["--device", "cuda:99"], "got device 'cuda:99'; need one that this machine has"),
        (["--device", "gpu"], "got device 'gpu'; need one that this machine has"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(bench, tmp_path, capsys, words, text):
    given = ["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path / "x.json")]
    given += [] if {"--shape", "--op"} & set(words) else ["--shape", "M2 K64 N32"]
    assert main(["tune", *given, *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def test_a_candidate_with_more_shared_memory_than_the_target_has_is_refused():
    matrix = matrix_of("linear", 896, 4864, torch.bfloat16)
    entry = {"form": 2, "BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "STAGES": 4, "SPLIT": 1, "num_warps": 8}
    order = {"WARPS_K": 8, "KB": 2, "SUMS": 1}
    found = linear_candidates.problem(matrix, 64, order, entry, H200)
    assert found == "it takes 294912 bytes of shared memory; sm_90 has 232448"
    assert not linear_candidates.problem(matrix, 64, order, entry | {"STAGES": 3}, H200)
    assert "gfx942 has 65536" in linear_candidates.problem(matrix, 64, order, entry | {"STAGES": 3}, TARGETS["gfx942"])


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("op", ["linear", "norm_linear_swiglu", "linear_int8", "linear_int4"])
def test_every_candidate_of_the_tuner_fits_its_target(op, target):
    matrix = matrix_of(op, 9728, 896, torch.bfloat16)
    for M in BUCKETS:
        linear_choice.choose.cache_clear()
        choice = linear_choice.choose(matrix, M, target, "GPU A", False)
        entry = linear_candidates.entry_of(choice)
        order = {"WARPS_K": 2, "KB": 1, "SUMS": 1}
        near = list(linear_candidates.neighbours(matrix, M, order, entry, target))
        assert len(near) > 2
        assert all(one != entry and not linear_choice.fault(matrix, {"M": M}, one) for one in near)
        assert all(linear_candidates.shared_bytes(matrix, one) <= target.shared_bytes for one in near)


def test_it_needs_triton_and_a_gpu_or_the_interpreter(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["tune", "--device", "cpu"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.setattr(tune_config, "find_spec", lambda name: None)
    assert main(["tune", "--device", "cpu"]) == 2
    assert "microllm[gpu]" in capsys.readouterr().err


def test_the_command_prints_a_line_an_entry_and_help_teaches(bench, tmp_path, capsys, accepting):
    bench.speed = faster(BLOCK_N=32)
    out = tmp_path / "x.json"
    words = ["tune", "--device", "cpu", "--dtype", "fp32", "--shape", "M2 K64 N32", "--out", str(out)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "linear M8 N32 K64 float32: " in said
    assert "run again with --accept" in said
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    for word in ("contract", "--accept", "--op linear", "--shape", "mode B", "never timed"):
        assert word in text


def test_shapes_come_from_presets_one_subject_an_entry(bench, tmp_path):
    found = list(tuner._subjects(config(tmp_path, shape=(), model=("tiny",), rows=(1, 2, 8), op=("linear",))))
    shapes = [subject.shape for subject in found]
    assert len(shapes) == len({str(shape) for shape in shapes})
    assert {shape["M"] for shape in shapes} == {1, 8}
    order = list(tuner._subjects(config(tmp_path, shape=(), model=("tiny",), rows=(1, 2, 8), what="order")))
    assert [len(subject.sizes) for subject in order] == [3] * len(order)
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_groups_of_codes_are_gated_beside_one_scale_a_row():
    row = ops.CONTRACTS["linear_int8"]
    sizes = tune_config.parse_shape("M8 K128 N32", row)
    bench = Workbench(Subject(op="linear_int8", sizes=(sizes,), dtype=torch.float32, device="cpu"), 1)
    assert [(each["M"], each["U"]) for each in bench._gated()] == [(2, 1), (5, 1), (8, 1), (8, 2)]
    for text in (
        "M8 N32",
        "M8 K128 N32 N64",
        "M8 K\u00b2 N32",
        "M8 K-1 N32",
        "M8 K N32",
        "M8 K1,2 N32",
        "m8 K8 N32",
        "",
    ):
        with pytest.raises(ConfigError, match="got shape"):
            tune_config.parse_shape(text, row)
    assert tune_subjects.columns(tune_config.parse_shape("M8 J64 N32 U2", ops.CONTRACTS["linear_int4"])) == 128


def test_operands_that_no_memory_holds_are_refused():
    subject = Subject(op="linear", sizes=({"...": (1,), "K": 1 << 44, "N": 64},), dtype=torch.float32, device="cpu")
    with pytest.raises(UnavailableError, match="whose operands cpu does not hold"):
        Workbench(subject, 1)
