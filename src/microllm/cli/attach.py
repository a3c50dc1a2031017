"""``microllm attach``: structures attached to a transformers model, judged, and explained."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from microllm.lab.attach_model import AttachOptions


@dataclass(frozen=True, kw_only=True)
class Attach:
    """Attach measured structures to a transformers model; say what was bound, kept and refused. Exit 1 for nothing."""

    config: AttachOptions = field(default_factory=AttachOptions)
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the plan and its receipt's digest as one JSON object."""

    def run(self) -> int:
        """Print the explanation and each unit's figures."""
        from microllm.lab.attach_model import attach_model
        from microllm.structures import explain

        plan = attach_model(self.config)
        if self.as_json:
            print(json.dumps(plan.manifest()))
            return 0 if plan.active else 1
        print(explain(plan))
        for name, unit in [*plan.units.items(), *([("union", plan.union)] if plan.union else [])]:
            for phase in unit.phases:
                metrics = phase.gate.metrics
                speed = "" if phase.ratio is None else f", {phase.ratio:.3f} x the host (at least {phase.lower:.3f})"
                print(
                    f"  {name:<16} {phase.phase:<9} agreement {metrics.top1_agreement or metrics.cosine:.4f} "
                    f"[{phase.gate.band}], KL {metrics.kl or 0:.1e}, max {metrics.max_abs:.3g}{speed}"
                )
        if plan.receipt is not None:
            print(f"receipt {plan.receipt.digest[:12]}, judged on {plan.notes['calibration']['judged_on']} text")
        return 0 if plan.active else 1
