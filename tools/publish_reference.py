"""Publish a finished run: bf16 weights in shards, what was measured, samples and a card, as a Hugging Face directory.

    python tools/publish_reference.py weights --run RUN --sources sources.json --output release/model_s [--note TEXT]
    python tools/publish_reference.py card --directory release/model_s --docs docs/training.md

``weights`` takes the run's newest whole checkpoint, without the optimizer's state, and needs neither network nor GPU.
``card`` generates the samples on the CPU, draws the curve, and writes README.md and the marked block of ``--docs``:
every number in them is computed from metrics.jsonl, run.json, sources.json and, where it is there, structures.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from microllm.errors import DataError
from microllm.evidence.journal import read_lines, write_atomic
from microllm.evidence.rows import markdown_table
from microllm.inference import load
from microllm.io.checkpoint import open_checkpoint, save_checkpoint
from microllm.io.resolve import resolve_model
from microllm.model import load_model
from microllm.sampling import SamplingParams
from microllm.training.checkpoints import latest_checkpoint
from microllm.training.curve import draw_curve
from microllm.training.metrics import FILE, MFU_FORMULA

SHARD_BYTES = 15_000_000
PROMPTS = (
    "In the beginning", "It is a truth universally acknowledged, that", "The Congress of the United States",
    "A list is", "The SELECT statement", "ROMEO.\n",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=48, temperature=0)
DRAWN = SamplingParams(max_tokens=96, temperature=0.8, seed=0)
BLOCK = re.compile(r"(<!-- reference run -->\n).*?(<!-- /reference run -->)", re.DOTALL)


def write_weights(run: Path, sources: Path, output: Path, note: str = "") -> None:
    """Write the newest checkpoint of ``run`` in bf16, its metrics, where its text comes from, and a note on the run."""
    complete, _ = latest_checkpoint(run / "checkpoints")
    if complete is None:
        raise DataError(f"got {run} without a whole checkpoint; need one")
    checkpoint = open_checkpoint(resolve_model(str(complete.path)))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    names = ("tokenizer.json", "tokenizer_config.json")
    save_checkpoint(
        output, replace(checkpoint.config, dtype="bfloat16"), dict(model.named_parameters()),
        text_files={name: (complete.path / name).read_bytes() for name in names}, max_shard_bytes=SHARD_BYTES,
        overwrite=True,
    )  # fmt: skip
    record = {key: complete.record[key] for key in ("step", "precision", "num_ranks", "versions", "device", "data")}
    config = {key: value for key, value in complete.record["config"].items() if key not in ("data", "output")}
    parameters = sum(p.numel() for p in model.parameters())
    _write_json(output / "run.json", record | {"num_parameters": parameters, "note": note, "config": config})
    rows = [json.loads(line) for line in read_lines(run / FILE)]
    rows = [row | {"path": Path(row["path"]).name} if "path" in row else row for row in rows]
    write_atomic(output / FILE, "".join(json.dumps(row) + "\n" for row in rows))
    shutil.copyfile(sources, output / "sources.json")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def figures(directory: Path) -> dict[str, Any]:
    """Return what metrics.jsonl says of the run, by name."""
    rows = [json.loads(line) for line in read_lines(directory / FILE)]
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row for row in rows if row["kind"] == "validation"]
    if not (steps and validations):
        raise DataError(f"got {directory / FILE} without a step or a validation; need both")
    usual = [row for row in steps if row["mfu"] is not None]
    memory = [row["peak_memory_bytes"] for row in steps if row["peak_memory_bytes"] is not None]
    stops = [row["step"] for row in rows if row["kind"] == "end"][:-1]
    firsts = {steps[0]["step"], *(stop + 1 for stop in stops)}
    return {
        "steps": steps[-1]["step"], "tokens": sum(row["num_tokens"] for row in steps),
        "train_loss": fmean(row["loss"] for row in steps[-50:]), "first_validation": validations[0],
        "validation": validations[-1], "perplexity": exp(validations[-1]["loss"]),
        "tokens_per_s": median(row["tokens_per_s"] for row in steps),
        "mfu": median(row["mfu"] for row in usual) if usual else None,
        "peak_memory_bytes": max(memory) if memory else None,
        "seconds": sum(row["seconds"]["total"] for row in steps),
        "first_seconds": sum(row["seconds"]["total"] for row in steps if row["step"] in firsts), "stops": stops,
    }  # fmt: skip


def figures_table(directory: Path) -> str:
    """Return the run's figures as a table."""
    found, run = figures(directory), _read(directory / "run.json")
    sources = _read(directory / "sources.json")
    config, first, last = run["config"], found["first_validation"], found["validation"]
    splits = {name: split["num_tokens"] for name, split in sources["splits"].items()}
    mfu = "n/a" if found["mfu"] is None else f"{found['mfu']:.1%}"
    memory = found["peak_memory_bytes"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()) if version)
    schedule, optimizer = config["schedule"], config["optimizer"]
    stops = ", ".join(map(str, found["stops"])) or "no step"
    rows = [
        ("model", f"{config['model']}, {run['num_parameters']:,} parameters, trained from random weights"),
        ("text", f"{splits['train']:,} tokens; {splits['validation']:,} more held out, by document"),
        ("steps", f"{found['steps']:,} of {config['batch_rows']} rows of {config['row_tokens']} tokens: "
                  f"{found['tokens']:,} tokens, {found['tokens'] / splits['train']:.1f} epochs"),
        ("optimizer", f"AdamW, rate {optimizer['learning_rate']:g}, weight decay {optimizer['weight_decay']:g}, "
                      f"{schedule['schedule']} after {schedule['warmup_steps']} steps of warm-up; {run['precision']}"),
        ("stopped and resumed", f"after {stops}, in a new process"),
        ("training loss", f"{found['train_loss']:.4f}, mean of the last 50 steps"),
        ("validation loss", f"{last['loss']:.4f} at step {last['step']} (perplexity {found['perplexity']:.2f}), "
                            f"{first['loss']:.4f} at step {first['step']}; {last['num_targets']:,} targets"),
        ("speed", f"{found['tokens_per_s']:,.0f} tokens/s, MFU {mfu}, at the median step; {found['seconds']:.0f} s in "
                  f"all steps, {found['first_seconds']:.0f} s of it in each process's first, which compiles"),
        ("peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"),
        ("device", f"{run['num_ranks']} x {run['device']}; {versions}"),
        *([("note", run["note"])] if run["note"] else []),
    ]  # fmt: skip
    return markdown_table(("what", "figure"), rows)


