"""Every operator at the shapes of real models: ours beside torch's own, in one captured graph each, against the limit.

Place: ``microllm bench ops``; one row a case. Operands rotate through sets that together are larger than the caches; a
case is first held against the reference, and one whose rate is above the device's published peak has no figure. On a
CPU nothing is captured: that form is for tests.

Numbers: the work is the contract's, bytes or FLOPs, whichever takes longer at the limits of ``bench roofline``; a row
         of what writes much also has the rate of ``copy_`` of as many bytes, timed in the same run
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from microllm import ops
from microllm.config import ModelConfig, preset
from microllm.errors import ConfigError, EvidenceError, OperatorError
from microllm.evidence.environment import capture_environment, read_device_name
from microllm.evidence.rows import Row, environment_fields, read_rows, write_row
from microllm.evidence.timing import Action, RoundClock
from microllm.lab.bench_ops_peers import peer
from microllm.lab.roofline import MIB, PUBLISHED, TORCH_DTYPES, Limits, read_limits
from microllm.ops.contract import FLOATS, Contract, Sizes
from microllm.ops.select import choose

MODELS = ("smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "r1-distill-qwen-1.5b")
HEAD_ROWS = 8192
"""Most rows of the operators that have logits of a whole vocabulary."""
CALLS = 50
"""Calls in a graph at least, so that what it costs to start one is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsConfig:
    """What is measured, and how long.

    Units:   ``round_s`` in seconds; ``rotate_mib`` the operands that a graph goes through
    """

    device: str = "cuda"
    model: tuple[str, ...] = MODELS
    """Presets whose shapes are taken."""
    op: tuple[str, ...] = ()
    """Operators (none: all)."""
    decode_rows: tuple[int, ...] = (1, 8, 32)
    training_rows: tuple[int, ...] = (4096, 16384)
    dtype: str = "bf16"
    round_s: float = 0.02
    rounds: int = 5
    rotate_mib: int = 256
    limits: Path = Path("lab/rows/roofline.jsonl")
    """Rows of bench roofline; a device that has none there gives rows without a limit."""
    out: Path | None = Path("lab/rows/ops.jsonl")


