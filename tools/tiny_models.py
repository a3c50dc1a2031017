"""Train the tiny qwen2 and qwen3 that the alignment tests use, with transformers, on the King James Bible.

    python tools/tiny_models.py                  train what the cache lacks, print where it lies
    python tools/tiny_models.py tiny-qwen2       train one

Random weights show few mistakes: their activations are small and alike, and every next token is as good as another.
These have learnt something in a minute: heads that look somewhere, activations of unlike size, tokens that are
decided. tiny-qwen2 has K biases as large as the published model's, which spoil a careless bf16 or int8 KV cache.

From Python: ``build("tiny-qwen2")`` returns the directory, in the user's cache, under a digest of this file.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fetch_test_data import fetch
from microllm.io.demo import cache_dir

VOCAB_SIZE = 1024
END = "<|endoftext|>"
TRAIN_CHARACTERS = 1_500_000  # Genesis to Psalms; what comes after is held out
NUM_STEPS, BATCH, LENGTH = 220, 16, 96
K_BIAS = 30.0  # in the slowest pairs of every head, where the published qwen2 models have theirs

SHAPES = {
    "tiny-qwen2": transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "tiny-qwen3": transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
}  # fmt: skip


def verses() -> str:
    """Return the whole text, one verse a line."""
    lines = (fetch("kjv") / "kjv.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


def held_out_text() -> str:
    """Return what no model was trained on."""
    return verses()[TRAIN_CHARACTERS:]


def build(name: str) -> Path:
    """Return the directory of the trained model ``name``, trained now unless the cache has it."""
    if name not in SHAPES:
        raise ValueError(f"got model {name!r}; need one of {', '.join(SHAPES)}")
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    home = cache_dir() / "tiny-models"
    target = home / f"{name}-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:  # two test processes train once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                ready = Path(scratch) / name
                _train(name, ready)
                os.replace(ready, target)
    return target


def _train(name: str, directory: Path) -> None:
    text = verses()[:TRAIN_CHARACTERS]
    tokenizer = _train_tokenizer(text)
    ids = torch.tensor(tokenizer.encode(text).ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = SHAPES[name]
        config.eos_token_id = config.bos_token_id = tokenizer.token_to_id(END)
        model = transformers.AutoModelForCausalLM.from_config(config)
        _enlarge_key_biases(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(NUM_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / NUM_STEPS))
            starts = torch.randint(len(ids) - LENGTH, (BATCH, 1))
            batch_BT = ids[starts + torch.arange(LENGTH)]
            loss = model(input_ids=batch_BT, labels=batch_BT).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval().save_pretrained(directory)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    fast.save_pretrained(directory)
    (directory / "training.json").write_text(
        json.dumps({"steps": NUM_STEPS, "last_loss": loss.item(), "torch": torch.__version__}) + "\n"
    )


def _train_tokenizer(text: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return tokenizer


def _enlarge_key_biases(model: torch.nn.Module) -> None:
    """Give each head a large constant key in its slowest quarter of pairs, where RoPE hardly turns it."""
    for name, bias in model.named_parameters():
        if name.endswith("k_proj.bias"):
            heads = bias.data.view(model.config.num_key_value_heads, 2, -1)
            slow = heads.shape[-1] * 3 // 4
            heads[:, :, slow:] = K_BIAS * torch.randn_like(heads[:, :, slow:]).sign()


def main() -> None:
    """Train the named models, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(SHAPES)}; default: all")
    transformers.utils.logging.disable_progress_bar()
    for name in parser.parse_args().names or SHAPES:
        started = time.perf_counter()
        directory = build(name)
        loss = json.loads((directory / "training.json").read_text())["last_loss"]
        print(f"{name}: {directory} (last loss {loss:.2f}, {time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
