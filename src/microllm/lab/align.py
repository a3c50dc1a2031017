"""Run our model and its Hugging Face twin on the same tokens and compare every site, the logits and greedy tokens.

Flow: resolve and tokenise → twin in fp32 (the reference, R32) → ours in fp32, by a fixed gate → in bf16, by the error
triple (R32, the twin in bf16, ours in bf16) → report. Free run and teacher-forced. Does not time anything.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from microllm.errors import ConfigError, EvidenceError, MissingExtraError
from microllm.evidence.compare import Gate, TripleRule, compare_traces
from microllm.evidence.environment import capture_environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.logits import compare_logits, greedy_splits
from microllm.evidence.teacher_forcing import FORCED_SITES, teacher_forced
from microllm.evidence.trace import ROOT, Trace, record, site_matcher, site_name
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import ModelSource, resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.align_report import (
    AlignReport,
    AlignRun,
    Dtype,
    GreedyCheck,
    Mode,
    Stage,
    draw_layers,
    find_fault,
    write_report,
    write_verdict,
)
from microllm.lab.hf_twin import Attention, cast_twin, generate_greedily, load_twin, twin_version
from microllm.model import Transformer, load_model
from microllm.step import DenseCache

LOGITS_GATE = 2e-4
"""Largest absolute difference of fp32 logits that passes, up to 512 tokens."""
SITE_GATE = Gate(relative_l2=1e-5)
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT_TOKENS = 128
_FEW_TOKENS = 128  # under this the errors of a free run do not average out: the triple's factor for few elements
_QUICK_TOKENS, _QUICK_GREEDY = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignConfig:
    """What to compare and how.

    Args:
        model: Name or path of a model that transformers can read too.
        tokens: Token ids to run on; they go before text.
        text: Text to run on; with neither, a built-in passage.
        num_tokens: Take the first of them (default: all that are given, 128 of the passage).
        num_greedy: How many greedy tokens to compare after them.
        dtype: bf16 is judged by the error of transformers' own bf16 against its fp32.
        mode: free: errors run on from layer to layer; teacher: each block gets the reference's input.
        perturb: Change one weight of this matrix of ours in memory (layers.7.mlp.up_proj), or of each of several with
            commas between: it must be found.
        quick: fp32, free run, 32 tokens, 8 greedy.
        epsilon: In bf16 another token is accepted where fp32's top-2 margin is smaller, in logits.
        attention: Which attention transformers uses.
        device: Where both models run.
        output: Directory for report.json, report.md, layers.png and manifest.json.
        train: Compare three training steps in fp32 instead: loss, gradients, moments, parameters (train.json).
        bisect: precision: find a minimal set of projections that in bf16, the rest in fp32, fail (bisect.json).
        position: Bisect by the token chosen after this place (default: the first where all of them in bf16 differ).
        limit: Bisect by the relative L2 error of all logits above this, instead of by a token.
        max_runs: Stop bisecting after so many runs, with the set that is left.
        attribute: Round this side of each projection to bf16, multiply in fp32, and list the errors (attribute.json).
    """

    model: str = "demo"
    tokens: tuple[int, ...] = ()
    text: str | None = None
    num_tokens: int | None = None
    num_greedy: int = 16
    dtype: Literal["fp32", "bf16", "both"] = "both"
    mode: Literal["free", "teacher", "both"] = "both"
    perturb: str | None = None
    quick: bool = False
    epsilon: float = 0.5
    attention: Attention = "sdpa"
    device: str = "cpu"
    output: Path | None = None
    train: bool = False
    bisect: Literal["precision"] | None = None
    position: int | None = None
    limit: float | None = None
    max_runs: int = 500
    attribute: Literal["weights", "activations", "both"] | None = None

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Return the precisions to compare in."""
        return ("fp32",) if self.quick else ("fp32", "bf16") if self.dtype == "both" else (self.dtype,)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Return the ways to run."""
        return ("free",) if self.quick else ("free", "teacher") if self.mode == "both" else (self.mode,)


class _Stages:
    """Times the steps; the manifest on disk always says which were done and which one failed."""

    def __init__(self, config: AlignConfig) -> None:
        self.config = config
        self.done: list[Stage] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.done.append(Stage(name=name, status="error", seconds=time.perf_counter() - started, error=text))
            error.add_note(f"align failed in stage {name!r}")
            self.write("error")
            raise
        self.done.append(Stage(name=name, status="done", seconds=time.perf_counter() - started))
        self.write("running")

    def write(self, status: str) -> None:
        if self.config.output is not None:
            body = {
                "status": status,
                "config": asdict(self.config),
                "stages": [stage.model_dump() for stage in self.done],
            }
            write_atomic(self.config.output / "manifest.json", json.dumps(body, indent=1, default=str) + "\n")


def run_align(config: AlignConfig, *, twin: nn.Module | None = None) -> AlignReport:
    """Compare ``config.model`` with its twin and return the report; write it where ``config.output`` says.

    ``twin`` is an fp32 twin that is already loaded, for several runs in one process.

    Raises:
        EvidenceError: the work would not be equal on both sides.
        MissingExtraError: transformers, or matplotlib for ``output``, is not installed.
    """
    stage = _Stages(config)
    with stage("tokens"):
        if config.output is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise MissingExtraError("matplotlib", "plot", "the picture of align --output")
            for name in ("report.json", "report.md", "layers.png"):  # an older run's would not fit the manifest
                (config.output / name).unlink(missing_ok=True)
        source = resolve_model(config.model)
        ids_BT = torch.tensor([token_ids(config, source)], device=config.device)
    with stage("twin"):
        twin = twin or load_twin(source, device=config.device, attention=config.attention)
    work = _Work(config, source, twin, ids_BT, stage)
    for dtype in config.dtypes:
        work.compare(dtype)
    runs, greedy, num_layers = tuple(work.runs), tuple(work.greedy), work.num_layers
    passed, verdict = write_verdict(runs, greedy, num_layers, twin_version())
    report = AlignReport(
        passed=passed, verdict=verdict, model=config.model, reference=twin_version(), attention=config.attention,
        num_layers=num_layers, tokens=tuple(ids_BT[0].tolist()), device=config.device, perturbed=work.perturbed,
        fault=find_fault(runs), runs=runs, greedy=greedy, stages=tuple(stage.done),
        environment=capture_environment(config.device),
    )  # fmt: skip
    if config.output is not None:
        with stage("report"):
            write_report(report, config.output)
            draw_layers(report, config.output / "layers.png")
        stage.write("pass" if passed else "fail")
    return report


class _Work:
    """The twin's fp32 record, and what has been compared with it so far."""

    def __init__(
        self, config: AlignConfig, source: ModelSource, twin: Any, ids_BT: Tensor, stage: _Stages  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.config, self.source, self.twin, self.ids_BT, self.stage = config, source, twin, ids_BT, stage
        self.runs: list[AlignRun] = []
        self.greedy: list[GreedyCheck] = []
        self.perturbed, self.num_layers = "", 0
        self._shared: set[str] = set()
        self._reference = Trace()
        self._reference_greedy: tuple[list[int], Tensor] = ([], torch.empty(0))

    def compare(self, dtype: Dtype) -> None:
        """Load ours in ``dtype``, run both, and judge."""
        config, few = self.config, self.ids_BT.numel() < _FEW_TOKENS
        with self.stage(f"ours {dtype}"):
            model = load_model(open_checkpoint(self.source), dtype=_DTYPES[dtype], device=config.device)
            if config.perturb is not None:
                self.perturbed = perturb_weight(model, config.perturb)
        if not self._shared:
            with self.stage("reference"):
                self._record_reference(model)
        low = None
        if dtype == "bf16":
            with self.stage("twin bf16"):
                low = cast_twin(self.twin, torch.bfloat16)
        for mode in config.modes:
            with self.stage(f"{dtype} {mode}"):
                trace = self._run(model, mode)
                comparison = compare_traces(
                    trace, self._reference, low=None if low is None else self._run(low, mode), gate=SITE_GATE,
                    rule=TripleRule(factor=2.5) if few and mode == "free" else TripleRule(),
                )  # fmt: skip
                epsilon = 2 * LOGITS_GATE if dtype == "fp32" else config.epsilon
                logits = compare_logits(_logits(trace), _logits(self._reference), epsilon=epsilon)
                gate = LOGITS_GATE if dtype == "fp32" else None
                self.runs.append(
                    AlignRun(dtype=dtype, mode=mode, comparison=comparison, logits=logits, logits_gate=gate)
                )
        with self.stage(f"{dtype} greedy"):
            self._compare_greedy(model, dtype)

    def _record_reference(self, model: Transformer) -> None:
        require_matched(model, self.twin)
        self.num_layers = model.config.num_hidden_layers
        num_tokens, most = self.ids_BT.shape[1] + self._num_greedy, model.config.max_position_embeddings
        low, high = int(self.ids_BT.min()), int(self.ids_BT.max())
        if num_tokens > most or low < 0 or high >= model.config.vocab_size or self._num_greedy < 1:
            raise EvidenceError(
                f"got {self.ids_BT.shape[1]} tokens of ids {low} to {high} and {self._num_greedy} greedy ones; "
                f"need at most {most} in all (the model's context), ids under {model.config.vocab_size}, one greedy"
            )
        ours, theirs = ({site_name(name) for name, _ in m.named_modules()} for m in (model, self.twin))
        self._shared = ours & theirs
        self._reference = self._run(self.twin, "free")
        self._reference_greedy = generate_greedily(self.twin, self.ids_BT[0].tolist(), self._num_greedy)

    @property
    def _num_greedy(self) -> int:
        return min(self.config.num_greedy, _QUICK_GREEDY) if self.config.quick else self.config.num_greedy

    def _run(self, model: nn.Module, mode: Mode) -> Trace:
        """Record one forward pass, whole; ``teacher``: each block, the final norm and the head get R32's input."""
        forced = site_matcher(FORCED_SITES)
        forcing = (
            teacher_forced(model, self._reference, blocks=lambda site: site in self._shared and forced(site))
            if mode == "teacher"
            else nullcontext()
        )
        with torch.no_grad(), record(model, sites=lambda site: site in self._shared, keep="whole") as trace, forcing:
            model(self.ids_BT)
        return trace

    def _compare_greedy(self, model: Transformer, dtype: Dtype) -> None:
        theirs, logits = self._reference_greedy
        ours = _greedy(model, self.ids_BT, len(theirs))
        epsilon = 0.0 if dtype == "fp32" else self.config.epsilon
        splits = greedy_splits([ours], [theirs], [logits], epsilon=epsilon)
        self.greedy.append(
            GreedyCheck(dtype=dtype, tokens=tuple(ours), reference_tokens=tuple(theirs), epsilon=epsilon, splits=splits)
        )


def perturb_weight(model: Transformer, sites: str) -> str:
    """Turn the sign of the largest weight of the matrix at each site, in memory, and return what was done.

    Raises:
        ConfigError: the model has no such matrix.
    """
    matrices = {name.removesuffix(".weight"): p for name, p in model.named_parameters() if p.dim() == 2}
    done = []
    for site in sites.split(","):
        if site not in matrices:
            near = ", ".join(difflib.get_close_matches(site, matrices, n=3) or matrices)
            raise ConfigError(f"got perturb={site!r}; need a matrix of the model, such as {near}")
        weight = matrices[site].data
        at = tuple(int(i) for i in torch.unravel_index(weight.abs().argmax(), weight.shape))
        weight[at] *= -1
        done.append(f"{site}.weight{list(at)}: {-weight[at].item():.4g} became {weight[at].item():.4g}")
    return "; ".join(done)


def token_ids(config: AlignConfig, source: ModelSource) -> list[int]:
    """Return the tokens to compare on: those given, of the text given, or of the built-in passage."""
    wanted = config.num_tokens
    if config.tokens:
        ids = list(config.tokens)
    else:
        text = config.text
        if text is None:
            text = json.loads(Path(__file__).with_name("align_text.json").read_text(encoding="utf-8"))["text"]
            wanted = _DEFAULT_TOKENS if wanted is None else wanted
        ids = load_tokenizer(source).encode(text)
    wanted = len(ids) if wanted is None else wanted
    if config.quick:
        wanted = min(wanted, _QUICK_TOKENS)
    if not 1 <= wanted <= len(ids):
        raise EvidenceError(f"got {len(ids)} tokens, num_tokens={wanted}; need at least 1 and as many as are compared")
    return ids[:wanted]


def require_matched(model: Transformer, twin: nn.Module) -> None:
    """Refuse a twin with other parameters, or one that is not in fp32: its work would not be ours."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    ours = {name: (tuple(p.shape), torch.float32) for name, p in model.named_parameters()}
    theirs = {site_name(name): (tuple(p.shape), p.dtype) for name, p in twin.named_parameters()}
    differ = sorted(name for name in (ours.keys() | theirs.keys()) - tied if ours.get(name) != theirs.get(name))
    if differ:
        first = differ[0]
        raise EvidenceError(
            f"got {len(differ)} parameters of the twin that do not fit, first {first}: {theirs.get(first)}; "
            f"need {ours.get(first)}; compare models of the same files"
        )


def _greedy(model: Transformer, ids_BT: Tensor, num_tokens: int) -> list[int]:
    length = ids_BT.shape[1]
    dtype = model.norm.weight.dtype
    cache = DenseCache(model.config, 1, length + num_tokens, dtype=dtype, device=ids_BT.device)
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(num_tokens):
            ids_BT = model(ids_BT, cache=cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids_BT))
    return tokens


def _logits(trace: Trace) -> Tensor:
    found = trace.find("output", ROOT)
    assert found is not None
    assert found.values is not None
    return found.values
