"""Decoding and prefill beside other engines: same file, same threads, same tokens, in turns, in one run.

Place: ``microllm bench decode | prefill``. Each arm is a process of its own (``bench_process``); first every arm's
logits are held against fp32 of the dequantised weights, then each arm's fastest form is looked for, then the arms are
timed in turns, ABBA, so that a noisy moment meets them all alike. One row for each of our precisions and peer; an arm
of ours that fails its parity has no speed. The limit is measured in the same run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from microllm.config import ModelConfig
from microllm.errors import ConfigError, EvidenceError, UnavailableError
from microllm.evidence.environment import capture_environment
from microllm.evidence.gates import BANDS, Metrics, gate_metrics, refusals
from microllm.evidence.preflight import cpu_problems
from microllm.evidence.rows import Row, environment_fields, markdown_table, write_row
from microllm.evidence.timing import MAX_DROPPED
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import ModelSource, resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.align import LOGITS_GATE
from microllm.lab.bench_process import ArmSpec, Kind, Peer, Worker, Workers
from microllm.lab.quality import read_texts
from microllm.lab.roofline import RooflineConfig, measure_roofline

Workload = Literal["decode", "prefill"]
Progress = Callable[[str], None]
PROMPT_TOKENS: dict[Workload, int] = {"decode": 128, "prefill": 512}
"""How long the prompt is unless the config says otherwise."""
BARS: dict[tuple[str, str], tuple[float, float | None]] = {
    ("C1", "llama.cpp"): (1.0, 1.5), ("C2", "llama.cpp"): (4.0, 5.5), ("C2", "transformers bf16"): (1.3, None),
    ("C3", "transformers fp32"): (1.8, None),
}  # fmt: skip
"""Target and peer -> the ratio to reach, and the one beyond it."""
_SCREEN_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is run, against whom, how long."""

    model: str = "demo"
    """A GGUF file or "demo"; a directory where llama.cpp is no peer."""
    device: Literal["cpu"] = "cpu"
    """Where it runs."""
    precision: tuple[str, ...] = ()
    """Precisions of ours, each an arm of its own (none: auto and fp32)."""
    peer: tuple[Peer, ...] = ()
    """Engines to compare with; transformers comes in fp32 and in bf16."""
    num_threads: int = min(2, os.cpu_count() or 1)
    """Threads of every arm."""
    num_prompt_tokens: int | None = None
    """Tokens before the first new one (128 for decode, 512 for prefill)."""
    num_new_tokens: int = 64
    """Tokens that a round decodes, each at the cost of one forward pass."""
    rounds: int = 6
    """How often each arm is timed; an even number, for the order is ABBA."""
    num_agreement_tokens: int = 256
    """Tokens of real text on which every arm's choices are compared with fp32's."""
    out: Path | None = None
    """Append the rows to this JSONL file."""

    def __post_init__(self) -> None:
        counts = (self.num_threads, self.num_prompt_tokens or 1, self.num_new_tokens, self.num_agreement_tokens)
        if min(counts) < 1 or self.rounds < 2 or self.rounds % 2:
            raise ConfigError(
                f"got {self.rounds} rounds and {counts} threads, prompt, new and agreement tokens; "
                "need an even number of rounds, and at least 1 of each"
            )

    def specs(self, source: ModelSource, context: int) -> list[ArmSpec]:
        """Return the arms, ours first."""
        chosen: list[tuple[Kind, str]] = []
        for precision in dict.fromkeys(self.precision or ("auto", "fp32")):
            chosen.append(("microllm", precision))
        if "llama.cpp" in self.peer:
            chosen.append(("llama.cpp", "auto"))
        for precision in ("fp32", "bf16") if "transformers" in self.peer else ():
            chosen.append(("transformers", precision))
        return [
            ArmSpec(arm=arm, precision=precision, model=str(source.path), num_threads=self.num_threads, context=context)
            for arm, precision in chosen
        ]


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """What one arm did.

    Units:   ``rates`` in tokens a second, one a round; ``foreign_cpus`` in cores, one a round; ``missing`` says why
             there is none of it; ``metrics`` are against fp32
    """

    spec: ArmSpec
    worker: Worker | None = None
    form: str = ""
    missing: str = ""
    metrics: Metrics | None = None
    rates: list[float] = field(default_factory=list)
    foreign_cpus: list[float] = field(default_factory=list)
    num_forwards: int = 0
    peak_bytes: int | None = None

    @property
    def rate(self) -> float | None:
        """Return the median rate."""
        return median(self.rates) if self.rates else None

    @property
    def disturbed(self) -> bool:
        """Return whether other work kept the cores busy in more rounds than a timing may drop."""
        return sum(map(bool, map(cpu_problems, self.foreign_cpus))) > MAX_DROPPED * len(self.rates)

    @property
    def dtype(self) -> str:
        """Return what the arm says that it computed in."""
        return self.worker.dtype if self.worker else self.spec.precision

    @property
    def parity(self) -> str:
        """Return "pass", or why the arm is not the model: fp32 by its logits, other precisions by their choices."""
        if self.metrics is None:
            return self.missing
        exact = self.spec.precision == "fp32"
        floors = {"max_abs": LOGITS_GATE} if exact else {"top1_agreement": BANDS["top1_agreement"][0]}
        return "; ".join(refusals(self.metrics, floors)) or "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One arm of ours beside one peer (None where none was asked for), and the row that it makes."""

    ours: ArmResult
    peer: ArmResult | None
    row: Row

    def describe(self) -> str:
        """Return one line: the ratio, its range over the rounds, and how far the bar is."""
        row, name = self.row, self.peer.spec.name if self.peer else "no peer"
        line = f"{row.target} {self.ours.spec.name} ({row.dtype}), {name}: {row.status}"
        if self.peer is None or row.ratio_peer is None:
            return line if row.parity == "pass" else f"{line}: {row.parity}"
        ratios = [a / b for a, b in zip(self.ours.rates, self.peer.rates, strict=True)]
        line += f", {row.ratio_peer:.2f} x ({min(ratios):.2f} to {max(ratios):.2f} by round)"
        for word, ratio in zip(("bar", "beyond"), BARS.get((row.target, name), ()), strict=False):
            if ratio is not None:
                reached = "reached" if row.ratio_peer >= ratio else f"{row.ratio_peer / ratio:.0%} of it"
                line += f"; {word} {ratio:g}: {reached}"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All arms, and the comparisons made of them."""

    workload: Workload
    arms: tuple[ArmResult, ...]
    pairs: tuple[Pair, ...]

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all pairs."""
        return [pair.row for pair in self.pairs]

    def table(self) -> str:
        """Return the arms as a Markdown table."""
        columns = ("arm", "form", "dtype", "tok/s", "lowest to highest", "agrees with fp32", "KL", "peak MiB")
        cells = []
        for arm in self.arms:
            if arm.metrics is None or arm.rate is None:
                cells.append((arm.spec.name, arm.missing, *["—"] * 6))
                continue
            m, peak = arm.metrics, "—" if arm.peak_bytes is None else f"{arm.peak_bytes / 2**20:,.0f}"
            spread = f"{min(arm.rates):.1f} to {max(arm.rates):.1f}"
            cells.append((
                arm.spec.name, arm.form, arm.dtype, f"{arm.rate:.1f}", spread, f"{m.top1_agreement:.4f}", f"{m.kl:.1e}",
                peak,
            ))  # fmt: skip
        return markdown_table(columns, cells)


