"""Benchmarks beside other engines: the protocol with a made-up llama.cpp, the rules on made-up arms, one real run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from microllm.cli import main
from microllm.errors import ConfigError, EvidenceError, UnavailableError
from microllm.evidence.gates import Metrics
from microllm.evidence.rows import Row, read_rows
from microllm.lab import bench
from microllm.lab.bench import ArmResult, BenchConfig, Pair, measure_bench
from microllm.lab.bench_process import ArmSpec, Workers

pytestmark = pytest.mark.slow

FAKE_LLAMA_CPP = '''
"""Stands in for llama-cpp-python: as much of it as the benchmarks call, with logits that depend on the last token."""
import ctypes, time
import numpy as np

class Llama:
    def __init__(self, path, n_ctx, logits_all=False, flash_attn=False, **options):
        assert options["n_threads"] == options.get("n_threads_batch") == 1
        self.ctx, self.n_tokens, self.slow = self, 0, not flash_attn
        self.scores = np.zeros((n_ctx, 512), dtype=np.float32)
        self.reset()
    def n_vocab(self):
        return 512
    def reset(self):
        self.n_tokens = 0
    def eval(self, tokens):
        time.sleep(0.004 if self.slow else 0.001)
        self.n_eval += len(tokens) == 1
        self.n_p_eval += len(tokens) if len(tokens) > 1 else 0
        for token in tokens:
            self.scores[self.n_tokens] = np.roll(np.arange(512), token)
            self.n_tokens += 1
    def close(self):
        pass
    def create_chat_completion(self, messages, **options):
        yield {"choices": [{"delta": {"role": "assistant"}}]}
        yield {"choices": [{"delta": {"content": "Paris"}}]}
    n_eval = n_p_eval = 0

def llama_get_logits_ith(ctx, index):
    assert index == -1
    return ctx.scores[ctx.n_tokens - 1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

def llama_perf_context(ctx):
    return ctx

def llama_perf_context_reset(ctx):
    ctx.n_eval = ctx.n_p_eval = 0
'''
ABSENT_LLAMA_CPP = 'raise ModuleNotFoundError("No module named \'llama_cpp\'", name="llama_cpp")\n'
QUICK = (
    "--num-threads", "1", "--num-prompt-tokens", "8", "--num-new-tokens", "4", "--num-agreement-tokens", "12",
    "--rounds", "2",
)  # fmt: skip


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """Return a function that puts a module of that name before any real one, for the processes that tests start."""

    def put(text):
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "llama_cpp.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    return put


def run_lines(capsys, *words):
    assert main([*words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_decoding_beside_a_peer_makes_a_row_with_all_its_fields(tiny, llama_cpp, capsys, tmp_path, monkeypatch):
    llama_cpp(FAKE_LLAMA_CPP)
    monkeypatch.setattr(bench, "_limit", lambda *_: 1e9)  # its measurement has tests of its own
    out = tmp_path / "rows.jsonl"
    precisions = ("--precision", "bf16", "--precision", "fp32")
    words = ("bench", "decode", "--model", tiny, "--peer", "llama.cpp", *precisions, "--out", str(out), *QUICK)
    (row,) = run_lines(capsys, *words)  # fp32 is held against nothing but fp32
    assert (row["target"], row["peer_name"], row["dtype"], row["unit"]) == ("C1", "llama.cpp", "bf16", "tok/s")
    assert row["workload"] == f"decode B1 T8 N4, {tiny}, 1 threads"
    assert row["num_forwards"] == 2 * 4, "one forward pass a token, in each round"
    assert 0 < row["peer"] < 1000, "the made-up llama.cpp takes a millisecond a token"
    assert row["versions"]["llama.cpp form"] == "flash attention", "the form that is faster"
    assert row["peak_bytes"] > row["peer_peak_bytes"] > 2**20, "the peer's process holds no torch"
    assert row["limit"] == 1e9
    if row["parity"] == "pass":  # a random model in bf16 may choose otherwise; then it has no speed
        assert row["ratio_peer"] == pytest.approx(row["ours"] / row["peer"])
    else:
        assert (row["ours"], row["status"]) == (None, "precision_mismatch")
    assert [each.parity for each in read_rows(out)] == [row["parity"]]


def test_a_peer_that_is_not_installed_is_a_row_that_says_how(llama_cpp):
    llama_cpp(ABSENT_LLAMA_CPP)
    ours, spec = arm("ours", "int4", log=[]), arm("llama.cpp", "auto", log=[]).spec
    with Workers() as workers:
        missing = bench._start(workers, spec)
    time_arms(ours)
    ours.metrics = metrics()
    (pair,) = bench._pairs("prefill", BenchConfig(peer=("llama.cpp",)), [ours, missing], {})
    row = pair.row
    assert (row.target, row.status, row.ours, row.peer) == ("C2", "unavailable", None, None)
    assert "pip install llama-cpp-python==0.3.36" in row.parity
    assert "unavailable: got no module 'llama_cpp'" in pair.describe()


@pytest.mark.slow
def test_startup_is_measured_with_and_without_a_cache_and_beside_a_peer(tiny, llama_cpp, capsys):
    llama_cpp(FAKE_LLAMA_CPP)
    words = ("bench", "startup", "--model", tiny, "--repeats", "1", "--device", "cpu", "--peer", "llama.cpp")
    beside, cold = run_lines(capsys, *words, "--num-threads", "1")
    for row in (beside, cold):
        assert row["target"] == "C4"
        assert row["parity"] == row["status"] == "pass"
        assert row["limit"] < row["ours"] < 60
        assert row["peak_bytes"] > 50 * 2**20
    assert beside["peer_name"] == "llama.cpp"
    assert 0 < beside["peer"] < beside["ours"], "the made-up llama.cpp does nothing"
    assert cold["workload"].endswith("nothing cached of the model")


def test_ctrl_c_ends_every_process(tiny):
    words = ("bench", "decode", "--model", tiny, "--precision", "fp32", *QUICK[:-1], "1000000")
    # Ctrl-C is heard even where the tests were started in the background.
    hear = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", hear, sys.executable, "-m", "microllm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            while not (children := _children(process.pid)):
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
            _, complaint = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert complaint.strip() == b"microllm: stopped"
    deadline = time.monotonic() + 60
    while any(map(_runs, children)):  # one that was just starting still sees its input end
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if _runs(pid) else []


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_that_is_not_there_is_said_in_its_own_words():
    with Workers() as workers, pytest.raises(UnavailableError, match=r"microllm fp32.*no-such-model"):
        workers.start(ArmSpec(arm="microllm", precision="fp32", model="no-such-model", num_threads=1, context=64))


# ---- the rules, on made-up arms


@dataclass
class MadeUpWorker:
    """Answers as a process would; ``log`` is shared, so that the order of all questions is seen."""

    name: str
    log: list
    seconds: dict[str, float] = field(default_factory=lambda: {"a": 0.5})
    forwards_a_token: int = 1
    foreign_cpus: tuple[float, ...] = (0.0,)
    dtype: str = "fp32"

    @property
    def forms(self):
        return tuple(self.seconds)

    def ask(self, request):
        if request["do"] == "memory":
            return {"peak_bytes": 5}
        self.log.append((self.name, request["form"], request["num_tokens"]))
        count = request["num_tokens"]
        done = {"seconds": self.seconds[request["form"]], "num_tokens": count}
        return {
            **done,
            "num_forwards": self.forwards_a_token * count,
            "foreign_cpus": self.foreign_cpus[len(self.log) % len(self.foreign_cpus)],
        }

    ask_timed = ask


def arm(name, precision="fp32", **more):
    kind = "microllm" if name.startswith("ours") else name
    spec = ArmSpec(arm=kind, precision=precision, model="m", num_threads=1, context=64)
    return ArmResult(spec=spec, worker=MadeUpWorker(name=name, **more))


def time_arms(*arms, rounds=2):
    config = BenchConfig(rounds=rounds, num_new_tokens=16)
    bench._time(config, arms, {"do": "decode", "ids": [1, 2], "num_tokens": 16}, lambda _: None)


def test_arms_are_timed_in_turns_abba_in_their_fastest_form():
    log = []
    ours, peer = arm("ours", log=log), arm("llama.cpp", log=log, seconds={"slow": 0.4, "fast": 0.2})
    time_arms(ours, peer, rounds=4)
    timed = [entry for entry in log if entry[2] == 16]
    assert timed == [("ours", "a", 16), ("llama.cpp", "fast", 16), ("llama.cpp", "fast", 16), ("ours", "a", 16)] * 2
    assert (ours.rate, peer.rate, peer.form, peer.num_forwards, peer.peak_bytes) == (32, 80, "fast", 64, 5)


def test_a_rate_of_tokens_that_cost_no_pass_of_their_own_is_refused():
    with pytest.raises(EvidenceError, match=r"got 16 tokens of 32 forward passes from .*; need 16 of each"):
        time_arms(arm("llama.cpp", log=[], forwards_a_token=2))


def metrics(agreement=1.0, max_abs=0.0):
    return Metrics(
        top1_agreement=agreement, kl=0.0, perplexity_change=0.0, max_abs=max_abs, relative_l2=0.0, rms=0.0,
        num_non_finite=0, num_rows=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "found", "passes"),
    [
        ("fp32", metrics(max_abs=1e-4), True),
        ("fp32", metrics(max_abs=3e-4), False),
        ("int4", metrics(agreement=0.95, max_abs=1.0), True),
        ("int4", metrics(agreement=0.949), False),
        ("int4", metrics(agreement=float("nan")), False),
    ],
)
def test_an_arm_without_parity_has_no_speed(precision, found, passes):
    ours, peer = arm("ours", precision, log=[]), arm("llama.cpp", "auto", log=[])
    time_arms(ours, peer)
    ours.metrics = found
    pairs = list(bench._pairs("decode", BenchConfig(peer=("llama.cpp",)), [ours, peer], {"fp32": 1e6}))
    if precision == "fp32":
        assert pairs == [], "fp32 is held against nothing that is not"
        assert (ours.parity == "pass") == passes
        return
    row = pairs[0].row
    assert (row.ours is not None, row.status == "pass", row.parity == "pass") == (passes, passes, passes)
    assert row.peer == peer.rate, "the peer's speed stays"


@pytest.mark.parametrize(("foreign", "status"), [((0.0, 9.0), "invalid"), ((9.0,), "invalid"), ((0.01,), "pass")])
def test_a_busy_machine_makes_an_invalid_row(foreign, status):
    """One busy half of one arm's rounds is enough: medians of the two would hide it."""
    ours, peer = arm("ours", "int4", log=[]), arm("llama.cpp", "auto", log=[], foreign_cpus=foreign)
    time_arms(ours, peer, rounds=6)
    ours.metrics = peer.metrics = metrics()
    (pair,) = bench._pairs("decode", BenchConfig(peer=("llama.cpp",)), [ours, peer], {})
    assert pair.row.status == status
    assert peer.foreign_cpus.count(9.0) == {1: 6, 2: 3}[len(foreign)] * (foreign[-1] == 9.0)


