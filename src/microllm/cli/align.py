"""``microllm align``: our model beside its Hugging Face twin on the same tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from microllm.lab.align import AlignConfig


@dataclass(frozen=True, kw_only=True)
class Align:
    """Compare every layer, the logits and greedy tokens with transformers; exit 1 past the gate.

    Where bf16 chooses another token, find which projections are enough for it, by name:

    microllm align --model DIRECTORY --bisect precision

    microllm align --model DIRECTORY --bisect precision --limit 0.01

    The first bisects by a token, the second by the logits' error. Either prints the set, the number of runs and their
    bound; exit 1 where the bound came before the set was known to be minimal. What the operands alone lose, with every
    product in fp32:

    microllm align --model DIRECTORY --attribute weights
    """

    config: AlignConfig = field(default_factory=AlignConfig)
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the whole report as one JSON object instead of the verdict."""

    def run(self) -> int:
        """Print the verdict; 0 when everything is within its limit."""
        from microllm.lab.align import run_align

        if self.config.attribute is not None:
            return self._run_attribute()
        if self.config.bisect is not None:
            return self._run_bisect()
        if self.config.train:
            return self._run_train()
        report = run_align(self.config)
        if self.as_json:
            print(report.model_dump_json())
            return 0 if report.passed else 1
        for run in report.runs:
            for row in run.comparison.layers() if not self.config.quick else ():
                error, limit = row.error, row.relative_l2_limit
                shown = "-" if error is None else f"{error.row_relative_l2:.2e}"
                print(f"{run.dtype} {run.mode:<8} {row.site:<12} {row.status:<17} error {shown} (limit {limit:.2e})")
        print(report.verdict)
        if self.config.output is not None:
            print(f"report: {self.config.output}")
        return 0 if report.passed else 1

    def _run_train(self) -> int:
        from microllm.lab.align_train import run_align_train

        report = run_align_train(self.config)
        if self.as_json:
            print(report.model_dump_json())
        else:
            print(report.verdict)
            if report.negligible:
                print(f"negligible gradients, not judged: {', '.join(report.negligible)}")
        return 0 if report.passed else 1

    def _run_bisect(self) -> int:
        from microllm.lab.align_bisect import run_align_bisect

        report = run_align_bisect(self.config, _progress)
        print(report.model_dump_json() if self.as_json else report.verdict)
        return 0 if report.minimal else 1

    def _run_attribute(self) -> int:
        from microllm.lab.align_attribute import run_align_attribute

        report = run_align_attribute(self.config, _progress)
        if self.as_json:
            print(report.model_dump_json())
            return 0
        for row in report.rows:
            print(f"{row.site:<32} output {row.output_error:.2e} logits {row.logits_error:.2e}")
        print(report.verdict)
        return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