def measure_bench(workload: Workload, config: BenchConfig, progress: Progress = lambda _: None) -> Bench:
    """Run every arm and return what each did and the rows; write them to ``config.out`` if it is given.

    Raises:
        UnavailableError: an arm of ours cannot be had; a peer that cannot is a row that says so.
        EvidenceError: an arm's forward passes are not as many as the tokens that it is timed for.
        ConfigError: the model's context is too short for what is asked.
    """
    source = resolve_model(config.model)
    config = replace(config, num_prompt_tokens=config.num_prompt_tokens or PROMPT_TOKENS[workload])
    ids, context = _tokens(config, source)
    with Workers() as workers:
        arms = []
        for spec in config.specs(source, context):
            progress(f"loading {spec.name}")
            arms.append(_start(workers, spec))
        running = [arm for arm in arms if arm.worker is not None]
        _compare(workload, config, running, ids, progress)
        request = {"do": workload, "ids": ids[: config.num_prompt_tokens], "num_tokens": config.num_new_tokens}
        _time(config, running, request, progress)
    model = open_checkpoint(source).config
    progress("measuring the limit")
    limits = {arm.dtype: _limit(workload, arm.dtype, model, source, config.num_threads) for arm in running}
    pairs = tuple(_pairs(workload, config, arms, limits))
    if config.out is not None:
        for pair in pairs:
            write_row(config.out, pair.row)
    return Bench(workload=workload, arms=tuple(arms), pairs=pairs)


