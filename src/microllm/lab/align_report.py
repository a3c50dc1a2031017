"""What an alignment found: the data, one line of verdict, a Markdown page and a picture of the error by layer.

Place: ``align`` fills it and writes it; the command prints ``verdict`` and exits by ``passed``. Measures nothing.
The picture needs the extra [plot].
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Literal

from microllm.errors import MissingExtraError
from microllm.evidence.compare import Fault, SiteComparison, TraceComparison
from microllm.evidence.environment import Environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.logits import LogitsComparison, TokenSplit
from microllm.evidence.tensor_statistics import Record
from microllm.evidence.trace import ROOT, site_matcher

Dtype = Literal["fp32", "bf16"]
Mode = Literal["free", "teacher"]
_DRAWN = site_matcher(("embed_tokens", "layers.*", "norm", ROOT))
_FLOOR = 1e-9  # smallest error drawn
_MODES = {"free": "free run", "teacher": "blocks fed the reference's input"}


class Stage(Record):
    """One step of the work: what it was, how long it took, and how it ended."""

    name: str
    status: Literal["done", "error"]
    seconds: float
    error: str = ""


class AlignRun(Record):
    """One comparison of every site and the logits; in bf16 the limits come from the reference's own bf16 error."""

    dtype: Dtype
    mode: Mode
    comparison: TraceComparison
    logits: LogitsComparison
    logits_gate: float | None

    @property
    def passed(self) -> bool:
        """Whether every site, the logits and (in bf16) every choice of token are within their limits."""
        return self.comparison.passed and not self.complaints

    @property
    def complaints(self) -> list[str]:
        """Return what is wrong beyond the sites, in words."""
        worst, found = self.logits.error.max_abs, []
        if self.logits_gate is not None and not worst <= self.logits_gate:
            found.append(f"{self.dtype} logits max |Δ| {worst:.1e} (gate {self.logits_gate:.0e})")
        if self.dtype == "bf16" and self.logits.num_refused:
            found.append(f"bf16 top-1 differs at {self.logits.num_refused} positions where fp32 is decided")
        return found

    @property
    def share_of_limit(self) -> float:
        """Return the largest error of a site as a share of its limit."""
        pairs = ((row.error, row.relative_l2_limit) for row in self.comparison.rows)
        return max((error.row_relative_l2 / limit for error, limit in pairs if error is not None), default=0.0)


class GreedyCheck(Record):
    """Greedy tokens of both models from the same prompt; fp32 must be equal (ε = 0)."""

    dtype: Dtype
    tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    epsilon: float
    splits: tuple[TokenSplit, ...]

    @property
    def passed(self) -> bool:
        """Whether the tokens are equal, up to a split where the reference was nearly undecided."""
        return all(split.accepted for split in self.splits)

    def __str__(self) -> str:
        """Say how many tokens are equal, and where they part."""
        equal = self.splits[0].position if self.splits else len(self.reference_tokens)
        text = f"{equal}/{len(self.reference_tokens)} equal"
        for split in self.splits:
            end = "accepted" if split.accepted else "refused"
            text += f" (then a split at margin {split.margin:.3f}, ε {self.epsilon:g}: {end})"
        return text


class AlignReport(Record):
    """Everything that one alignment measured, and on what."""

    schema_version: Literal[1] = 1
    passed: bool
    verdict: str
    model: str
    reference: str
    attention: str
    num_layers: int
    tokens: tuple[int, ...]
    device: str
    perturbed: str
    fault: Fault | None
    runs: tuple[AlignRun, ...]
    greedy: tuple[GreedyCheck, ...]
    stages: tuple[Stage, ...]
    environment: Environment


def find_fault(runs: tuple[AlignRun, ...]) -> Fault | None:
    """Return the first site at fault; a teacher-forced run is asked first, for there errors do not pile up."""
    ordered = sorted(runs, key=lambda run: run.mode != "teacher")
    return next((run.comparison.fault for run in ordered if run.comparison.fault is not None), None)


