"""``microllm bench``: measurements that end as rows, each with the conditions it was taken under."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.lab.bench import BenchConfig, Workload
from microllm.lab.bench_attach import AttachBench
from microllm.lab.bench_engine import EngineBenchConfig
from microllm.lab.bench_matrix import MatrixConfig
from microllm.lab.bench_ops import OpsConfig
from microllm.lab.bench_serve import ServeBenchConfig
from microllm.lab.bench_train_config import BenchTrainConfig
from microllm.lab.quality import QualityConfig
from microllm.lab.roofline import RooflineConfig
from microllm.lab.startup import StartupConfig

if TYPE_CHECKING:
    from microllm.evidence.rows import Row

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print each row as one JSON line instead of text.")]
Out = Annotated[Path | None, tyro.conf.arg(help="Append the rows to this JSONL file.")]
Repeated = tyro.conf.UseAppendAction  # --peer llama.cpp --peer transformers


@dataclass(frozen=True, kw_only=True)
class BenchDecode:
    """Tokens a second of greedy decoding, beside other engines on the same file, threads and tokens."""

    config: Repeated[BenchConfig] = field(default_factory=BenchConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print every arm, then every comparison."""
        return _run_bench("decode", self.config, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class BenchPrefill:
    """Tokens a second of a prompt up to its first token, beside other engines on the same file, threads and tokens."""

    config: Repeated[BenchConfig] = field(default_factory=BenchConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print every arm, then every comparison."""
        return _run_bench("prefill", self.config, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class BenchStartup:
    """Time from process start to the first token, and the peak memory of the process, beside other engines."""

    config: Repeated[StartupConfig] = field(default_factory=StartupConfig)
    out: Out = None
    as_json: Json = False

    def run(self) -> int:
        """Print the medians."""
        from microllm.evidence.rows import write_row
        from microllm.lab.startup import measure_startup

        found = measure_startup(self.config, _progress)
        if self.out is not None:
            for row in found.rows:
                write_row(self.out, row)
        if self.as_json:
            _show(found.rows, as_json=True)
        else:
            print(found.describe())
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchQuality:
    """Does a precision choose what fp32 chooses on real text? Exit 1 if not."""

    config: Repeated[QualityConfig] = field(default_factory=QualityConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print the receipts."""
        from microllm.lab.quality import measure_quality, quality_table

        rows = measure_quality(self.config, _progress)
        print("\n".join(row.model_dump_json() for row in rows) if self.as_json else quality_table(rows), flush=True)
        return 0 if all(row.passed for row in rows) else 1


@dataclass(frozen=True, kw_only=True)
class BenchRoofline:
    """Measure what the device can do: matrix products by dtype and size, copy and read rates. Limits come from here."""

    config: RooflineConfig = field(default_factory=RooflineConfig)
    quick: bool = False
    """A few sizes and short rounds, for a first look: printed, not recorded."""
    as_json: Json = False

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.roofline import measure_roofline, short

        _show(measure_roofline(short(self.config) if self.quick else self.config), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchOps:
    """Time each operator at the shapes of real models, in a captured graph, beside torch eager and torch.compile."""

    config: OpsConfig = field(default_factory=OpsConfig)
    quick: bool = False
    """A tiny model's shapes on the CPU, for a first look: printed, not recorded."""
    as_json: Json = False

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.bench_ops import measure_ops, short

        _show(measure_ops(short(self.config) if self.quick else self.config, _progress), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """Time the engine on a GPU at a preset's shape, beside transformers with a static cache and torch.compile."""

    config: EngineBenchConfig = field(default_factory=EngineBenchConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.bench_engine import measure_engine

        _show(list(measure_engine(self.config, _progress)), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchMatrix:
    """Time the engine over models, prompt lengths, batches and answer lengths: a row a cell, failed ones too."""

    config: MatrixConfig = field(default_factory=MatrixConfig)
    quick: bool = False
    """A tiny model on the CPU, for a first look."""
    as_json: Json = False

    def run(self) -> int:
        """Print the rows; 130 after Ctrl-C, with those that were there."""
        from microllm.lab.bench_matrix import matrix_table, measure_matrix, short

        rows: list[Row] = []
        status = 0
        try:
            for row in measure_matrix(short(self.config) if self.quick else self.config, _progress):
                rows.append(row)
        except KeyboardInterrupt:
            status = 130
        if self.as_json:
            _show(rows, as_json=True)
        else:
            print(matrix_table(rows))
        return status


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Tokens a second and peak memory of training steps, beside transformers with torch's fused AdamW."""

    config: BenchTrainConfig = field(default_factory=BenchTrainConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.bench_train import measure_train

        _show(measure_train(self.config, _progress), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchServe:
    """A server under load, over HTTP, beside its engine alone: tokens a second, times, errors."""

    config: ServeBenchConfig = field(default_factory=ServeBenchConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print every run; 1 when one had errors or other answers than the engine alone."""
        from dataclasses import asdict

        from microllm.lab.bench_serve import measure_serving, serving_table

        runs = measure_serving(self.config, _progress)
        print("\n".join(json.dumps(asdict(run)) for run in runs) if self.as_json else serving_table(runs), flush=True)
        return 0 if all(run.parity == "pass" for run in runs) else 1


@dataclass(frozen=True, kw_only=True)
class BenchAttach:
    """Time a loop over an attached transformers model beside the bare loop and transformers' own generation."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    precision: str = "bf16"
    """The host's own: bf16 or fp32."""
    config: Repeated[AttachBench] = field(default_factory=AttachBench)
    as_json: Json = False

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.attach_model import bench_model

        found = bench_model(
            self.model, self.config, device=self.device, precision=self.precision, progress=_progress
        )  # fmt: skip
        _show(found.rows, as_json=self.as_json)
        return 0


def _run_bench(workload: Workload, config: BenchConfig, *, as_json: bool) -> int:
    from microllm.lab.bench import measure_bench

    found = measure_bench(workload, config, _progress)
    if as_json:
        _show(found.rows, as_json=True)
    else:
        print(found.table())
        for pair in found.pairs:
            print(pair.describe())
    return 0


def _progress(text: str) -> None:
    """Show one line at a time on a terminal, and nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)


def _show(rows: Sequence[Row], *, as_json: bool) -> None:
    from microllm.evidence.rows import rows_table

    if as_json:
        for row in rows:
            print(row.model_dump_json())
    else:
        print(rows_table(rows))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure, and say under which conditions."""

    benchmark: (
        Annotated[BenchDecode, tyro.conf.subcommand("decode")]
        | Annotated[BenchPrefill, tyro.conf.subcommand("prefill")]
        | Annotated[BenchStartup, tyro.conf.subcommand("startup")]
        | Annotated[BenchQuality, tyro.conf.subcommand("quality")]
        | Annotated[BenchRoofline, tyro.conf.subcommand("roofline")]
        | Annotated[BenchOps, tyro.conf.subcommand("ops")]
        | Annotated[BenchEngine, tyro.conf.subcommand("engine")]
        | Annotated[BenchMatrix, tyro.conf.subcommand("matrix")]
        | Annotated[BenchTrain, tyro.conf.subcommand("train")]
        | Annotated[BenchServe, tyro.conf.subcommand("serve")]
        | Annotated[BenchAttach, tyro.conf.subcommand("attach")]
    )

    def run(self) -> int:
        """Run the chosen benchmark."""
        return self.benchmark.run()