def gates_table(directory: Path) -> str:
    """Return what int8 and int4 structures do to it, or say that it was not measured."""
    if not (directory / "structures.json").exists():
        return "Not measured yet.\n"
    record = _read(directory / "structures.json")
    rows = [
        (row["scheme"], f"{row['agreement']:.4f}", f"{row['agreement_below_host']:+.4f}", f"{row['kl']:.2e}",
         f"{row['perplexity']:.3f} ({row['perplexity_change']:+.2%})", row["verdict"])
        for row in record["schemes"]
    ]  # fmt: skip
    columns = ("scheme", "agreement with fp32", "below the bf16 host", "KL, nats", "perplexity", "verdict")
    return markdown_table(columns, rows) + (
        f"\n{record['num_tokens']:,} tokens of the validation split, decoded {record['rows']} at a time; perplexity in "
        f"fp32 {record['fp32_perplexity']:.3f}, in bf16 {record['host_perplexity']:.3f}. Receipts: `receipts.jsonl`.\n"
    )


def greedy_samples(directory: Path) -> list[str]:
    """Return the likeliest continuation of each prompt, on the CPU in fp32."""
    return [done.text for done in load(directory, device="cpu", precision="fp32").generate(PROMPTS, GREEDY)]


def samples_text(directory: Path) -> str:
    """Return samples.md."""
    drawn = load(directory, device="cpu", precision="fp32").generate(PROMPTS, DRAWN)
    parts = ["# Samples\n\nOn a CPU in fp32: the likeliest tokens, then a draw at temperature 0.8 with seed 0.\n"]
    for prompt, likeliest, other in zip(PROMPTS, greedy_samples(directory), drawn, strict=True):
        parts.append(f"\n## {prompt.strip()}\n")
        parts += [f"\n```text\n{prompt}{text}\n```\n" for text in (likeliest, other.text)]
    return "".join(parts)


