"""What an experiment promises before any number: hypothesis, prediction, workloads, gates, guards, track.

Place: ``experiment new`` writes it, everything else reads it. Once rows exist a changed contract breaks the chain of
receipts that starts from its bytes. Does not run anything.
"""

from __future__ import annotations

import pkgutil
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, ValidationError, model_validator
from torch import Tensor

from microllm.errors import EvidenceError
from microllm.evidence.gates import BANDS, JUDGED, Kind, Metrics
from microllm.evidence.journal import canonical_json, sha256_hex
from microllm.evidence.tensor_statistics import Record
from microllm.evidence.timing import MIN_ROUND_S, QUICK, TimingConfig
from microllm.evidence.verdict import Rule

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10)]
Entry = Annotated[str, Field(pattern=r"^([\w-]+\.py|\w+(\.\w+)*):\w+$")]
Output = Tensor | Sequence[Tensor]
RELATIVE_L2 = {"float32": 1e-4, "fp32": 1e-4, "float16": 0.015, "bfloat16": 0.015, "fp16": 0.015, "bf16": 0.015}
"""Most relative L2 error of values by the track's dtype (another dtype: 0.05): between its rounding and the next one's,
so that a candidate which computes in less than it says has no verdict."""


@dataclass(frozen=True, slots=True)
class Case:
    """What an entry point is given: it builds its inputs from the seed and returns a callable without arguments."""

    workload: str
    arguments: dict[str, JsonValue]
    device: str
    dtype: str
    seed: int


Build = Callable[[Case], Callable[[], Output]]


class Track(Record):
    """Curves of different tracks never mix: any change here starts a new one."""

    device_name: str
    dtype: str
    models: tuple[str, ...] = ()
    workloads: tuple[str, ...]
    peers: dict[str, str] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the track's name for files and tables."""
        words = "".join(c if c.isalnum() else "-" for c in f"{self.device_name}-{self.dtype}".lower())
        slug = "-".join(word for word in words.split("-") if word)
        return f"{slug}-{sha256_hex(canonical_json(self.model_dump(mode='json')))[:6]}"


class Workload(Record):
    """One input that both arms run; the contract's first is the target, the others guard."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class Contract(Record):
    """An experiment's promise. ``kind="baseline"`` starts a track from the peer ratios of ``score_targets``' rows.

    ``gate`` and ``floors`` say what correctness is (no floors: the kind's own pass band, and for values the relative
    L2 of ``RELATIVE_L2``, for a cosine sees neither a factor nor a lower precision); ``broken`` plants a fault.
    ``memory_trade`` says why peak memory may rise to ``memory_limit`` of the baseline's.
    Units:   ``predicted_effect`` and ``min_effect`` in natural logarithms of the ratio of times (0.01 = 1 % faster)
    """

    model_config = ConfigDict(allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^\d{3}-[a-z0-9-]+$")]
    kind: Literal["experiment", "baseline"] = "experiment"
    created: str
    commit: str
    hypothesis: Text
    refuted_if: Text
    mechanism: Text
    predicted_effect: float
    track: Track
    device: str
    baseline: Entry | None = None
    candidate: Entry | None = None
    broken: Entry | None = None
    workloads: tuple[Workload, ...]
    gate: Kind = "values"
    floors: dict[str, float] = Field(default_factory=dict)
    num_gate_seeds: Annotated[int, Field(ge=1)] = 3
    min_effect: Annotated[float, Field(ge=0.003)] = 0.003
    adds_policy_code: bool = False
    memory_limit: Annotated[float, Field(ge=1.01)] = 1.01
    memory_trade: str = ""
    pairs: int = 8
    control_pairs: int = 4
    round_s: Annotated[float, Field(ge=MIN_ROUND_S)] = 0.5
    num_threads: Annotated[int, Field(ge=1)] | None = None
    score_targets: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Contract:
        names = tuple(workload.name for workload in self.workloads)
        if not names or len(set(names)) != len(names) or names != self.track.workloads:
            raise EvidenceError(f"got workloads {names}, track {self.track.workloads}; need the same distinct names")
        if self.kind == "experiment" and not (self.baseline and self.candidate):
            raise EvidenceError("got an experiment without entry points; need baseline and candidate")
        if self.memory_limit > 1.01 and len(self.memory_trade) < 10:
            raise EvidenceError(f"got a memory limit of {self.memory_limit}; need memory_trade to say what it buys")
        if unknown := self.floors.keys() - Metrics.model_fields:
            raise EvidenceError(f"got floors for {sorted(unknown)}; need metrics: {', '.join(Metrics.model_fields)}")
        self.timing(0, quick=False)  # refuses what cannot be timed
        return self

    @property
    def limits(self) -> dict[str, float]:
        """Return the floors that the gate refuses by."""
        own = {JUDGED[self.gate]: BANDS[JUDGED[self.gate]][0]}
        most = RELATIVE_L2.get(self.track.dtype, 0.05)
        return self.floors or (own | {"relative_l2": most} if self.gate == "values" else own)

    @property
    def rule(self) -> Rule:
        """Return the rule that this experiment is judged by; a policy that adds code must gain 1 %."""
        min_effect = max(self.min_effect, 0.01) if self.adds_policy_code else self.min_effect
        return Rule(min_effect=min_effect, memory_limit=self.memory_limit)

    def timing(self, seed: int, *, quick: bool) -> TimingConfig:
        """Return how each process times."""
        if quick:
            return replace(QUICK, seed=seed)
        return TimingConfig(pairs=self.pairs, control_pairs=self.control_pairs, round_s=self.round_s, seed=seed)

    def case(self, workload: Workload, seed: int) -> Case:
        """Return what the entry points are given for a workload."""
        return Case(workload.name, dict(workload.arguments), self.device, self.track.dtype, seed)


def read_contract(directory: Path) -> Contract:
    """Read ``contract.json`` of an experiment's directory.

    Raises:
        EvidenceError: there is none, or it does not fit the schema.
    """
    path = directory / "contract.json"
    if not path.exists():
        raise EvidenceError(f"got {directory}, which holds no contract.json; need an experiment; run: microllm lab new")
    try:
        return Contract.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise EvidenceError(f"{path}: {error}") from error


def load_entry(directory: Path, entry: str) -> Build:
    """Return the function that ``entry`` names: "package.module:function", or "file.py:function" in ``directory``.

    Raises:
        EvidenceError: there is no such module, file or function, or its code does not run.
    """
    place, _, name = entry.partition(":")
    is_file = place.endswith(".py")
    try:
        found: Any = runpy.run_path(str(directory / place))[name] if is_file else pkgutil.resolve_name(entry)
    except (Exception, SystemExit) as error:  # an experiment's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise EvidenceError(f"got entry {entry!r}, which {directory} does not lead to ({reason}); write it") from error
    build: Build = found
    if not callable(build):
        raise EvidenceError(f"got entry {entry!r}, a {type(found).__name__}; need a function of a Case")
    return build
