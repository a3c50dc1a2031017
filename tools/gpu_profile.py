"""Profile our own generation with random weights in a preset's shape: no checkpoint and no tokenizer files.

    PYTHONPATH=src python tools/gpu_profile.py --output out [--preset smollm2-135m] [--device cuda] [--dtype bfloat16]

Prints what ``microllm profile -- generate`` prints, and writes profile.json, profile.txt and timeline.json. Of the
package's dependencies it needs torch and pydantic alone, so it runs where those of the command line are not installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from microllm.config import PRESETS, preset
from microllm.inference import LLM
from microllm.lab.profile import ProfileConfig, describe_profile, profile_generation, write_profile
from microllm.model import Transformer
from microllm.sampling import SamplingParams

if TYPE_CHECKING:
    from microllm.io.tokenizer import Tokenizer


class NoText:
    """What generation asks of a tokenizer, where no text is wanted; its own text stream as well."""

    eos_ids: frozenset[int] = frozenset()

    def known_ids_mask(self, size: int) -> Tensor:
        """Return that every id is a token."""
        return torch.ones(size, dtype=torch.bool)

    def stream(self) -> NoText:
        """Return the stream, which says nothing."""
        return self

    def push(self, token_id: int) -> str:
        """Take a token."""
        return ""

    def flush(self) -> str:
        """End the text."""
        return ""


def random_llm(name: str, device: str, dtype: torch.dtype) -> LLM:
    """Return a model of a preset's shape with seeded weights."""
    model = Transformer(preset(name), dtype=dtype, device=device).initialise(seed=0).eval()
    return LLM(model.requires_grad_(False), cast("Tokenizer", NoText()), name=f"random {name}")


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
