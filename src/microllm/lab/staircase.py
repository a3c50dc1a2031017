"""The staircase: every experiment of a track in order, what was kept, and the running best with its interval.

Place: ``lab render`` draws one picture for each track and fills the marked tables of README and docs; with ``check``
it only says what is out of date. Verdicts are computed from the raw records; measures nothing.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from microllm.errors import EvidenceError, MissingExtraError
from microllm.evidence.calibration import parse_calibration
from microllm.evidence.journal import canonical_json, read_lines, sha256_hex, write_atomic
from microllm.evidence.rows import QUALITY_FILE, fill_tables, markdown_table, read_rows, rows_table
from microllm.evidence.statistics import geometric_mean
from microllm.evidence.verdict import Verdict
from microllm.lab.contract import Contract, Track, read_contract
from microllm.lab.experiment import check_root, experiment_directories
from microllm.lab.judgement import recompute
from microllm.lab.quality import parse_quality_row, quality_table
from microllm.lab.record import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderConfig:
    """Where the records lie, which documents hold marked tables (files or folders), and whether only to check."""

    root: Path = Path("lab")
    """Where the records lie."""
    documents: tuple[str, ...] = ("README.md", "docs")
    """Files, or folders of files, that hold marked tables."""
    check: bool = False
    """Write nothing; fail where a picture or table is not current."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One experiment on its track's staircase.

    Units:   speeds relative to the track's peers (or to its start, 1.0, if it has none); None where none was measured
    """

    id: str
    status: str
    counts: bool
    speed: float | None
    low: float | None
    high: float | None
    best: float
    best_low: float
    best_high: float


def track_points(experiments: Iterable[tuple[Contract, Verdict, float]]) -> list[Point]:
    """Return the points of one track's experiments in order; each comes with its score if it is a baseline.

    The running best is the start times every confirmed keep; logs of the intervals add in quadrature.
    """
    best, half, points = 1.0, 0.0, []
    for contract, verdict, score in experiments:
        speed = low = high = None
        counts = verdict.confirmed
        if verdict.status == "baseline":
            best, half, counts = score, 0.0, True
            speed = low = high = best
        elif verdict.effect is not None and verdict.lower is not None and verdict.upper is not None:
            speed, low, high = (best * math.exp(d) for d in (verdict.effect, verdict.lower, verdict.upper))
            if counts:
                best, half = speed, math.hypot(half, (verdict.upper - verdict.lower) / 2)
        points.append(Point(
            id=contract.id, status=verdict.status, counts=counts, speed=speed, low=low, high=high,
            best=best, best_low=best * math.exp(-half), best_high=best * math.exp(half),
        ))  # fmt: skip
    return points


def read_tracks(root: Path) -> dict[str, tuple[Track, list[Point]]]:
    """Return each track's points, by the track's key."""
    grouped: dict[str, list[tuple[Contract, Verdict, float]]] = {}
    for contract, verdict, score in _history(root):
        grouped.setdefault(contract.track.key, []).append((contract, verdict, score))
    return {key: (found[0][0].track, track_points(found)) for key, found in grouped.items()}


def _history(root: Path) -> Iterator[tuple[Contract, Verdict, float]]:
    """Yield contract, verdict and (of a baseline) score of every experiment that was run, in order."""
    for directory in experiment_directories(root):
        records = Records(directory)
        if records.receipts_path.exists():
            ratios = [ratio for receipt in records.receipts("baseline") for ratio in receipt.body["ratios"].values()]
            yield read_contract(directory), recompute(directory).verdict, geometric_mean(ratios) if ratios else 1.0


def draw_staircase(track: Track, points: Sequence[Point]) -> bytes:
    """Return the picture of one track as a PNG whose metadata holds the digest of what it shows.

    Raises:
        MissingExtraError: matplotlib is absent.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "the staircase") from error
    figure = figure_module.Figure(figsize=(max(8.0, 4.0 + 0.5 * len(points)), 5.0), layout="constrained")
    axes = figure.add_subplot()
    edges = [number - 0.5 for number in range(1, len(points) + 2)]
    low, best, high = ([getattr(p, name) for p in points] for name in ("best_low", "best", "best_high"))
    axes.fill_between(edges, [*low, low[-1]], [*high, high[-1]], step="post", color="tab:green", alpha=0.15, lw=0)
    axes.step(edges, [*best, best[-1]], where="post", color="tab:green", lw=1.8, label="running best")
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    for label, color, marker, filled, chosen in _STYLES:
        shown = [(n, p) for n, p in enumerate(points, 1) if chosen(p)]
        look: dict[str, Any] = {"color": color, "marker": marker, "markerfacecolor": color if filled else "white"}
        bars = [(n, p.speed, p.speed - p.low, p.high - p.speed) for n, p in shown if p.speed and p.low and p.high]
        if bars:
            x, y, below, above = zip(*bars, strict=True)
            axes.errorbar(x, y, yerr=(below, above), linestyle="none", capsize=3, label=label, **look)
        if bare := [n for n, p in shown if p.speed is None]:
            look |= {"transform": axes.get_xaxis_transform(), "label": f"{label}: no figure"}
            axes.plot(bare, [0.03] * len(bare), linestyle="none", **look)
    for number, point in enumerate(points, 1):
        if point.counts and point.high:
            place = {"textcoords": "offset points", "xytext": (0, 5), "ha": "center", "fontsize": 8}
            axes.annotate(point.id[4:], (number, point.high), **place)
    axes.set_xticks(range(1, len(points) + 1), [point.id[:3] for point in points])
    axes.set_xlim(0.5, len(points) + 0.5)
    axes.margins(y=0.25)
    against = ", ".join(f"{name} {version}" for name, version in track.peers.items()) or "the track's start"
    axes.set_xlabel("experiment")
    axes.set_ylabel(f"speed / {against} (higher is better)")
    axes.set_title(f"{track.device_name}, {track.dtype}: {', '.join(track.models or track.workloads)}", fontsize=10)
    figure.legend(fontsize=8, loc="outside right upper")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None, "Description": _digest(track, points)})
    return buffer.getvalue()


