"""Rows of the engine's targets on a GPU, with random weights: needs neither tyro nor a network.

    PYTHONPATH=src python tools/gpu_engine.py --out engine.jsonl qwen2.5-0.5b:1,8:512:peer qwen2.5-0.5b:32,64:512

The grid of models, lengths and batches has a command, where tyro is there:

    PYTHONPATH=src python -m microllm bench matrix --device cuda --model qwen2.5-0.5b --out matrix.jsonl

Each argument is MODEL:BATCHES:TOKENS[:peer][:B][:int8][:S256]: B for mode B, int8 (int4, fp8) for weights in codes,
S256 for the throughput run of 256 sequences.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from microllm.evidence.rows import read_rows, rows_table
from microllm.inference.quantised import QUANTISATIONS
from microllm.lab.bench_engine import EngineBenchConfig, measure_engine


def main() -> None:
    """Run each argument's rows; one that fails is named, and the next runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    for run in args.runs:
        model, batches, tokens, *flags = run.split(":")
        unknown = [f for f in flags if f not in ("peer", "B", *QUANTISATIONS) and not re.fullmatch(r"S\d+", f)]
        if unknown:
            parser.error(f"got {', '.join(unknown)} in {run}; need peer, B, S and a number, {', '.join(QUANTISATIONS)}")
        config = EngineBenchConfig(
            model=model, batch=tuple(map(int, batches.split(","))), tokens=tuple(map(int, tokens.split(","))),
            peer="peer" in flags, deterministic="B" in flags,
            weights=next((flag for flag in flags if flag in QUANTISATIONS), ""), device=args.device, dtype=args.dtype,
            sequences=next((int(flag[1:]) for flag in flags if flag.startswith("S")), 0), rounds=args.rounds,
            new_tokens=args.new_tokens, out=args.out,
        )  # fmt: skip
        try:
            for _ in measure_engine(config, lambda text: print(text, flush=True)):
                pass
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{run}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(rows_table(read_rows(args.out)))


if __name__ == "__main__":
    main()
