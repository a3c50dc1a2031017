"""Which layers' projections, in bf16, are enough to make a model leave its fp32 reference: delta debugging over them.

Place: ``microllm align --bisect precision``. The reference is the twin in fp32. A run has some projections in bf16
(input, matrix and result) and all else of ours in fp32. Does not time anything, and does not lower norms, attention,
embedding or head. Source: ddmin of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (2002).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from microllm.errors import ConfigError, EvidenceError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.tensor_statistics import Record, error_statistics
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import resolve_model
from microllm.lab.align import AlignConfig, perturb_weight, require_matched, token_ids
from microllm.lab.hf_twin import load_twin, twin_version
from microllm.model import Transformer, load_model

Progress = Callable[[str], None]


class Trial(Record):
    """One run: how many projections were lowered, the token at the judged position (or after all), the logits' error.

    Units:   ``error`` is the relative L2 of all logits against the reference's
    """

    num_lowered: int
    token: int
    error: float
    failed: bool


class BisectReport(Record):
    """The set that was found, what it was judged by, and every run in order.

    ``minimal``: with any one of ``sites`` back in fp32 the gate passes (another set may be as small or smaller);
    False where the runs were used up before that was known.
    """

    minimal: bool
    verdict: str
    model: str
    reference: str
    gate: str
    sites: tuple[str, ...]
    num_candidates: int
    max_runs: int
    trials: tuple[Trial, ...]
    perturbed: str
    environment: Environment


class _Lowered(nn.Module):
    """A projection of the bf16 model, where fp32 goes in and comes out."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.bfloat16)).to(x.dtype)


class _Trials:
    """Runs and judges sets of projections, and keeps what came out."""

    def __init__(
        self, model: Transformer, low: Transformer, ids_BT: Tensor, reference: Tensor, config: AlignConfig
    ) -> None:
        self.model, self.ids_BT, self.reference, self.config = model, ids_BT, reference, config
        self.sites = projections(model)
        self.lowered: dict[str, nn.Module] = {site: _Lowered(low.get_submodule(site)) for site in self.sites}
        self.position = config.position
        self.done: dict[frozenset[str], Trial] = {}

    @property
    def gate(self) -> str:
        """Return in words what fails a run."""
        if self.config.limit is not None:
            return f"logits' relative L2 error over {self.config.limit:g}"
        return f"another token after position {self.position}"

    def logits(self, sites: Sequence[str]) -> Tensor:
        with torch.no_grad(), substituted(self.model, {site: self.lowered[site] for site in sites}):
            return self.model(self.ids_BT)

    @property
    def num_runs(self) -> int:
        """Return how many forward passes were made of ours; the first is made twice."""
        return len(self.done) + 1

    def known(self, sites: Iterable[str]) -> Trial | None:
        return self.done.get(frozenset(sites))

    def judge(self, sites: Sequence[str], logits: Tensor) -> Trial:
        at = -1 if self.position is None else self.position
        token, error = int(logits[0, at].argmax()), error_statistics(logits, self.reference)
        limit = self.config.limit
        if limit is None:
            failed = token != int(self.reference[0, at].argmax())
        else:
            failed = bool(error.special_mismatches) or not error.relative_l2 <= limit
        trial = Trial(num_lowered=len(sites), token=token, error=error.relative_l2, failed=failed)
        self.done[frozenset(sites)] = trial
        return trial


def run_align_bisect(config: AlignConfig, progress: Progress) -> BisectReport:
    """Find a minimal set of projections that fail the gate in bf16; write bisect.json where ``config.output`` says.

    Raises:
        ConfigError: an option is none that can be bisected by.
        EvidenceError: nothing fails, fp32 fails already, or two equal runs differ.
        MissingExtraError: transformers is not installed.
    """
    _check(config)
    source = resolve_model(config.model)
    ids_BT = torch.tensor([token_ids(config, source)], device=config.device)
    if config.position is not None and not 0 <= config.position < ids_BT.shape[1]:
        raise ConfigError(f"got position={config.position}; need 0 to {ids_BT.shape[1] - 1}, a place in the tokens")
    twin = load_twin(source, device=config.device, attention=config.attention)
    model, low = (
        load_model(open_checkpoint(source), dtype=dtype, device=config.device)
        for dtype in (torch.float32, torch.bfloat16)
    )
    require_matched(model, twin)
    perturbed = perturb_weight(low, config.perturb) if config.perturb is not None else ""
    with torch.no_grad():
        trials = _Trials(model, low, ids_BT, twin(ids_BT).logits, config)
    del twin
    _require_failure(trials)
    progress(
        f"all {len(trials.sites)} projections in bf16 fail by {trials.gate}, none pass; at most {config.max_runs} runs"
    )
    sites = minimise(trials.sites, lambda subset: _fails(trials, subset, progress))
    without = [trials.known(set(sites) - {site}) for site in sites]
    minimal = all(trial is not None and not trial.failed for trial in without)
    report = BisectReport(
        minimal=minimal, verdict=_verdict(trials, sites, minimal=minimal), model=config.model,
        reference=twin_version(), gate=trials.gate, sites=tuple(sites), num_candidates=len(trials.sites),
        max_runs=config.max_runs, trials=tuple(trials.done.values()), perturbed=perturbed,
        environment=capture_environment(config.device),
    )  # fmt: skip
    if config.output is not None:
        body = json.dumps(report.model_dump(), indent=1, default=str)
        write_atomic(config.output / "bisect.json", body + "\n")
    return report


