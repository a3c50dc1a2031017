"""Attach structures to a transformers model with random weights of a real shape, on a GPU, and time rows A1 to A3.

    PYTHONPATH=src python tools/gpu_structures.py --output out [--model qwen2.5-0.5b] [--quick] [--device cuda]

Writes structures.json (arms: explanation, ledger, milliseconds) and structures.jsonl (the rows) under --output and
prints the rows. Needs torch, triton, pydantic, pyyaml and transformers, no network and nothing of the command line's.
Checks first, on the same device, that captured loops give the tokens of eager ones, in fp32, seats and chain.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from microllm import structures
from microllm.lab.bench_attach import AttachBench, describe, measure_attach
from tiny_hosts import FAMILIES, make_host

SHAPES: dict[str, Any] = {
    "qwen2.5-0.5b": lambda: transformers.Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "smollm2-135m": lambda: transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "tiny": lambda: FAMILIES["qwen2"](),
}  # fmt: skip


def check_tokens(device: str, store: Path) -> dict[str, Any]:
    """Compare the loop's greedy tokens with the host's own in fp32: each family, seats and chain, and in a batch."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        model = make_host(family, device=device)
        prompts = [[(7 * i + n) % 97 for i in range(5 + 4 * n)] for n in range(3)]
        wanted = [
            model.generate(torch.tensor([p], device=device), max_new_tokens=24, do_sample=False)[0, len(p) :].tolist()
            for p in prompts
        ]
        ids = torch.arange(16, device=device)[None]
        for region in ("seats", "chain"):
            pinned = structures.AttachConfig(pins={"decoder_layer_decode": region}, store=store)
            plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=pinned)  # noqa: B023
            plan.activate()
            with structures.decode_loop(model, max_len=64) as loop:
                got = loop.generate(prompts, max_new_tokens=24)
                again = loop.generate(prompts, max_new_tokens=24)
                loop.enable_draft("ngram", k=4)
                guessed = [loop.generate_speculative(p, 24) for p in prompts]
            found[f"{family} {region}"] = {
                "equal": got == wanted, "repeats": again == got, "speculative": guessed == wanted,
                "clean": plan.summary()["clean"], "replays": plan.summary()["replays"],
                "refused": [f"{r.structure} {r.path}: {r.reason}" for r in plan.build.refused],
            }  # fmt: skip
            plan.detach()
    return found


def check_capture(device: str) -> dict[str, str]:
    """Capture a small computation, and have those refused that cannot be."""
    if torch.device(device).type != "cuda":
        return {}
    x, w = torch.randn(8, 256, device=device), torch.randn(256, 256, device=device)
    hidden = [torch.ones((), device=device)]  # another tensor later on: one changed in place is the graph's own input
    found = {}
    stage = structures.capture(lambda: torch.relu(x @ w).softmax(-1) @ w, windows={"x": x}, min_speedup=0)
    stage.write("x", torch.ones_like(x))
    right = torch.allclose(stage.replay(), torch.relu(torch.ones_like(x) @ w).softmax(-1) @ w, rtol=1e-3)
    found["a captured stage follows its window"] = "pass" if right else "FAILED"
    refused = {
        "empty": (lambda: x, {}), "synchronises": (lambda: x[x > 0].sum(), {"x": x}),
        "undeclared": (lambda: x * hidden[-1], {"x": x}),
    }  # fmt: skip
    for name, (fn, windows) in refused.items():
        try:
            second = (lambda: hidden.append(2 * hidden[-1])) if name == "undeclared" else None
            structures.capture(fn, windows=windows, second=second, min_speedup=0)
            found[name] = "taken"
        except structures.CaptureRefused as error:
            found[name] = f"refused: {error}"
    found["a capture after refusals"] = (
        "pass" if structures.capture(lambda: x @ w, windows={"x": x}, min_speedup=0) else ""
    )
    return found


def main() -> None:
    """Check, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="short rounds: a first look, not a record")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences that decode at once")
    parser.add_argument("--no-checks", action="store_true", help="only time")
    parser.add_argument("--no-peer", action="store_true", help="leave out transformers' own compiled generation")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    checks = {}
    if not args.no_checks:
        checks = {"tokens": check_tokens(args.device, args.output / "store"), "capture": check_capture(args.device)}
        print(json.dumps(checks, indent=1), flush=True)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(SHAPES[args.model](), dtype=getattr(torch, args.dtype))
    model = model.eval().requires_grad_(False)
    ids = torch.randint(model.config.vocab_size, (args.prompt_tokens,), device=args.device)
    bench = AttachBench(
        prompt_tokens=args.prompt_tokens, quick=args.quick, peer=not args.no_peer, record=True,
        store=args.output / "store", out=args.output / "structures.jsonl", num_rows=tuple(args.rows),
    )  # fmt: skip
    figures = measure_attach(model, ids, bench, lambda text: print(text, flush=True))
    print(describe(figures))
    document = {
        "model": args.model, "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "checks": checks, "arms": figures.arms, "rows": [row.model_dump(mode="json") for row in figures.rows],
    }  # fmt: skip
    config = structures.AttachConfig(store=args.output / "store")
    plan = structures.auto_swaps(model, lambda: model(ids[None]), scheme="w8a16_decode", config=config).activate()
    document["consume"] = {"host_bytes": plan.notes["memory"]["host_bytes"], "bound_bytes": plan.bound_bytes()}
    document["consume"] |= plan.finalize()
    (args.output / "structures.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
