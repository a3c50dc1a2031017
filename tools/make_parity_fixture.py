"""Write tests/data/greedy_parity.json: what transformers generates greedily, in fp32, from the demo's GGUF file.

    python tools/make_parity_fixture.py tests/data/greedy_parity.json

Twenty prompts of different lengths and scripts, and the question of the demo with its chat template; 32 tokens each,
end-of-text ignored. A minute or two. Prompts are tokenised here and compared by token ids: transformers' conversion
of this file's tokenizer splits digits otherwise. A prompt on which fp32 is nearly undecided would test rounding and
not the model, so it is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from microllm.io.demo import DEMO_SHA256
from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.hf_twin import generate_greedily, load_twin

NUM_TOKENS = 32
MIN_MARGIN = 2e-3  # of top-1 over top-2, in logits: twenty times what two fp32 implementations differ by
QUESTION = "What is the capital of France?"
PROMPTS = (
    "A",
    "Once upon a time",
    "The capital of Japan is",
    "To be, or not to be, that is the question:",
    "def fibonacci(n: int) -> int:\n    ",
    "for (int i = 0; i < n; ++i) {\n\t",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "12 + 30 = 42; 17 + 25 =",
    "| city | country |\n|---|---|\n| Rome | Italy |\n| Oslo |",
    "Les sanglots longs des violons de l'automne",
    "Съешь же ещё этих мягких французских булок",
    "Η Αθήνα είναι η πρωτεύουσα",  # noqa: RUF001  Greek
    "日本の首都は東京です。フランスの首都は",
    "敏捷的棕色狐狸跳过了懒狗。",
    "대한민국의 수도는",
    "العاصمة الفرنسية هي",
    "नमस्ते, आप कैसे हैं? 🙂👍🏽",
    "The lighthouse keeper wrote one line a day. On the first of March she noted the wind, north-west, force seven, "
    "and the number of ships: three. On the second she wrote that the lamp had been cleaned, that the oil would last "
    "until Easter, and that nobody had come. By the end of the month there were thirty-one lines, and a reader who "
    "knew nothing of the sea could have drawn the coast from them. In April the relief boat was late by nine days, "
    "and she wrote that as well: nine lines, each a little shorter than the last. On the tenth",
)


def generate_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row a text: its ids, transformers' tokens, and the smallest margin they were chosen by.

    The question of the demo goes through the chat template, the others are raw.
    """
    source = resolve_model("demo")
    tokenizer, twin = load_tokenizer(source), load_twin(source)
    rows: list[dict[str, Any]] = []
    for text in texts:
        is_chat = text == QUESTION
        ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text)
        tokens, logits = generate_greedily(twin, ids, NUM_TOKENS)
        top = logits.topk(2).values
        margin = (top[:, 0] - top[:, 1]).min().item()
        rows.append({"text": text, "chat": is_chat, "prompt_ids": ids, "token_ids": tokens, "margin": margin})
    return rows


def main() -> None:
    """Write the fixture, or name the prompts that are too close to call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    rows = generate_rows((QUESTION, *PROMPTS))
    close = [f"{row['margin']:.1e} {row['text'][:40]!r}" for row in rows if row["margin"] < MIN_MARGIN]
    if close:
        parser.exit(1, "too close to call in fp32, choose other prompts:\n" + "\n".join(close) + "\n")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "gguf", "numpy")}
    head = {"made_by": "tools/make_parity_fixture.py", "gguf_sha256": DEMO_SHA256, "dtype": "float32"}
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps({**head, "versions": versions})[:-1] + f', "rows": [\n{lines}\n]}}\n'
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {len(rows)} prompts, smallest margin {min(row['margin'] for row in rows):.1e}")


if __name__ == "__main__":
    main()
