"""A tiny model on disk, and servers of it in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tokenizers

from microllm.config import preset
from microllm.io.checkpoint import save_checkpoint
from microllm.io.hf_config import GenerationDefaults
from microllm.model import Transformer

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
CONTEXT = 512


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model over bytes with a few words; weights that give varied text, "<|end|>" now and then."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "an", "and"]
    vocab = {piece: i for i, piece in enumerate(["<|end|>", "<|user|>", *alphabet, *words])}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    text_files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}).encode(),
    }
    config = preset("tiny", max_position_embeddings=CONTEXT, eos_token_ids=(0,))
    place = tmp_path_factory.mktemp("models") / "tiny"
    weights = Transformer(config).initialise(seed=3, std=0.3).state_dict()
    defaults = GenerationDefaults(temperature=0.5, top_k=7, eos_token_ids=(0,))
    save_checkpoint(place, config, weights, generation=defaults, text_files=text_files)
    return str(place)


class Server:
    """One server's process, and what asks it."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def chat(self, content="Hello", **more):
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, **more}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt="Hello", **more):
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "temperature": 0, **more})

    def stats(self):
        return self.http.get("/stats").json()

    def metric(self, name):
        """Return the sum of a metric's values."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def engine_pids(self):
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        found = [(task / "children").read_text().split() for task in tasks]
        return [int(pid) for pids in found for pid in pids]

    def wait_until(self, condition, seconds=30):
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {seconds} s; {self.stats()}; {self.log.read_text()[-2000:]}"
            time.sleep(0.02)
        return found

    def settle(self):
        """Wait until nothing runs; then every page must be back."""
        self.wait_until(lambda: (s := self.stats())["waiting"] == s["running"] == 0 and s["kv_used"] == 0)

    def lines(self, event):
        return [line for text in self.log.read_text().splitlines() if (line := _json(text)).get("event") == event]


def _json(text):
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def serving(model, place, *flags, name="tiny", environment=None, wait="/ready"):
    """Run a server on a free port until the block ends, then stop it and see it exit with 0."""
    log = place / f"log-{time.monotonic_ns()}.jsonl"
    command = [sys.executable, "-m", "microllm", "serve", "--model", model, "--served-name", name, "--port", "0"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("w") as errors:
        process = subprocess.Popen([*command, *flags], stderr=errors, env=variables)
    server = None
    try:
        end = time.monotonic() + 60
        while server is None:
            assert (process.poll(), time.monotonic() < end) == (None, True), log.read_text()
            found = [line for text in log.read_text().splitlines() if (line := _json(text)).get("event") == "listening"]
            server = Server(process, found[0]["url"], log) if found else None
            time.sleep(0.02)
        while server.http.get(wait).status_code != 200:
            assert (process.poll(), time.monotonic() < end) == (None, True), log.read_text()
            time.sleep(0.05)
        yield server
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        assert not server.lines("ASGI callable returned without completing response.")
    finally:
        process.kill()
        process.wait()
        if server is not None:
            server.http.close()


@pytest.fixture(scope="package")
def server(tiny, tmp_path_factory):
    """The server that most tests ask."""
    flags = ["--max-rows", "4", "--max-queue", "28", "--client-timeout-s", "2", "--max-body-bytes", "300000"]
    with serving(tiny, tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture
def settled(server):
    """That server, which must have every page back when the test ends."""
    yield server
    server.settle()


@pytest.fixture(scope="session")
def serve(tiny, tmp_path_factory):
    """A context manager that runs another server of the tiny model, with flags of its own."""
    return lambda *flags, **more: serving(tiny, tmp_path_factory.mktemp("server"), *flags, **more)