def projections(model: Transformer) -> list[str]:
    """Return the sites of the matrices inside the layers, in the order of the model."""
    names = (name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() == 2)
    return [name for name in names if name.startswith("layers.")]


@contextmanager
def substituted(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules in the place of the model's own while the context is open."""
    own = {site: model.get_submodule(site) for site in modules}
    try:
        for site, module in modules.items():
            model.set_submodule(site, module)
        yield
    finally:
        for site, module in own.items():
            model.set_submodule(site, module)


def minimise(items: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a failing part of ``items``, which fail, such that it passes without any one of its own (ddmin).

    The parts are tried in order and each only shrinks a failing set: the same answers give the same part. A few
    culprits among n cost some log2(n) runs each; the worst case is n² + 3n.
    """
    items, parts = list(items), 2
    while len(items) > 1:
        size = len(items) / parts
        chunks = [items[math.ceil(i * size) : math.ceil((i + 1) * size)] for i in range(parts)]
        found = next((chunk for chunk in chunks if fails(chunk)), None)
        if found is not None:
            items, parts = found, 2
            continue
        rests = [[item for item in items if item not in chunk] for chunk in chunks] if parts > 2 else []
        found = next((rest for rest in rests if fails(rest)), None)
        if found is not None:
            items, parts = found, max(parts - 1, 2)
        elif parts == len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items


def _check(config: AlignConfig) -> None:
    if config.bisect != "precision":
        raise ConfigError(f"got bisect={config.bisect!r}; need 'precision', the one mode there is")
    if config.train:
        raise ConfigError("got bisect and train; need one of the two; run them one after the other")
    if config.max_runs < 3:
        raise ConfigError(f"got max_runs={config.max_runs}; need at least 3: fp32 once, and all in bf16 twice")
    if config.limit is not None and not 0 < config.limit < math.inf:
        raise ConfigError(f"got limit={config.limit}; need a finite relative error above 0, such as 0.01")
    if config.limit is not None and config.position is not None:
        raise ConfigError("got limit and position; need one gate: the error of all logits, or the token at a position")


def _require_failure(trials: _Trials) -> None:
    """Choose the position where none is given, and refuse what cannot be bisected: see ``run_align_bisect``."""
    whole = trials.logits(trials.sites)
    if not torch.equal(whole, trials.logits(trials.sites)):
        raise EvidenceError("got other logits from a second equal run; need repeatable runs; run with --device cpu")
    if trials.position is None and trials.config.limit is None:
        split = (whole.argmax(-1) != trials.reference.argmax(-1))[0].nonzero().flatten().tolist()
        trials.position = split[0] if split else None
    failing, passing = trials.judge(trials.sites, whole), trials.judge((), trials.logits(()))
    if passing.failed:
        raise EvidenceError(
            f"got a gate ({trials.gate}) that fails with every projection in fp32 (error {passing.error:.1e}); "
            "need one that fp32 passes; see what microllm align --dtype fp32 says, or give another position or limit"
        )
    if not failing.failed:
        none_chosen = trials.position is None and trials.config.limit is None
        gate = "another token at any position" if none_chosen else trials.gate
        raise EvidenceError(
            f"got no failure ({gate}) with all {len(trials.sites)} projections in bf16 (error {failing.error:.1e}); "
            "need a failure to bisect; give a longer text, another position, or a limit under that error"
        )


def _fails(trials: _Trials, subset: Sequence[str], progress: Progress) -> bool:
    """Return whether a set fails; once the runs are used up nothing does, and the search ends with what it has."""
    known = trials.known(subset)
    if known is not None or trials.num_runs >= trials.config.max_runs:
        return known is not None and known.failed
    trial = trials.judge(subset, trials.logits(subset))
    state = "fails" if trial.failed else "passes"
    progress(f"run {trials.num_runs}: {len(subset)} in bf16 {state} (token {trial.token}, error {trial.error:.1e})")
    return trial.failed


def _verdict(trials: _Trials, sites: Sequence[str], *, minimal: bool) -> str:
    found, reference = trials.done[frozenset(sites)], trials.reference
    seen = f"error {found.error:.1e}"
    if trials.position is not None:
        seen = f"token {found.token} where fp32 has {int(reference[0, trials.position].argmax())}"
    end = "without any one of them it passes" if minimal else "NOT known to be minimal: the runs were used up"
    return (
        f"align --bisect precision: {len(sites)} of {len(trials.sites)} projections in bf16 fail by {trials.gate} "
        f"({seen}): {', '.join(sites)}; {end}; {trials.num_runs} runs of at most {trials.config.max_runs}"
    )
