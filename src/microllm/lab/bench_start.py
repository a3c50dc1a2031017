"""A peer's start as a person would write it: load the model, answer a chat message, write the first piece.

Place: ``startup`` runs it by its path in fresh processes and times it to its first byte of output. It stands alone, so
that a peer pays for its own imports and no others:

    python -P bench_start.py PEER MODEL PROMPT NUM_THREADS
    python -P bench_start.py convert GGUF DIRECTORY     what transformers starts from fastest
"""

# ruff: noqa: PLC0415  (each program imports what it starts)
from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def start_transformers(model: str, prompt: str, num_threads: int) -> str:
    """Return the first piece of an answer by ``transformers``: of a GGUF file in fp32, of a directory in its dtype."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(num_threads)
    folder, file = _split(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    dtype = torch.float32 if file else "auto"
    twin = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, local_files_only=True).eval()
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        token = twin(**ids, logits_to_keep=1).logits[0, -1].argmax()
    return tokenizer.decode([int(token)])


def start_llama_cpp(model: str, prompt: str, num_threads: int) -> str:
    """Return the first piece of an answer by llama.cpp."""
    llama_cpp = importlib.import_module("llama_cpp")
    options = {"n_threads": num_threads, "n_threads_batch": num_threads, "flash_attn": True, "verbose": False}
    llm = llama_cpp.Llama(model, n_ctx=512, **options)
    messages = [{"role": "user", "content": prompt}]
    for piece in llm.create_chat_completion(messages, stream=True, temperature=0.0, max_tokens=8):
        text = piece["choices"][0]["delta"].get("content")
        if text:
            return text
    return ""


def convert(model: str, directory: str) -> None:
    """Write a GGUF file's weights in bf16 and its tokenizer as ``transformers`` saves them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, file = _split(model)
    twin = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16, local_files_only=True)
    config = AutoConfig.from_pretrained(folder, gguf_file=file, local_files_only=True)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # one read from GGUF refuses to be saved
    plain.load_state_dict(twin.state_dict())
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True).save_pretrained(directory)


def _split(model: str) -> tuple[str, str | None]:
    path = Path(model)
    return (str(path), None) if path.is_dir() else (str(path.parent), path.name)


def main() -> None:
    """Do what the arguments say, and put the first piece of an answer on standard output."""
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    match sys.argv[1:]:
        case ["convert", model, directory]:
            convert(model, directory)
        case ["transformers", model, prompt, count]:
            os.write(output, start_transformers(model, prompt, int(count)).encode())
        case ["llama.cpp", model, prompt, count]:
            os.write(output, start_llama_cpp(model, prompt, int(count)).encode())


if __name__ == "__main__":
    main()