def short(config: OpsConfig) -> OpsConfig:
    """Return the form that takes seconds on a CPU; it is no record."""
    return replace(
        config, device="cpu", model=("tiny",), dtype="fp32", decode_rows=(1, 8), training_rows=(32,), round_s=0.002,
        rounds=3, rotate_mib=1, out=None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operator at one shape of a model."""

    op: str
    part: str
    model: str
    rows: int
    sizes: Sizes

    @property
    def workload(self) -> str:
        """Return the case's name in a row."""
        return " ".join(word for word in (self.op, self.part, self.model, f"{self.rows} rows") if word)


def cases_of(config: OpsConfig) -> Iterator[Case]:
    """Yield the cases of all models, decoding first."""
    for name in config.model:
        model = preset(name)
        for kind, counts in ((_decode_sizes, config.decode_rows), (_training_sizes, config.training_rows)):
            for rows in counts:
                yield from (
                    Case(op=op, part=part, model=name, rows=rows, sizes=sizes)
                    for op, part, sizes in kind(model, rows)
                    if not config.op or op in config.op
                )


def _decode_sizes(m: ModelConfig, rows: int) -> Iterator[tuple[str, str, Sizes]]:
    D, F, V, H = m.hidden_size, m.intermediate_size, m.vocab_size, m.head_dim
    q, kv = m.num_attention_heads * H, m.num_key_value_heads * H
    lead = {"...": (rows,)}
    yield "rms_norm", "", {**lead, "D": D}
    yield "add_rms_norm", "", {**lead, "D": D}
    yield "linear", "qkv", {**lead, "K": D, "N": q + 2 * kv}
    yield "norm_linear", "qkv", {**lead, "K": D, "N": q + 2 * kv}
    yield "linear_residual", "o", {**lead, "K": q, "N": D}
    yield "norm_linear_swiglu", "gate up", {**lead, "K": D, "F": F}
    yield "linear_residual", "down", {**lead, "K": F, "N": D}
    yield "linear", "head", {**lead, "K": D, "N": V}
    for part, N in (("gate up", 2 * F), ("head", V)):
        yield "linear_int8", part, {"M": rows, "K": D, "N": N, "U": 1}
        yield "linear_fp8", part, {"M": rows, "K": D, "N": N, "U": 1}
        yield "linear_int4", part, {"M": rows, "J": D // 2, "N": N, "U": D // 64}
    for bits, columns in ((8, 0), (4, 32)):
        wide, long = ({"K": K, "J": K * bits // 8, "U": K // columns if columns else 1, **lead} for K in (D, F))
        yield "norm_linear_codes", f"qkv int{bits}", {**wide, "N": q + 2 * kv}
        yield "norm_linear_swiglu_codes", f"gate up int{bits}", {**wide, "F": F}
        yield "linear_residual_codes", f"down int{bits}", {**long, "N": D}
    yield "lm_head_argmax", "", {"A": rows, "V": V, "D": D}
    yield "argmax", "", {"A": rows, "V": V}
    yield "sample", "", {"A": rows, "V": V}
    pages = 4096 // 16
    heads = {"A": rows, "T": 1, "H": m.num_attention_heads, "G": m.num_key_value_heads, "D": H}
    yield "attention_decode", "4096 tokens", {**heads, "P": rows * pages, "S": 16, "N": pages}


def _training_sizes(m: ModelConfig, rows: int) -> Iterator[tuple[str, str, Sizes]]:
    D, F, V = m.hidden_size, m.intermediate_size, m.vocab_size
    lead = {"...": (rows,)}
    for op in ("rms_norm", "rms_norm_backward", "add_rms_norm"):
        yield op, "", {**lead, "D": D}
    for op in ("swiglu", "swiglu_backward"):
        yield op, "", {**lead, "F": F}
    heads = {"H": m.num_attention_heads, "G": m.num_key_value_heads, "D": m.head_dim}
    yield "rope", "", {"B": 1, "T": rows, **heads, "P": m.head_dim // 2}
    yield "linear_one_tiling", "gate up", {**lead, "K": D, "N": 2 * F}
    yield "linear_int8", "gate up", {"M": rows, "K": D, "N": 2 * F, "U": 1}
    yield "linear_int4", "gate up", {"M": rows, "J": D // 2, "N": 2 * F, "U": D // 64}
    if rows <= HEAD_ROWS:
        yield "cross_entropy", "", {"N": rows, "V": V}
        yield "linear_cross_entropy_gradients", "", {"N": rows, "V": V, "D": D}


def measure_ops(config: OpsConfig, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Measure every case, write the rows to ``config.out`` if it is given, and return them.

    Raises:
        ConfigError: fewer rows than one, or no case at all.
    """
    found = list(cases_of(config))
    if not found or min(case.rows for case in found) < 1:
        raise ConfigError(
            f"got operators {config.op}, models {config.model}, rows {config.decode_rows} and {config.training_rows}; "
            "need operators with a case, and rows from 1"
        )
    environment = environment_fields(capture_environment(config.device))
    limits, clock = _limits(config), RoundClock(config.device)
    rows = []
    for case in found:
        progress(case.workload)
        row = Row.model_validate(environment | _measure(case, config, limits, clock))
        rows.append(write_row(config.out, row) if config.out else row)
    return rows


def _limits(config: OpsConfig) -> Limits:
    try:
        return read_limits(read_rows(config.limits), read_device_name(config.device))
    except (EvidenceError, OSError):
        return Limits(tflops={}, read_gb_s=None, copy_gb_s=None)


def _measure(case: Case, config: OpsConfig, limits: Limits, clock: RoundClock) -> dict[str, Any]:
    """Return a row's fields; what fails is a row too."""
    row = ops.CONTRACTS[case.op]
    fields: dict[str, Any] = {"target": "ops", "workload": case.workload, "dtype": config.dtype}
    amount, unit, limit = work(row, case.sizes, config.dtype, limits)
    fields |= {"unit": unit, "limit": limit}
    try:
        if writes_much(row, case.sizes, config.dtype) and unit == "TB/s":
            seconds = _copy_seconds(round(1e12 * amount), clock, config)
            fields["figures"] = {"copy_ of as many bytes TB/s": amount / seconds} if seconds else None
        sets = _sets(row, case.sizes, config)
        level = choose(row, sets[0][0]).level
        fields["workload"] += f" ({level})"
        parity = _parity(row, sets[0], TORCH_DTYPES[config.dtype])
        if parity != "pass":
            return fields | {"parity": parity, "status": "precision_mismatch"}
        ours = _seconds(clock, config, [_bound(row, *one) for one in sets])
        others = {
            name: _peer_seconds(case.op, sets, clock, config, compiled=compiled)
            for name, compiled in (("torch eager", False), ("torch.compile", True))
        }
    except torch.OutOfMemoryError:
        return fields | {"parity": "not run", "status": "oom"}
    except (RuntimeError, OperatorError) as error:
        return fields | {"parity": f"not run: {str(error).splitlines()[0][:120]}", "status": "unsupported"}
    if ours is None:
        return fields | {"parity": "pass", "status": "invalid"}
    times = {name: seconds for name, seconds in others.items() if seconds}
    best = min(times, key=lambda name: times[name], default=None)
    fields |= {"parity": "pass", "peer_name": best, "peer": amount / times[best] if best else None}
    peak = PUBLISHED.get(read_device_name(config.device), {}).get("GB/s", math.inf)
    if unit == "TB/s" and amount / ours > peak / 1e3:  # faster than memory can be: it was measured in a cache
        return fields | {"status": "invalid"}
    return fields | {"ours": amount / ours}


def work(row: Contract, sizes: Sizes, dtype: str, limits: Limits) -> tuple[float, str, float | None]:
    """Return what one call does, its unit, and the limit: bytes or FLOPs, whichever takes longer at the limits."""
    terabytes = row.num_bytes(sizes, TORCH_DTYPES[dtype].itemsize) / 1e12
    rate = limits.copy_gb_s if writes_much(row, sizes, dtype) else limits.read_gb_s
    peak, tera = limits.tflops.get(dtype), row.num_flops(sizes) / 1e12
    if peak and rate and tera / peak > terabytes / (rate / 1e3):
        return tera, "TFLOPS", peak
    return terabytes, "TB/s", rate and rate / 1e3


def writes_much(row: Contract, sizes: Sizes, dtype: str) -> bool:
    """Say whether more than a tenth of what is moved is written: it is held against copying, not against reading."""
    item = TORCH_DTYPES[dtype].itemsize
    written = sum(math.prod(r.shape(sizes)) * (r.dtypes[0].itemsize if r.dtypes else item) for r in row.results)
    return written > row.num_bytes(sizes, item) / 10


def _copy_seconds(num_bytes: int, clock: RoundClock, config: OpsConfig) -> float | None:
    """Return the time of ``copy_`` that moves as many bytes, half of them read and half written."""
    size = -(-num_bytes // 1024) * 512  # memory begins at whole lines
    count = min(64, max(1, math.ceil(config.rotate_mib * MIB / num_bytes)))
    buffers = [torch.zeros(size, dtype=torch.uint8, device=config.device) for _ in range(2 * count)]
    pairs = zip(buffers[:count], buffers[count:], strict=True)
    return _seconds(clock, config, [lambda to=to, of=of: to.copy_(of) for to, of in pairs])


def _sets(row: Contract, sizes: Sizes, config: OpsConfig) -> list[tuple[list[Any], tuple[Tensor, ...]]]:
    """Return sets of operands and results, drawn once and copied until they are larger than the caches."""
    values = list(row.example(sizes, TORCH_DTYPES[config.dtype], device=config.device).values())
    shrinks = min(1.0, (64 / sizes.get("K", 2 * sizes.get("J", 32))) ** 0.5)  # the contract's scales are for short rows
    values[: len(row.args)] = [
        v * shrinks if arg.name in ("scale", "minimum") and v is not None else _fresh(v)
        for arg, v in zip(row.args, values, strict=False)
    ]
    if row.name == "attention_decode":
        values[4].fill_(sizes["N"] * sizes["S"] - 1)  # every row sees all of its pages
        values[6] = 0  # splits that follow the load, as an engine's
    needs = row.outcome(values)
    num_bytes = sum(v.nbytes for v in values if isinstance(v, Tensor))
    count = min(64, max(1, math.ceil(config.rotate_mib * MIB / max(1, num_bytes))))
    every = [values, *([_fresh(v) for v in values] for _ in range(count - 1))]
    return [(each, tuple(torch.empty(s, dtype=d, device=config.device) for s, d in needs)) for each in every]


def _fresh(value: Any) -> Any:  # noqa: ANN401 - any operand
    return value.clone() if isinstance(value, Tensor) else value


def _wide(value: Any) -> Any:  # noqa: ANN401 - any operand
    """Return a float operand in fp32: what a result rounded once is held against."""
    if isinstance(value, list):
        return [_wide(v) for v in value]
    return value.float() if isinstance(value, Tensor) and value.dtype in FLOATS else value


def _bound(row: Contract, values: list[Any], outs: tuple[Tensor, ...]) -> Action:
    operator = ops.OPERATORS[row.name]
    return lambda: operator(*values, out=outs)


def _parity(row: Contract, one: tuple[list[Any], tuple[Tensor, ...]], dtype: torch.dtype) -> str:
    """Return "pass", or how far a result is from the reference's."""
    values, outs = one
    _bound(row, values, outs)()
    chosen = any(d and not d[0].is_floating_point for d in (r.dtypes for r in row.results))  # of rounded numbers
    with ops.use("reference", row.name):
        wants = ops.OPERATORS[row.name](*(values if chosen else [_wide(v) for v in values]))
    tolerance = row.forward[dtype]
    for result, got, want in zip(row.results, outs, wants if isinstance(wants, tuple) else (wants,), strict=True):
        excess = (got.float() - want.float()).abs() - tolerance.rtol * want.float().abs()
        if not float(excess.max()) <= tolerance.atol:
            return f"{result.name} is {float(excess.max()):.1e} beyond rtol; at most {tolerance.atol:.0e}"
    return "pass"


def _seconds(clock: RoundClock, config: OpsConfig, actions: list[Action]) -> float | None:
    """Return the median time of one call, all of them captured in a graph on a GPU; None: the clocks disagree."""
    turns = max(1, CALLS // len(actions)) if clock.device.type == "cuda" else 1

    def every() -> None:
        for _, action in itertools.product(range(turns), actions):
            action()

    replay = _captured(every, actions) if clock.device.type == "cuda" else every
    repetitions = clock.calibrate((replay,), config.round_s)
    rounds = [clock.time(replay, repetitions) for _ in range(config.rounds)]
    usable = [each for each in rounds if each.usable(0.0, 0.02 if clock.device.type == "cuda" else math.inf)]
    if len(usable) < 0.8 * len(rounds):
        return None
    return median(each.host_s / each.repetitions for each in usable) / (turns * len(actions))


def _peer_seconds(
    op: str, sets: list[tuple[list[Any], tuple[Tensor, ...]]], clock: RoundClock, config: OpsConfig, *, compiled: bool
) -> float | None:
    """Return a peer's time, or None where torch's form cannot be captured; a CPU is not asked to compile."""
    if compiled and clock.device.type == "cpu":
        return None
    try:
        return _seconds(clock, config, [peer(op, values, compiled=compiled) for values, _ in sets])
    except RuntimeError:
        return None


def _captured(every: Action, actions: list[Action]) -> Action:
    """Return the replay of a graph of all calls, each made twice before: once compiles, once more finds its memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _, action in itertools.product(range(2), actions):
            action()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    return graph.replay
