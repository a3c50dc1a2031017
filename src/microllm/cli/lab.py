"""``microllm lab``: experiments from hypothesis to verdict, and the records that they leave."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.lab.experiment import NewConfig, RunConfig
from microllm.lab.staircase import RenderConfig
from microllm.lab.validate import ValidateConfig, VerifyConfig

if TYPE_CHECKING:
    from microllm.lab.judgement import Judgement

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True, kw_only=True)
class LabNew:
    """Write an experiment's contract, before there is any number."""

    config: NewConfig
    as_json: Json = False

    def run(self) -> int:
        """Print where the contract is."""
        from microllm.lab.experiment import new_experiment

        directory = new_experiment(self.config)
        print(json.dumps({"directory": str(directory)}) if self.as_json else directory)
        return 0


@dataclass(frozen=True, kw_only=True)
class LabRun:
    """Run an experiment: correctness first, then timing in pairs in fresh processes; then judge it."""

    config: RunConfig
    as_json: Json = False

    def run(self) -> int:
        """Print the verdict; 0 whatever it is, for a discarded candidate is a result."""
        from microllm.lab.experiment import run_experiment

        _show(run_experiment(self.config), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class LabJudge:
    """Compute an experiment's verdict again from its raw rows."""

    id: tyro.conf.Positional[str]
    """The experiment's id, number or name."""
    root: Path = Path("lab")
    """Where the records lie."""
    as_json: Json = False

    def run(self) -> int:
        """Print the verdict."""
        from microllm.lab.experiment import find_experiment
        from microllm.lab.judgement import judge_experiment

        _show(judge_experiment(find_experiment(self.root, self.id)), as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class LabRender:
    """Draw the staircases, and fill the tables of README and docs from the records."""

    config: RenderConfig = field(default_factory=RenderConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print the files that were not current; with --check, 1 if there were any."""
        from microllm.lab.staircase import render

        stale = [str(path) for path in render(self.config)]
        if self.as_json:
            print(json.dumps({"stale": stale}))
        else:
            for path in stale:
                print(f"{'stale' if self.config.check else 'written'}: {path}")
        return 1 if stale and self.config.check else 0


@dataclass(frozen=True, kw_only=True)
class LabValidate:
    """Check every record against its schema and its neighbours."""

    config: ValidateConfig = field(default_factory=ValidateConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print each problem; 1 if there is any."""
        from microllm.lab.validate import validate

        return _report(validate(self.config), as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class LabVerify:
    """Recompute every digest, chain and verdict; --env also lists what has drifted on this machine."""

    config: VerifyConfig = field(default_factory=VerifyConfig)
    as_json: Json = False

    def run(self) -> int:
        """Print each problem; 1 if there is any but drift."""
        from microllm.lab.validate import verify

        return _report(verify(self.config), as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Keep experiments: hypothesis, contract, raw rows, verdict, receipts."""

    action: (
        Annotated[LabNew, tyro.conf.subcommand("new")]
        | Annotated[LabRun, tyro.conf.subcommand("run")]
        | Annotated[LabJudge, tyro.conf.subcommand("judge")]
        | Annotated[LabRender, tyro.conf.subcommand("render")]
        | Annotated[LabValidate, tyro.conf.subcommand("validate")]
        | Annotated[LabVerify, tyro.conf.subcommand("verify")]
    )

    def run(self) -> int:
        """Run the chosen action."""
        return self.action.run()


def _show(judgement: Judgement, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(judgement.to_json(), default=str))
        return
    verdict = judgement.verdict
    print(f"{verdict.status}{'' if judgement.final else ' so far'}: {'; '.join(verdict.reasons)}")
    if verdict.effect is not None and verdict.lower is not None and verdict.upper is not None:
        positive = f"{verdict.num_positive} of {verdict.num_processes} processes faster"
        print(f"effect {verdict.effect:+.2%}, 97.5 % bounds {verdict.lower:+.2%} and {verdict.upper:+.2%}, {positive}")


def _report(problems: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"problems": problems}))
    else:
        print("\n".join(problems) or "every record holds")
    return 1 if any(not text.startswith("drift: ") for text in problems) else 0
