"""What int8 and int4 structures do to a trained model: agreement and perplexity on text that was held out.

    python tools/reference_gates.py --model release/model_s --data reference/data [--windows 32]

Attaches w8a16_decode, w4a16_decode (rounded) and the same by GPTQ to the model's bf16 twin in ``transformers``, each
judged by ``attach`` and then decoded, teacher-forced, over windows of the packed validation split, beside the model in
fp32. Calibrates on the training split. Writes structures.json and receipts.jsonl beside the weights, in place
of earlier ones. Speed is not judged here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from microllm import structures
from microllm.errors import DataError
from microllm.evidence.gates import gate_metrics
from microllm.evidence.journal import write_atomic
from microllm.io.resolve import resolve_model
from microllm.lab.hf_twin import cast_twin, load_twin
from microllm.structures.binding import load_bindings
from microllm.structures.calibration import stratified_indices
from microllm.structures.host import find_host
from microllm.structures.schemes import WeightOnly
from microllm.structures.stack import forced_logits
from microllm.structures.structure import load_catalog
from microllm.training.dataset import open_index
from microllm.training.pack import MASKED, START

WINDOW, NUM_CALIBRATION, ROWS = 257, 16, 8
SCHEMES = ("w8a16_decode", "w4a16_decode", WeightOnly("w4a16_gptq", "int4", gptq=True))
MIN_AGREEMENT, MAX_BELOW_HOST, MAX_PERPLEXITY_CHANGE = 0.95, 0.025, 0.005


def windows_of(data: Path, split: str, count: int) -> list[Tensor]:
    """Return ``count`` windows of ids [1, T] from inside documents, spread evenly over the whole split."""
    index = open_index(data)
    found = []
    for shard in index.content["splits"][split]:
        tokens = np.fromfile(index.directory / shard["file"], "<u4")
        starts = np.append(np.flatnonzero(tokens & START), len(tokens))
        ids = torch.from_numpy((tokens & (MASKED - 1)).astype(np.int64))
        for begin, end in pairwise(starts):
            found += [ids[i : i + WINDOW][None] for i in range(begin, end - WINDOW + 1, WINDOW)]
    if len(found) < count:
        raise DataError(f"got {len(found)} windows of {WINDOW} tokens in {data}, {split}; need {count}; ask for fewer")
    return [found[i] for i in stratified_indices(["text"] * len(found), count)]


@torch.no_grad()
def measure(model: str, data: Path, num_windows: int, store: Path) -> dict[str, Any]:
    """Return the figures of every scheme; each receipt is appended to the store."""
    exact = load_twin(resolve_model(model)).requires_grad_(False)
    low = cast_twin(exact, torch.bfloat16).requires_grad_(False)
    held_out, fitted = windows_of(data, "validation", num_windows), windows_of(data, "train", NUM_CALIBRATION)
    targets = torch.cat([ids[0, 1:] for ids in held_out])
    wanted = torch.cat([exact(ids[:, :-1]).logits[0].float() for ids in held_out])
    bare = gate_metrics("distribution", _decoded(low, held_out), wanted, targets)
    perplexity = float(functional.cross_entropy(wanted, targets).exp())
    rows = []
    for scheme in SCHEMES:
        plan = structures.attach(
            low, low, scheme=scheme, observations=fitted, heldout=held_out[:1], min_speedup=0,
            config=structures.AttachConfig(store=store),
        )  # fmt: skip
        plan.save_receipt(store)
        found = gate_metrics("distribution", _decoded(low, held_out), wanted, targets)
        summary, seats = plan.summary(), len(plan.seats)
        plan.detach()
        below = bare.top1_agreement - found.top1_agreement
        passes = found.top1_agreement >= MIN_AGREEMENT and below <= MAX_BELOW_HOST
        passes = passes and found.perplexity_change <= MAX_PERPLEXITY_CHANGE and summary["clean"]
        rows.append({
            "scheme": getattr(scheme, "name", scheme), "agreement": found.top1_agreement,
            "agreement_below_host": below, "kl": found.kl, "perplexity": perplexity * (1 + found.perplexity_change),
            "perplexity_change": found.perplexity_change, "seats": seats,
            "left": dict(plan.left), "clean": summary["clean"], "verdict": "pass" if passes else "below the int8 bar",
            "receipt": plan.receipt.digest,
        })  # fmt: skip
    return {
        "num_tokens": len(targets), "rows": ROWS, "fp32_perplexity": perplexity,
        "host_perplexity": perplexity * (1 + bare.perplexity_change), "host_agreement": bare.top1_agreement,
        "schemes": rows,
    }  # fmt: skip


def _decoded(model: nn.Module, windows: Sequence[Tensor]) -> Tensor:
    """Return logits of decoding steps, each behind what came before it: the band in which weight-only seats run."""
    host = find_host(model, load_bindings(load_catalog()))
    return torch.cat([forced_logits(host, ids[:, :-1], 0, ROWS)[0] for ids in windows])


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--data", type=Path, required=True, help="directory that microllm data pack made")
    parser.add_argument("--windows", type=int, default=32, help=f"windows of {WINDOW - 1} tokens to judge on")
    given = parser.parse_args()
    (Path(given.model) / "receipts.jsonl").unlink(missing_ok=True)
    record = measure(given.model, given.data, given.windows, Path(given.model))
    write_atomic(Path(given.model) / "structures.json", json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
