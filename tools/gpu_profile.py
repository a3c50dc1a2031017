"""Profile our own generation with random weights in a preset's shape: no checkpoint and no tokenizer files.

    PYTHONPATH=src python tools/gpu_profile.py --output out [--preset smollm2-135m] [--device cuda] [--dtype bfloat16]

Prints what ``microllm profile -- generate`` prints, and writes profile.json, profile.txt and timeline.json. Of the
package's dependencies it needs torch and pydantic alone, so it runs where those of the command line are not installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from microllm.config import PRESETS
from microllm.lab.profile import ProfileConfig, describe_profile, profile_generation, write_profile
from microllm.lab.random_model import random_llm
from microllm.sampling import SamplingParams


def main() -> None:
    """Profile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", default="smollm2-135m", choices=sorted(PRESETS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--short-steps", type=int, default=16)
    parser.add_argument("--long-steps", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    llm = random_llm(args.preset, args.device, getattr(torch, args.dtype))
    profile, timeline = profile_generation(
        llm,
        list(range(100, 100 + args.prompt_tokens)),
        SamplingParams(temperature=args.temperature),
        ProfileConfig(short_steps=args.short_steps, long_steps=args.long_steps, repeats=5),
    )
    print(describe_profile(profile))
    write_profile(args.output, profile, timeline)


if __name__ == "__main__":
    main()