def card_text(directory: Path) -> str:
    """Return README.md."""
    sources = _read(directory / "sources.json")["sources"]
    rows = [
        (s["title"], s["requirement"].split(" --")[0] + f" ({s['manager']})", s["licence"], f"{s['num_documents']:,}",
         f"{s['num_tokens']:,}")
        for s in sources
    ]  # fmt: skip
    table = markdown_table(("text", "package", "licence", "documents", "tokens"), rows)
    return CARD.format(
        figures=figures_table(directory), sources=table, gates=gates_table(directory), formula=MFU_FORMULA,
        name=directory.name, row_tokens=_read(directory / "run.json")["config"]["row_tokens"],
    )  # fmt: skip


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {name}: the reference run

A language model of 15.6 million parameters, trained by this project from the first byte, so that tests and
measurements have a second trained model whose whole history is known. It continues text. It does not follow
instructions, knows little, and repeats itself; nothing was done about what it may say. It has read English alone, and
rows of {row_tokens} tokens: what it does with longer ones was not looked at. Do not build on it.

```console
$ microllm generate --model release/{name} --raw --prompt "In the beginning" --temperature 0.8
```

`transformers.AutoModelForCausalLM.from_pretrained` loads it too: a llama with 8,192 byte-level BPE tokens.

## The run

{figures}
MFU: {formula}.

![loss by step](curve.png)

`metrics.jsonl` has a line a step, `run.json` the whole configuration, `samples.md` what it says. The training state
(moments, fp32 weights) is not published. To repeat it, see "The reference run" in `docs/training.md`.

## What it read

{sources}
Prose and verse only: code, tables, menus and what repeats were left out (`tools/reference_text.py`). `sources.json`
has the SHA-256 of each package. Much of it is of the 17th to 19th century and speaks as those did, of people too.

## In fewer bits

Structures attached to it in `transformers`, teacher-forced on text that was held out:

{gates}"""


def write_card(directory: Path, document: Path | None) -> None:
    """Write samples, curve, card, and the document's block."""
    write_atomic(directory / "samples.md", samples_text(directory))
    draw_curve(directory).rename(directory / "curve.png")
    write_atomic(directory / "README.md", card_text(directory))
    if document is not None:
        write_atomic(document, filled(document.read_text(encoding="utf-8"), directory))


def filled(text: str, directory: Path) -> str:
    """Return a document with its marked block brought up to date."""
    block = f"{figures_table(directory)}\n{gates_table(directory)}"
    if not BLOCK.search(text):
        raise DataError("got a document without <!-- reference run --> and its end; need both lines")
    return BLOCK.sub(lambda match: match[1] + block + match[2], text)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Write the weights, or the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    weights = commands.add_parser("weights", help="the newest checkpoint in bf16, with its records")
    for name in ("--run", "--sources", "--output"):
        weights.add_argument(name, type=Path, required=True)
    weights.add_argument("--note", default="", help="what a reader of the figures must know of how they were made")
    card = commands.add_parser("card", help="samples, curve and card of such a directory")
    card.add_argument("--directory", type=Path, required=True)
    card.add_argument("--docs", type=Path, help="a document with a marked block")
    given = parser.parse_args()
    if given.command == "weights":
        write_weights(given.run, given.sources, given.output, given.note)
    else:
        write_card(given.directory, given.docs)


if __name__ == "__main__":
    main()