_STYLES: tuple[tuple[str, str, str, bool, Callable[[Point], bool]], ...] = (
    ("kept, confirmed", "tab:green", "o", True, lambda p: p.counts and p.status == "keep"),
    ("start of the track", "tab:green", "s", True, lambda p: p.status == "baseline"),
    ("kept once", "tab:green", "o", False, lambda p: not p.counts and p.status == "keep"),
    ("discarded", "0.6", "o", True, lambda p: p.status == "discard"),
    ("inconclusive", "0.6", "o", False, lambda p: p.status == "inconclusive"),
    ("crash or invalid", "0.6", "x", True, lambda p: p.status in ("crash", "invalid")),
)
"""What each verdict looks like: label, colour, marker, filled."""


def make_tables(root: Path) -> dict[str, str]:
    """Return every table that a document may mark: ``experiments``, ``calibrations``, and each rows file's stem.

    ``laptop`` and ``quality`` are there before their files are.
    """
    quality = root / "rows" / QUALITY_FILE
    files = {*(root / "rows").glob("*.jsonl"), root / "rows" / "laptop.jsonl"} - {quality}
    tables = {path.stem: rows_table(read_rows(path)) for path in sorted(files)}
    tables["quality"] = quality_table([parse_quality_row(line) for line in read_lines(quality)])
    experiments, calibrations = [], []
    for contract, v, _ in _history(root):
        effect = "—" if v.effect is None else f"{v.effect:+.2%}"
        bounds = "—" if v.lower is None or v.upper is None else f"{v.lower:+.2%} … {v.upper:+.2%}"
        where = f"{contract.track.device_name}, {contract.track.dtype}"
        counts = "yes" if v.confirmed or v.status == "baseline" else "no"
        experiments.append((contract.id, where, v.status, effect, bounds, str(v.num_processes), counts))
    for line in read_lines(root / "calibrations.jsonl"):
        c = parse_calibration(line)
        kept, planted = f"{c.num_kept} of {len(c.medians)}", f"{c.num_found} of {c.num_planted}"
        calibrations.append((c.device_name, f"{c.process_sd:.3%}", kept, planted, c.environment["torch"], c.date[:10]))
    columns = ("experiment", "track", "verdict", "effect", "97.5 % bounds", "processes", "counts")
    tables["experiments"] = markdown_table(columns, experiments)
    columns = ("device", "process SD", "A/A kept", "planted 1 % found", "torch", "date")
    tables["calibrations"] = markdown_table(columns, calibrations)
    return tables


def render(config: RenderConfig) -> list[Path]:
    """Bring pictures and tables up to date and return the files that were not; with ``check`` change nothing.

    Raises:
        EvidenceError: a document marks a table that there is not, or there are no records.
    """
    check_root(config.root)
    stale = []
    for key, (track, points) in read_tracks(config.root).items():
        path = config.root / f"staircase-{key}.png"
        if not path.exists() or _digest(track, points).encode() not in path.read_bytes():
            stale.append(path)
            if not config.check:
                write_atomic(path, draw_staircase(track, points))
    tables = make_tables(config.root)
    for document in config.documents:
        place = config.root.parent / document
        for path in sorted(place.rglob("*.md")) if place.is_dir() else [place] * place.exists():
            text = path.read_text(encoding="utf-8")
            try:
                filled = fill_tables(text, tables)
            except EvidenceError as error:
                raise EvidenceError(f"{path}: {error}") from error
            if filled != text:
                stale.append(path)
                if not config.check:
                    write_atomic(path, filled)
    return stale


def _digest(track: Track, points: Sequence[Point]) -> str:
    return sha256_hex(canonical_json([track.model_dump(mode="json"), [asdict(point) for point in points]]))
