"""Do int8, int4 and fp8 weights choose what fp32 chooses, through the engine's pass on a GPU? Without tyro or network.

    PYTHONPATH=src python tools/gpu_quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out quality.jsonl

What ``microllm bench quality --device cuda`` runs, for a machine without the commands' packages. Exit 1 where a
precision does not pass. A model that came from a file of four-bit blocks says little of int4: its floats lie on such a
grid already.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from microllm.lab.quality import QualityConfig, measure_quality, quality_table


def main() -> int:
    """Judge the precisions and print their receipts as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precision", nargs="*", help="default: int8, int4 and fp8 on a GPU")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--num-windows", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = QualityConfig(
        model=args.model, device=args.device, precision=tuple(args.precision), window=args.window,
        num_windows=args.num_windows, out=args.out,
    )  # fmt: skip
    rows = measure_quality(config, lambda text: print(text, flush=True))
    print(quality_table(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