def write_verdict(
    runs: tuple[AlignRun, ...], greedy: tuple[GreedyCheck, ...], num_layers: int, reference: str
) -> tuple[bool, str]:
    """Return whether all passed, and the line that says so or names the first fault."""
    if all(run.passed for run in runs) and all(check.passed for check in greedy):
        parts = []
        for dtype in dict.fromkeys(run.dtype for run in runs):
            mine = [run for run in runs if run.dtype == dtype]
            worst = max(run.logits.error.max_abs for run in mine)
            text = f"{dtype} logits max |Δ| {worst:.1e}"
            if mine[0].logits_gate is not None:
                text += f" (gate {mine[0].logits_gate:.0e})"
            else:
                text += f" (worst site at {max(run.share_of_limit for run in mine):.0%} of its limit)"
            text += "".join(f", greedy {check}" for check in greedy if check.dtype == dtype)
            parts.append(text)
        return True, f"align: pass — {num_layers} layers; {'; '.join(parts)}; against {reference}"
    found = [fault.description] if (fault := find_fault(runs)) else []
    found += [text for run in runs for text in run.complaints]
    found += [f"{check.dtype} greedy tokens {check}" for check in greedy if not check.passed]
    counts = [f"{run.dtype} {run.mode}: {run.comparison.counts()}" for run in runs if not run.comparison.passed]
    return False, f"align: FAIL — {'; '.join(dict.fromkeys(found or counts))}; against {reference}"


def write_report(report: AlignReport, directory: Path) -> None:
    """Write ``report.json`` and ``report.md`` into ``directory``."""
    write_atomic(directory / "report.json", report.model_dump_json(indent=1) + "\n")
    write_atomic(directory / "report.md", render_markdown(report))


def render_markdown(report: AlignReport) -> str:
    """Return the report as a page: verdict, conditions, and for each run every layer and site."""
    environment = report.environment
    lines = [
        f"# {report.model}: {'pass' if report.passed else 'FAIL'}",
        "",
        report.verdict,
        "",
        f"{len(report.tokens)} tokens, {report.device} ({environment.device_name}), torch {environment.torch}, "
        f"reference: {report.reference}, {report.attention} attention. Commit {environment.commit[:12]}"
        f"{' with changes' if environment.dirty else ''}.",
    ]
    if report.perturbed:
        lines += ["", f"Perturbed on purpose: {report.perturbed}."]
    for check in report.greedy:
        lines += ["", f"Greedy tokens, {check.dtype}: {check}."]
    for run in report.runs:
        lines += ["", *_run_section(run)]
    lines += ["", "## Stages", "", "| stage | status | seconds |", "|---|---|--:|"]
    lines += [f"| {stage.name} | {stage.status} | {stage.seconds:.1f} |" for stage in report.stages]
    return "\n".join(lines) + "\n"


