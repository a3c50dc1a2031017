"""Structures in a host, timed: the loop over an attached model beside the bare loop, and beside transformers' own.

Place: ``microllm bench attach`` on a model, ``tools/gpu_structures.py`` on random weights of a model's shape. Rows A1
to A3 of the targets. On a GPU both arms of a pair are captured steps over one host, captured in turn; on a CPU they run
as they are. A figure whose ledger shows a fallback, or that lacks a seam which the target names, has no speed.

Axes:    B = rows, T = tokens of the prompt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from microllm.errors import ConfigError
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields, write_row
from microllm.evidence.timing import FULL, QUICK, PairedTiming, time_pairs
from microllm.structures import AttachConfig, Plan, auto_swaps, explain
from microllm.structures.decisions import FAMILIES, record, signature
from microllm.structures.guard import joined_ledger
from microllm.structures.host import Host
from microllm.structures.impls import cosine
from microllm.structures.step import Step

REQUIRED = ("decoder_ffn", "qkv_pack", "residual_norm", "lm_head")
STEPS = 32
"""Steps of one timed call: the context grows by so many tokens and is then set back."""
LEAST_COSINE = {"bf16_structural": 0.999, "w8a16_decode": 0.99, "none": 0.999}


@dataclass(frozen=True, kw_only=True)
class AttachBench:
    """What is measured, and how long.

    ``peer``: run transformers' own generation with a static cache too (compiled on a GPU, minutes the first time).
    """

    num_rows: tuple[int, ...] = ()
    """Rows that decode together (none: 1 and 8)."""
    prompt_tokens: int = 512
    new_tokens: int = 128
    schemes: tuple[str, ...] = ()
    """What is attached (none: bf16_structural and w8a16_decode)."""
    quick: bool = False
    peer: bool = True
    record: bool = False
    """Write which candidate of a region family was the fastest into the store of decisions."""
    store: Path | None = None
    """Where decisions and receipts are read and written (default: the project's cache)."""
    out: Path | None = None
    """Append the rows to this JSONL file."""

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Return the numbers of rows that are measured."""
        return self.num_rows or (1, 8)

    @property
    def all_schemes(self) -> tuple[str, ...]:
        """Return the schemes that are measured."""
        return self.schemes or ("bf16_structural", "w8a16_decode")

    def __post_init__(self) -> None:
        if self.prompt_tokens < 8 or self.new_tokens < STEPS or min(self.num_rows, default=1) < 1:
            raise ConfigError(f"got {self}; need prompts of 8 tokens, {STEPS} new ones and a row at least")


@dataclass
class AttachFigures:
    """The rows, and what stands behind them: each arm's explanation, ledger and milliseconds a step."""

    rows: list[Row] = field(default_factory=list)
    arms: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Arm:
    """One form of the host in a loop: its step, what was attached when it was captured, and its logits."""

    name: str
    plan: Plan | None
    step: Step
    logits: Tensor
    why_not: str = ""


@torch.no_grad()
def measure_attach(
    model: nn.Module, ids: Tensor, config: AttachBench, progress: Callable[[str], None] = lambda _: None
) -> AttachFigures:  # fmt: skip
    """Return the rows of one host; ``ids`` [T] is the prompt, repeated for more rows.

    Raises:
        StructureError: the model is no host.
    """
    found, device = AttachFigures(), str(ids.device)
    fields = environment_fields(capture_environment(device))
    fields["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    ids = ids[: config.prompt_tokens]
    plans = {
        f"{scheme} {region}": auto_swaps(
            model, lambda: model(ids[None]), scheme=scheme,
            config=AttachConfig(store=config.store, pins={"decoder_layer_decode": region}),
        )
        for scheme in config.all_schemes for region in FAMILIES["decoder_layer_decode"].names()
    }  # fmt: skip
    for num_rows in config.all_rows:
        progress(f"{num_rows} rows: capturing {len(plans) + 1} arms")
        host = next(iter(plans.values())).host
        bare = _arm("nothing attached", None, host, ids, num_rows, config)
        arms = {name: _arm(name, plan, host, ids, num_rows, config, bare) for name, plan in plans.items()}
        peer = _peer(model, ids, num_rows, config, progress) if config.peer else None
        _compare(found, bare, arms, peer, fields, num_rows, config, progress)
    for name, plan in plans.items():
        found.arms[name] = found.arms.get(name, {}) | {
            "explain": explain(plan).splitlines(), "bound_bytes": plan.bound_bytes(),
            "host_bytes": plan.notes["memory"]["host_bytes"], "reasons": all(r.reason for r in plan.build.refused),
        }  # fmt: skip
    found.rows += _prefill(model, plans, ids, fields, config)
    if config.out is not None:
        for row in found.rows:
            write_row(config.out, row)
    return found


def _arm(
    name: str, plan: Plan | None, host: Host, ids: Tensor, num_rows: int, config: AttachBench, bare: _Arm | None = None
) -> _Arm:  # fmt: skip
    """Capture a step while a plan is in place, and look at what it gives."""
    if plan is not None:
        plan.activate()
    try:
        step = Step(host, num_rows, 1, len(ids) + config.new_tokens + 8)
        step.prompt([ids.tolist()] * num_rows, None)
        step.token_ids.fill_(int(ids[-1]))  # the same token in every arm
        step.positions.fill_(len(ids))
        step.run()
        step.settle()
        arm = _Arm(name, plan, step, step.logits.float().clone())
        if plan is not None and bare is not None:
            arm.why_not = _why_not(plan, cosine(arm.logits, bare.logits), name.split()[0])
        return arm
    finally:
        if plan is not None:
            plan.detach()


def _why_not(plan: Plan, agreement: float, scheme: str) -> str:
    ledger, bound = joined_ledger(plan.seats), Counter(seat.structure for seat in plan.seats)
    missing = [] if scheme == "none" else [name for name in REQUIRED if not bound[name]]
    if missing:
        return f"not bound: {', '.join(missing)}"
    if ledger["fallbacks"]:
        return f"{ledger['fallbacks']} calls fell back to the host"
    least = LEAST_COSINE.get(scheme, 0.9)
    return "" if agreement >= least else f"logits of cosine {agreement:.5f} with the host's; need {least}"


def _compare(
    found: AttachFigures, bare: _Arm, arms: dict[str, _Arm], peer: float | None, fields: dict[str, Any], num_rows: int,
    config: AttachBench, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Time every arm against the bare loop, the schemes' best against each other, and the first against the peer."""
    workload = f"decode B{num_rows} T{config.prompt_tokens}"
    timings: dict[str, PairedTiming] = {}
    for name, arm in arms.items():
        progress(f"{workload}: {name}")
        timings[name] = _timed(bare, arm, config)
        found.rows.append(
            _row("A1" if "w8" not in name else "A3", workload, arm, "the loop, nothing attached", timings[name], fields)
        )
        found.arms.setdefault(name, {})[workload] = {
            "ms": 1e3 * timings[name].seconds("B") / STEPS, "bare_ms": 1e3 * timings[name].seconds("A") / STEPS,
            "ratio": timings[name].ratio, "lower": timings[name].lower_ratio, "why_not": arm.why_not,
        }  # fmt: skip
    best = {
        scheme: min((n for n in arms if n.split()[0] == scheme), key=lambda n: timings[n].seconds("B"))
        for scheme in config.all_schemes
    }  # fmt: skip
    floats, packed = (best.get(scheme) for scheme in ("bf16_structural", "w8a16_decode"))
    if floats is not None and packed is not None:
        timing = _timed(arms[floats], arms[packed], config)
        found.rows.append(_row("A2", workload, arms[packed], f"the loop, {floats}", timing, fields))
    if floats is not None and peer is not None:
        rate = num_rows * STEPS / timings[floats].seconds("B")
        name = "transformers, static cache" + (", compiled" if bare.step.token_ids.is_cuda else "")
        found.rows.append(
            Row(
                target="A1", workload=f"{workload}, {floats}", ours=None if arms[floats].why_not else rate, peer=peer,
                peer_name=name, unit="tok/s", parity=arms[floats].why_not or "pass", **fields,
            )
        )  # fmt: skip
    if config.record and floats is not None and num_rows == config.all_rows[0]:
        times = {n.split()[1]: 1e3 * timings[n].seconds("B") / STEPS for n in arms if n.startswith("bf16_structural")}
        host = bare.step.host
        record(
            "decoder_layer_decode", min(times, key=lambda n: times[n]), times, device=str(host.weight.device),
            signature=signature(host), store=config.store,
        )  # fmt: skip


def _timed(first: _Arm, second: _Arm, config: AttachBench) -> PairedTiming:
    device = str(first.step.token_ids.device)

    def steps(arm: _Arm) -> Callable[[], object]:
        def run() -> None:
            if arm.plan is not None and not arm.step.captured:
                arm.plan.activate()
            arm.step.positions.fill_(config.prompt_tokens)
            for _ in range(STEPS):
                arm.step.run()
            if arm.plan is not None and not arm.step.captured:
                arm.plan.detach()

        return run

    timing = QUICK if config.quick else FULL[torch.device(device).type]
    return time_pairs(steps(first), steps(second), device=device, config=timing)


def _row(
    target: str, workload: str, arm: _Arm, peer_name: str, timing: PairedTiming, fields: dict[str, Any]
) -> Row:  # fmt: skip
    num_rows = arm.step.token_ids.shape[0]
    rates = [num_rows * STEPS / timing.seconds(each) for each in ("A", "B")]
    problems = "; ".join(timing.problems) if not timing.config.quick else ""
    return Row(
        target=target, workload=f"{workload}, {arm.name}", ours=None if arm.why_not else rates[1], peer=rates[0],
        peer_name=peer_name, unit="tok/s", parity=arm.why_not or "pass", status="invalid" if problems else "pass",
        **fields,
    )  # fmt: skip


def _prefill(
    model: nn.Module, plans: dict[str, Plan], ids: Tensor, fields: dict[str, Any], config: AttachBench
) -> list[Row]:  # fmt: skip
    """Time a whole prompt through the model's own forward, attached and not."""
    rows = []
    for name, plan in plans.items():
        if not name.endswith("seats"):
            continue

        def attached(plan: Plan = plan) -> Tensor:
            for site in plan.build.attachment.sites:
                site.install()
            return model(ids[None]).logits

        def bare(plan: Plan = plan) -> Tensor:
            for site in plan.build.attachment.sites:
                site.remove()
            return model(ids[None]).logits

        plan.activate()
        try:
            timing = time_pairs(bare, attached, device=str(ids.device), config=QUICK)
            why_not = _why_not(plan, cosine(attached().float(), bare().float()), name.split()[0])
        finally:
            plan.detach()
        rows.append(
            Row(
                target="A3", workload=f"prefill B1 T{len(ids)}, {name}",
                ours=None if why_not else 1e3 * timing.seconds("B"), peer=1e3 * timing.seconds("A"),
                peer_name="nothing attached", unit="ms", parity=why_not or "pass", **fields,
            )
        )  # fmt: skip
    return rows


def _peer(
    model: nn.Module, ids: Tensor, num_rows: int, config: AttachBench, progress: Callable[[str], None]
) -> float | None:  # fmt: skip
    """Return tokens a second of transformers' greedy generation with a static cache, by difference of two lengths."""
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        return None
    batch, mask = ids.repeat(num_rows, 1), torch.ones(num_rows, len(ids), dtype=torch.int64, device=ids.device)
    short, long = max(4, config.new_tokens // 8), config.new_tokens
    times: dict[int, list[float]] = {short: [], long: []}
    for turn in range(2 if config.quick else 4):
        for count in times:
            progress(f"{num_rows} rows: transformers, {count} tokens, turn {turn}")
            started = perf_counter()
            generate(
                batch, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                cache_implementation="static", pad_token_id=0,
            ).cpu()  # fmt: skip
            if turn:  # the first compiles
                times[count].append(perf_counter() - started)
    seconds = median(times[long]) - median(times[short])
    return num_rows * (long - short) / seconds if seconds > 0 else None


def describe(figures: AttachFigures) -> str:
    """Return what was bound, and each row in a line."""
    lines = []
    for row in figures.rows:
        ours = "no figure" if row.ours is None else f"{row.ours:,.2f} {row.unit}"
        ratio = "" if row.ratio_peer is None else f", {row.ratio_peer:.3f} x {row.peer_name} ({row.peer:,.2f})"
        lines.append(f"{row.target} {row.workload}: {ours}{ratio}; parity {row.parity}; {row.status}")
    return "\n".join(lines)