def _tokens(config: BenchConfig, source: ModelSource) -> tuple[list[int], int]:
    """Return ids of real text for prompt and agreement (and the one that follows), and the context that is needed."""
    prompt = config.num_prompt_tokens or 0
    context = max(prompt + config.num_new_tokens, config.num_agreement_tokens) + 1
    longest = open_checkpoint(source).config.max_position_embeddings
    if context > longest:
        raise ConfigError(f"got {context} tokens in all; need at most {longest}, the model's context; ask for fewer")
    tokenizer = load_tokenizer(source)
    ids = [token for text in read_texts() for token in tokenizer.encode(text.text)]
    needed = max(prompt, config.num_agreement_tokens + 1)
    if needed > len(ids):
        raise ConfigError(f"got {needed} tokens of text to run on; need at most {len(ids)}; ask for fewer")
    return ids[:needed], min(longest, -(-context // 64) * 64)


def _start(workers: Workers, spec: ArmSpec) -> ArmResult:
    try:
        return ArmResult(spec=spec, worker=workers.start(spec))
    except UnavailableError as error:
        if spec.arm == "microllm":
            raise
        return ArmResult(spec=spec, missing=str(error))


def _compare(
    workload: Workload, config: BenchConfig, arms: Sequence[ArmResult], ids: list[int], progress: Progress
) -> None:
    """Give every arm its metrics against fp32: transformers' where it runs, for it is not ours to agree with."""
    count = config.num_agreement_tokens
    by_independence = sorted(arms, key=lambda arm: (arm.spec.precision != "fp32", arm.spec.arm != "transformers"))
    if by_independence[0].spec.precision != "fp32":
        raise EvidenceError("got no arm in fp32 to agree with; need one; add --precision fp32 or --peer transformers")
    reference: Tensor | None = None
    with tempfile.TemporaryDirectory() as folder:
        for arm in by_independence:
            progress(f"comparing {arm.spec.name} with fp32")
            assert arm.worker is not None
            file = Path(folder) / "logits.npy"
            arm.worker.ask({
                "do": "logits", "form": arm.worker.forms[0], "ids": ids[:count], "path": str(file),
                "one_by_one": workload == "decode",
            })  # fmt: skip
            logits = torch.from_numpy(np.load(file))
            reference = logits if reference is None else reference
            targets = torch.tensor(ids[1 : count + 1])
            arm.metrics = gate_metrics("distribution", logits, reference, targets)


def _time(config: BenchConfig, arms: Sequence[ArmResult], request: dict[str, Any], progress: Progress) -> None:
    """Look for each arm's fastest form, then time the arms in turns."""
    for arm in arms:
        progress(f"warming {arm.spec.name}")
        assert arm.worker is not None
        quick = {**request, "num_tokens": min(_SCREEN_TOKENS, config.num_new_tokens)}
        times = {
            form: min(arm.worker.ask({**quick, "form": form})["seconds"] for _ in range(2)) for form in arm.worker.forms
        }
        arm.form = min(times, key=lambda form: times[form])
        arm.worker.ask({**quick, "form": arm.form})
        arm.worker.ask({"do": "memory"})
    for number in range(config.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            progress(f"round {number + 1} of {config.rounds}: {arm.spec.name}")
            _time_once(arm, {**request, "form": arm.form})
    for arm in arms:
        assert arm.worker is not None
        arm.peak_bytes = arm.worker.ask({"do": "memory"})["peak_bytes"]


def _time_once(arm: ArmResult, request: dict[str, Any]) -> None:
    assert arm.worker is not None
    done = arm.worker.ask_timed(request)
    is_decode = request["do"] == "decode"
    timed = request["num_tokens"] if is_decode else 1
    if done["num_tokens"] != timed or (is_decode and done["num_forwards"] != timed):  # a prompt may come in chunks
        raise EvidenceError(
            f"got {done['num_tokens']} tokens of {done['num_forwards']} forward passes from {arm.spec.name}; "
            f"need {timed} of each: a rate counts only tokens that cost one pass"
        )
    arm.num_forwards += done["num_forwards"]
    arm.rates.append((timed if is_decode else len(request["ids"])) / done["seconds"])
    if done["foreign_cpus"] is not None:
        arm.foreign_cpus.append(done["foreign_cpus"])


def _pairs(
    workload: Workload, config: BenchConfig, arms: Sequence[ArmResult], limits: dict[str, float | None]
) -> Iterator[Pair]:
    """Yield each of our arms beside each peer that it is fair to hold it against; without peers, alone."""
    environment = capture_environment(config.device)
    length = f"T{config.num_prompt_tokens}" + (f" N{config.num_new_tokens}" if workload == "decode" else "")
    fields = {
        **environment_fields(environment), "unit": "tok/s",
        "workload": f"{workload} B1 {length}, {config.model}, {config.num_threads} threads",
    }  # fmt: skip
    for ours in (arm for arm in arms if arm.spec.arm == "microllm"):
        exact = ours.spec.precision == "fp32"
        mine = {
            "target": "C2" if workload == "prefill" else "C3" if exact else "C1", "dtype": ours.dtype,
            "limit": limits.get(ours.dtype), "num_forwards": ours.num_forwards, "peak_bytes": ours.peak_bytes,
        }  # fmt: skip
        peers = [arm for arm in arms if arm.spec.arm != "microllm" and (not exact or arm.spec.precision == "fp32")]
        for peer in peers:
            theirs = {
                "peer_name": peer.spec.name, "peer": peer.rate, "peer_peak_bytes": peer.peak_bytes,
                "versions": environment.versions | {f"{peer.spec.arm} form": peer.form},
            }  # fmt: skip
            yield Pair(ours=ours, peer=peer, row=_row({**fields, **mine, **theirs}, ours, peer))
        if not config.peer:
            yield Pair(ours=ours, peer=None, row=_row({**fields, **mine}, ours, None))


def _row(fields: dict[str, Any], ours: ArmResult, peer: ArmResult | None) -> Row:
    """Return the row of a pair; it has no speed of ours where parity failed, and is invalid on a busy machine."""
    missing = peer.missing if peer else ""
    parity = missing or ours.parity
    busy = parity == "pass" and (ours.disturbed or (peer is not None and peer.disturbed))
    status = "unavailable" if missing else "invalid" if busy else "pass"
    rate = ours.rate if parity == "pass" else None
    return Row.model_validate({**fields, "ours": rate, "parity": parity, "status": status})


def _limit(workload: Workload, dtype: str, model: ModelConfig, source: ModelSource, num_threads: int) -> float | None:
    """Return the tokens a second that the machine's own rates allow, or None where nothing says.

    A decoding step reads every weight once; a prompt's token costs two operations a weight of the blocks.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    quick = RooflineConfig(round_s=0.05, rounds=5, out=None, dtypes=(), sizes=(2048,), memory_mib=(256,))
    try:
        if workload == "decode":
            sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
            num_bytes = sizes[dtype] * model.num_parameters() if dtype in sizes else _file_bytes(source)
            rates = [row.ours for row in measure_roofline(quick) if row.ours and row.workload.startswith("read")]
            return max(rates) * 1e9 / num_bytes if rates and num_bytes else None
        rows = measure_roofline(replace(quick, dtypes=("fp32", "bf16"), memory_mib=()))
        flops = [row.ours for row in rows if row.ours]
        weights = model.num_parameters() - model.vocab_size * model.hidden_size
        return max(flops) * 1e12 / (2 * weights) if flops else None
    finally:
        torch.set_num_threads(before)


def _file_bytes(source: ModelSource) -> int | None:
    return source.path.stat().st_size if source.kind == "gguf" else None