def test_a_comparison_says_how_far_its_bar_is():
    ours, peer = arm("ours", "int4", log=[]), arm("llama.cpp", "auto", log=[], seconds={"a": 0.6})
    time_arms(ours, peer)
    ours.metrics = peer.metrics = metrics()
    (pair,) = bench._pairs("decode", BenchConfig(peer=("llama.cpp",)), [ours, peer], {})
    assert isinstance(pair, Pair)
    assert isinstance(pair.row, Row)
    said = pair.describe()
    assert "C1 microllm int4 (fp32), llama.cpp: pass, 1.20 x (1.20 to 1.20 by round)" in said
    assert said.endswith("; bar 1: reached; beyond 1.5: 80% of it")


@pytest.mark.parametrize(
    ("workload", "dtype", "expected"),
    [
        ("decode", "fp32", 20e9 / (4 * 1000)),
        ("decode", "bf16", 20e9 / (2 * 1000)),
        ("decode", "int4", 20e9 / 500),
        ("prefill", "int4", 0.5e12 / (2 * (1000 - 100))),
    ],
)
def test_the_limit_is_what_the_machine_read_and_multiplied(workload, dtype, expected, tmp_path, monkeypatch):
    rates = [("read 256 MiB (sum)", 20.0), ("read 256 MiB (mv)", None), ("copy 256 MiB (copy)", 30.0)]
    rates = rates if workload == "decode" else [("gemm 2048", 0.1), ("gemm 2048", 0.5)]
    rows = [SimpleNamespace(workload=name, ours=rate) for name, rate in rates]
    monkeypatch.setattr(bench, "measure_roofline", lambda _: rows)
    (tmp_path / "m.gguf").write_bytes(bytes(500))
    source = SimpleNamespace(kind="gguf", path=tmp_path / "m.gguf")
    model = SimpleNamespace(num_parameters=lambda: 1000, vocab_size=10, hidden_size=10)
    assert bench._limit(workload, dtype, model, source, 1) == pytest.approx(expected)


def test_what_cannot_be_run_is_refused_before_anything_is_loaded(tiny):
    with pytest.raises(ConfigError, match="an even number of rounds"):
        BenchConfig(rounds=3)
    with pytest.raises(ConfigError, match=r"need at most 64, the model's context"):
        measure_bench("prefill", BenchConfig(model=tiny))


@pytest.mark.slow
def test_the_demo_beside_the_real_peers():
    """Every figure is there and every arm is the model; no figure is judged here."""
    peers = ("transformers", "llama.cpp") if importlib.util.find_spec("llama_cpp") else ("transformers",)
    short = {"rounds": 2, "num_new_tokens": 8, "num_agreement_tokens": 64}
    found = measure_bench("decode", BenchConfig(peer=peers, precision=("int4", "fp32"), **short))
    assert [arm.parity for arm in found.arms if arm.spec.arm != "llama.cpp"] == ["pass"] * 4
    assert all(arm.metrics.top1_agreement > 0.85 for arm in found.arms)
    assert [row.target for row in found.rows] == ["C1"] * (len(peers) + 1) + ["C3"]
    assert all(row.ratio_peer for row in found.rows)