def _run_section(run: AlignRun) -> list[str]:
    """Return one run's tables: a row a layer, a column a site; bold cells are past their limit."""
    logits, statuses = run.logits, ", ".join(f"{n} {name}" for name, n in run.comparison.counts().items())
    cells: dict[str, dict[str, str]] = {}
    for row in (row for row in run.comparison.rows if row.kind == "output"):
        parts = row.site.split(".")
        layer, site = (".".join(parts[:2]), ".".join(parts[2:]) or "whole") if len(parts) > 1 else ("", row.site)
        cells.setdefault(layer, {})[site] = _cell(row)
    bad = [row for row in run.comparison.rows if row.status != "pass"]
    limit = ", and its limit" if run.comparison.mode == "triple" else ""
    lines = [
        f"## {run.dtype}, {_MODES[run.mode]}: {'pass' if run.passed else 'FAIL'}",
        "",
        f"Tensors: {statuses}. Logits: max |Δ| {logits.error.max_abs:.2e}, top-1 agreement "
        f"{logits.top1_agreement:.4f} over {logits.num_positions} positions, KL at most {logits.max_kl:.1e}.",
        "",
        f"Relative L2 error of each output, mean over tokens{limit}; past the limit in bold:",
    ]
    for group in (dict(item for item in cells.items() if item[0]), {"ends": cells.get("", {})}):
        columns = list(dict.fromkeys(site for sites in group.values() for site in sites))
        lines += ["", f"| layer | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
        lines += [f"| {name} | {' | '.join(v.get(c, '') for c in columns)} |" for name, v in group.items()]
    lines += ["", *(f"* {row.kind} of {row.site}: {row.status}, {row.detail}" for row in bad[:20])] if bad else []
    lines += ["", *(_split_line(split) for split in logits.splits)] if logits.splits else []
    return lines


def _cell(row: SiteComparison) -> str:
    if row.error is None:
        return f"**{row.status}**"
    text = f"{row.error.row_relative_l2:.1e}"
    if row.reference_error is not None:
        text += f" ≤ {row.relative_l2_limit:.1e}"
    return text if row.status == "pass" else f"**{text}**"


def _split_line(split: TokenSplit) -> str:
    return (
        f"* position {split.position}: token {split.candidate_token}, reference {split.reference_token}, "
        f"margin {split.margin:.3f}, {'accepted' if split.accepted else 'refused'}"
    )


def draw_layers(report: AlignReport, path: Path) -> None:
    """Draw each run's relative L2 error by layer, on a log scale, over the reference's own bf16 error as a band.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "the picture of align --output") from error
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes, names = figure.subplots(), [""]
    for run in report.runs:
        outputs = [row for row in run.comparison.rows if row.kind == "output" and _DRAWN(row.site)]
        pairs = [(row, row.error) for row in outputs if row.error is not None]
        names, places = [_short(row.site) for row, _ in pairs], list(range(len(pairs)))
        own = [row.reference_error.row_relative_l2 for row, _ in pairs if row.reference_error is not None]
        if own and run.mode == report.runs[0].mode:
            label = f"transformers' own bf16 error, {_MODES[run.mode]}"
            axes.fill_between(places, _FLOOR, own, color="0.88", label=label)
        errors = [max(error.row_relative_l2, _FLOOR) for _, error in pairs]
        line, color = {"free": "-", "teacher": ":"}[run.mode], {"fp32": "tab:blue", "bf16": "tab:orange"}[run.dtype]
        axes.plot(places, errors, line, color=color, marker=".", label=f"ours, {run.dtype}, {_MODES[run.mode]}")
        if run.mode == report.runs[0].mode:
            limits = [row.relative_l2_limit for row, _ in pairs]
            axes.plot(places, limits, "--", color=color, linewidth=0.8, label=f"limit, {run.dtype}, {_MODES[run.mode]}")
        bad = [place for place in places if pairs[place][0].status != "pass"]
        if bad:
            label = f"past the limit, {run.dtype}, {_MODES[run.mode]}"
            axes.plot(bad, [errors[place] for place in bad], "x", color="tab:red", markersize=9, label=label)
    if report.fault is not None and _short(report.fault.layer) in names:
        place = names.index(_short(report.fault.layer))
        axes.axvline(place, color="tab:red", alpha=0.4)
        axes.annotate(f" first at fault:\n {report.fault.seen_at}", (place, 2 * _FLOOR), color="tab:red")
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=90 if len(names) > 20 else 0)
    axes.set(yscale="log", ylim=(_FLOOR, None), xlabel="layer", ylabel="relative L2 error, mean over tokens")
    color = "tab:green" if report.passed else "tab:red"
    axes.set_title("\n".join(textwrap.wrap(report.verdict, 130)), fontsize=9, color=color)
    axes.grid(visible=True, axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def _short(site: str) -> str:
    return {"root": "logits", "embed_tokens": "embed"}.get(site, site.removeprefix("layers."))
