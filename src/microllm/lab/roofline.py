"""What this device can do at most, measured: matrix products by dtype and size, reading and copying memory.

Place: ``microllm bench roofline``; its rows are the ``limit`` of every other benchmark (``read_limits``). A product is
compared with fp64 on sampled rows before it is timed; a rate above the card's published peak makes its row invalid.
Operands rotate through buffers larger than the caches. Launches are plain: below about 1,000 a GPU's small products
show the launch, not the device, and that is what their rows say.

Sources: NVIDIA H100/H200 data sheets (dense peaks).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from microllm.errors import EvidenceError, UnavailableError
from microllm.evidence.environment import PUBLISHED, capture_environment
from microllm.evidence.rows import Row, RowStatus, environment_fields, latest_rows, write_row
from microllm.evidence.timing import Action, RoundClock

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
MIB = 1 << 20
TORCH_DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 1e-2, "int8": 0.0}
"""Largest relative L2 error against fp64 of the rounded operands (bf16 and fp8 write bf16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConfig:
    """What is measured, and how long.

    Units:   ``round_s`` in seconds, ``memory_mib`` the sizes of the buffers that are read and copied
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = DTYPES
    sizes: tuple[int, ...] = SIZES
    memory_mib: tuple[int, ...] = (64, 256, 1024)
    round_s: float = 0.1
    rounds: int = 5
    out: Path | None = Path("lab/rows/roofline.jsonl")


def short(config: RooflineConfig) -> RooflineConfig:
    """Return the form that takes seconds on a CPU; it is no record, so that no limit is ever read from it."""
    return replace(config, sizes=(128, 512), memory_mib=(64,), round_s=0.02, rounds=3, out=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The highest rates that were measured on a device.

    Units:   ``tflops`` by dtype; GB/s = 1e9 bytes a second, a copy counts its bytes twice
    """

    tflops: dict[str, float]
    read_gb_s: float | None
    copy_gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing to measure: ``prepare`` returns the call to be timed and "pass", or why its result is wrong.

    Units:   ``amount`` of ``unit``-seconds that one call does
    """

    workload: str
    dtype: str
    unit: str
    amount: float
    prepare: Callable[[], tuple[Action, str]]


def measure_roofline(config: RooflineConfig) -> list[Row]:
    """Measure every product and rate, write the rows to ``config.out`` if it is given, and return them."""
    environment = capture_environment(config.device)
    peaks = PUBLISHED.get(environment.device_name, {})
    clock = RoundClock(config.device)
    rows = []
    for probe in (*_gemm_probes(config), *_memory_probes(config)):
        rate, status, parity = _measure(clock, probe, config)
        row = Row.model_validate({
            **environment_fields(environment), "target": "roofline", "workload": probe.workload, "dtype": probe.dtype,
            "unit": probe.unit, "ours": rate, "limit": peaks.get(probe.dtype if probe.unit == "TFLOPS" else probe.unit),
            "parity": parity, "status": status,
        })  # fmt: skip
        rows.append(write_row(config.out, row) if config.out else row)
    return rows


def read_limits(rows: Iterable[Row], device_name: str) -> Limits:
    """Return the limits that the latest roofline rows of ``device_name`` give; rows that did not pass do not count.

    Raises:
        EvidenceError: there is no such row.
    """
    best: dict[str, float] = {}
    for row in latest_rows(rows):
        if row.target == "roofline" and row.status == "pass" and row.device == device_name and row.ours:
            key = row.dtype if row.unit == "TFLOPS" else row.workload.split()[0]
            best[key] = max(best.get(key, 0.0), row.ours)
    if not best:
        raise EvidenceError(f"got no roofline row of {device_name!r}; need its limits; run: microllm bench roofline")
    tflops = {dtype: best[dtype] for dtype in DTYPES if dtype in best}
    return Limits(tflops=tflops, read_gb_s=best.get("read"), copy_gb_s=best.get("copy"))


def _measure(clock: RoundClock, probe: Probe, config: RooflineConfig) -> tuple[float | None, RowStatus, str]:
    """Return rate, status and parity; a failure is a row, not an exception."""
    try:
        with _exact_fp32(allow_tf32=probe.dtype == "tf32"):
            action, parity = probe.prepare()
            if parity != "pass":
                return None, "precision_mismatch", parity
            repetitions = clock.calibrate((action,), config.round_s)
            rounds = [clock.time(action, repetitions) for _ in range(config.rounds)]
    except torch.OutOfMemoryError:
        return None, "oom", "not run"
    except (RuntimeError, ValueError) as error:
        return None, "unsupported", f"not run: {str(error).splitlines()[0][:100]}"
    usable = [each for each in rounds if each.usable(0.0, 0.005)]
    if len(usable) < 0.8 * len(rounds):
        return None, "invalid", "pass"
    return probe.amount / median(each.host_s / each.repetitions for each in usable), "pass", "pass"


@contextlib.contextmanager
def _exact_fp32(*, allow_tf32: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allow_tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _rotation(make: Callable[[], tuple[Tensor, ...]], device: str) -> list[tuple[Tensor, ...]]:
    """Return sets of operands that together are larger than the device's caches."""
    target = 256 * MIB if torch.device(device).type == "cuda" else 48 * MIB
    first = make()
    num_bytes = sum(tensor.nbytes for tensor in first)
    return [first, *(make() for _ in range(math.ceil(target / num_bytes) - 1))]


def _gemm_probes(config: RooflineConfig) -> Iterator[Probe]:
    for dtype, size in itertools.product(config.dtypes, config.sizes):
        yield Probe(
            workload=f"gemm {size}", dtype=dtype, unit="TFLOPS", amount=2.0 * size**3 / 1e12,
            prepare=functools.partial(_prepare_gemm, size, dtype, config.device),
        )  # fmt: skip


def _prepare_gemm(size: int, dtype: str, device: str) -> tuple[Action, str]:
    if dtype == "tf32" and torch.device(device).type != "cuda":
        raise UnavailableError(f"got device {device!r}; TF32 is a GPU's")
    generator = torch.Generator(device).manual_seed(size)

    def make() -> tuple[Tensor, Tensor]:
        normal = torch.randn(2, size, size, generator=generator, device=device)
        operands = (normal * 30).round().clamp(-127, 127) if dtype == "int8" else normal
        a, b = operands.to(TORCH_DTYPES[dtype])
        return a, b.t()  # the second operand column by column, as a linear layer stores its weight

    sets = _rotation(make, device)
    multiply = _multiply(dtype, device)
    a, b = sets[0]
    expected = a[:4].double() @ b.double()
    error = ((multiply(a, b)[:4].double() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE[dtype]:
        return (lambda: None), f"relative error {error:.1e}; at most {TOLERANCE[dtype]:.0e}"
    turn = itertools.cycle(sets)
    return (lambda: multiply(*next(turn))), "pass"


def _multiply(dtype: str, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    if dtype == "int8":
        return torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    if dtype == "fp8":
        multiply, one = torch._scaled_mm, torch.ones((), device=device)  # pyright: ignore[reportPrivateImportUsage]
        return lambda a, b: multiply(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return torch.mm


def _memory_probes(config: RooflineConfig) -> Iterator[Probe]:
    kinds = (("read", "sum", "fp32", 1, _sum), ("read", "mv", "bf16", 1, _mv), ("copy", "copy", "fp32", 2, _copy))
    for (kind, how, dtype, passes, prepare), mib in itertools.product(kinds, config.memory_mib):
        yield Probe(
            workload=f"{kind} {mib} MiB ({how})", dtype=dtype, unit="GB/s", amount=passes * mib * MIB / 1e9,
            prepare=functools.partial(prepare, _buffers(mib * MIB, dtype, config.device)),
        )  # fmt: skip


COLUMNS = 4096
Buffers = Callable[[], list[Tensor]]


def _buffers(num_bytes: int, dtype: str, device: str) -> Buffers:
    kind = TORCH_DTYPES[dtype]
    shape = (num_bytes // kind.itemsize // COLUMNS, COLUMNS)
    return lambda: [source for (source,) in _rotation(lambda: (torch.rand(shape, device=device).to(kind),), device)]


def _sum(buffers: Buffers) -> tuple[Action, str]:
    sources = buffers()
    found, expected = sources[0].sum().double(), sources[0].sum(dtype=torch.float64)
    turn, target = itertools.cycle(sources), torch.empty((), device=sources[0].device)
    return (lambda: torch.sum(next(turn), dim=(0, 1), out=target)), _close(found, expected)


def _mv(buffers: Buffers) -> tuple[Action, str]:
    sources = buffers()
    vector = torch.rand(COLUMNS, device=sources[0].device).to(sources[0].dtype)
    target = torch.empty(len(sources[0]), dtype=vector.dtype, device=vector.device)
    found, expected = torch.mv(sources[0], vector)[:64].double(), sources[0][:64].double() @ vector.double()
    turn = itertools.cycle(sources)
    return (lambda: torch.mv(next(turn), vector, out=target)), _close(found, expected)


def _copy(buffers: Buffers) -> tuple[Action, str]:
    sources = buffers()
    target = torch.empty_like(sources[0]).copy_(sources[0])
    turn = itertools.cycle(sources)
    return (lambda: target.copy_(next(turn))), "pass" if torch.equal(target, sources[0]) else "the copy differs"


def _close(found: Tensor, expected: Tensor) -> str:
    error = ((found - expected).norm() / expected.norm()).item()
    return "pass" if error <= 1e-2 else f"relative error {error:.1e}; at most 1e-2"
