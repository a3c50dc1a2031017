"""One arm of a benchmark in a process of its own: it loads its model once, then does what each line of input asks.

Place: ``bench_process`` starts it by its path, ``python -P bench_worker.py ARM``, so that no two arms share threads or
memory. It stands alone: each arm imports what it measures and nothing else, so that llama.cpp's process holds no torch.
Requests and answers are JSON objects, one a line; logits go through a file. Does not judge, and never prints.

An arm's ``decode`` times greedy tokens that cost one forward pass each, the prompt and the first token before them;
``prefill`` times a prompt up to its first token. Ours goes through the public API with all that it does (choice of the
token, text); the peers get the shortest loop there is: forward pass, argmax.
"""

# ruff: noqa: PLC0415  (each arm imports what it measures, in its own process)
from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Steps = tuple[float, int, int]
"""Seconds, tokens, forward passes."""


class Arm(Protocol):
    """What each arm offers."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the ways to run it, of which the fastest is to be taken."""
        ...

    @property
    def dtype(self) -> str:
        """Return what it computes in."""
        ...

    def prefill(self, form: str, ids: list[int]) -> Steps:
        """Time a prompt up to its first token."""
        ...

    def decode(self, form: str, ids: list[int], num_tokens: int) -> Steps:
        """Time ``num_tokens`` after the first."""
        ...

    def logits(self, form: str, ids: list[int], *, one_by_one: bool) -> np.ndarray:
        """Return the logits after each token, [T, V] in fp32: from one forward pass, or one a token."""
        ...


class Ours:
    """``microllm.load``, through ``LLM.stream``."""

    forms = ("stream",)

    def __init__(self, model: str, precision: str, num_threads: int, context: int) -> None:
        import torch

        from microllm.inference import load
        from microllm.lab.quality import forced_logits
        from microllm.sampling import SamplingParams

        torch.set_num_threads(num_threads)
        self._params, self._forced_logits = SamplingParams, forced_logits
        self._llm = load(model, device="cpu", precision=precision)
        self.dtype, self._num_forwards = self._llm.precision, 0
        self._llm.model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_forwards += 1

    def _generate(self, ids: list[int], num_tokens: int, num_untimed: int) -> Steps:
        params = self._params(temperature=0, ignore_eos=True, max_tokens=num_tokens + num_untimed)
        started, before, num_done = time.perf_counter(), self._num_forwards, 0
        with self._llm.stream(ids, params) as pieces:
            for _ in range(num_untimed):
                next(pieces)
                started, before = time.perf_counter(), self._num_forwards
            for piece in pieces:
                num_done += len(piece.token_ids)
            seconds = time.perf_counter() - started
        return seconds, num_done, self._num_forwards - before

    def prefill(self, form: str, ids: list[int]) -> Steps:
        """Time a prompt up to its first token."""
        return self._generate(ids, 1, 0)

    def decode(self, form: str, ids: list[int], num_tokens: int) -> Steps:
        """Time ``num_tokens`` after the first."""
        return self._generate(ids, num_tokens, 1)

    def logits(self, form: str, ids: list[int], *, one_by_one: bool) -> np.ndarray:
        """Return the logits after each token; one by one they come from the step that ``decode`` runs."""
        return self._forced_logits(self._llm, ids, "decode" if one_by_one else "prefill").numpy()


class Transformers:
    """The model as ``transformers`` reads it from the same file, eager, SDPA attention, without ``generate``."""

    forms = ("dynamic cache", "static cache")

    def __init__(self, model: str, precision: str, num_threads: int, context: int) -> None:
        import torch
        import transformers

        from microllm.io.resolve import resolve_model
        from microllm.lab.hf_twin import load_twin

        torch.set_num_threads(num_threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self._torch, self._transformers = torch, transformers
        self._twin, self._context = load_twin(resolve_model(model), dtype=dtype), context
        self.dtype, self._num_forwards = precision, 0
        self._twin.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_forwards += 1

    def _run(self, form: str, ids: list[int], num_tokens: int, *, with_prompt: bool) -> Steps:
        torch, config = self._torch, self._twin.config
        static = form == "static cache"
        with torch.inference_mode():
            started, before = time.perf_counter(), self._num_forwards
            cache = (
                self._transformers.StaticCache(config=config, max_cache_len=self._context) if static
                else self._transformers.DynamicCache(config=config)
            )  # fmt: skip
            token = self._next(torch.tensor([ids]), cache)
            if not with_prompt:
                started, before = time.perf_counter(), self._num_forwards
            for _ in range(num_tokens):
                token = self._next(token, cache)
                token.item()  # a user reads each token as it comes
            return time.perf_counter() - started, num_tokens + with_prompt, self._num_forwards - before

    def _next(self, ids_BT: Any, cache: Any) -> Any:  # noqa: ANN401  (torch's and transformers' own)
        return self._twin(ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    def prefill(self, form: str, ids: list[int]) -> Steps:
        """Time a prompt up to its first token."""
        return self._run(form, ids, 0, with_prompt=True)

    def decode(self, form: str, ids: list[int], num_tokens: int) -> Steps:
        """Time ``num_tokens`` after the first."""
        return self._run(form, ids, num_tokens, with_prompt=False)

    def logits(self, form: str, ids: list[int], *, one_by_one: bool) -> np.ndarray:
        """Return the logits after each token; always from one pass, which has the same weights."""
        with self._torch.inference_mode():
            return self._twin(self._torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


class LlamaCpp:
    """llama.cpp through ``Llama.eval`` and its own logits, which it keeps of the last token only."""

    forms = ("flash attention", "plain attention")
    dtype = "Q4_1"

    def __init__(self, model: str, precision: str, num_threads: int, context: int) -> None:
        llama_cpp = importlib.import_module("llama_cpp")

        self._llama_cpp, self._model, self._threads, self._context = llama_cpp, model, num_threads, context
        self._form, self._llm = "", None

    def _open(self, form: str, *, logits_all: bool = False) -> Any:  # noqa: ANN401  (llama_cpp has no types here)
        return self._llama_cpp.Llama(
            self._model, n_ctx=self._context, n_batch=512, n_ubatch=512, n_threads=self._threads,
            n_threads_batch=self._threads, flash_attn=form == "flash attention", logits_all=logits_all,
            no_perf=False, verbose=False,
        )  # fmt: skip

    def _run(self, form: str, ids: list[int], num_tokens: int, *, with_prompt: bool) -> Steps:
        if self._llm is None or form != self._form:
            self.close()
            self._form, self._llm = form, self._open(form)
        llm, cpp = self._llm, self._llama_cpp
        llm.reset()
        cpp.llama_perf_context_reset(llm.ctx)
        started = time.perf_counter()
        llm.eval(ids)
        token = int(self._last_logits(llm).argmax())
        prompt_s = time.perf_counter() - started
        num_prompt = cpp.llama_perf_context(llm.ctx).n_p_eval
        if num_prompt != len(ids):
            raise RuntimeError(f"got {num_prompt} prompt tokens evaluated by llama.cpp; need {len(ids)}")
        if with_prompt:
            return prompt_s, 1, 1
        cpp.llama_perf_context_reset(llm.ctx)
        started = time.perf_counter()
        for _ in range(num_tokens):
            llm.eval([token])
            token = int(self._last_logits(llm).argmax())
        seconds = time.perf_counter() - started
        return seconds, num_tokens, cpp.llama_perf_context(llm.ctx).n_eval  # llama.cpp's own count of single tokens

    def _last_logits(self, llm: Any) -> np.ndarray:  # noqa: ANN401
        return np.ctypeslib.as_array(self._llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))

    def close(self) -> None:
        """Free the context that is open, if one is."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def prefill(self, form: str, ids: list[int]) -> Steps:
        """Time a prompt up to its first token."""
        return self._run(form, ids, 0, with_prompt=True)

    def decode(self, form: str, ids: list[int], num_tokens: int) -> Steps:
        """Time ``num_tokens`` after the first."""
        return self._run(form, ids, num_tokens, with_prompt=False)

    def logits(self, form: str, ids: list[int], *, one_by_one: bool) -> np.ndarray:
        """Return the logits after each token, from a context of their own that goes at once."""
        with contextlib.closing(self._open(form, logits_all=not one_by_one)) as llm:
            if not one_by_one:
                llm.eval(ids)
                return np.array(llm.scores[: len(ids)], dtype=np.float32)
            found = []
            for token in ids:
                llm.eval([token])
                found.append(self._last_logits(llm).astype(np.float32))
            return np.stack(found)


ARMS: dict[str, Callable[[str, str, int, int], Arm]] = {
    "microllm": Ours, "transformers": Transformers, "llama.cpp": LlamaCpp,
}  # fmt: skip


def handle(arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request and return the answer to it.

    Units:   ``cpu_s`` is processor time of all threads, so that the asker can tell other work on the machine from this
    """
    match request["do"]:
        case "memory":
            return {"peak_bytes": take_peak_bytes()}
        case "logits":
            found = arm.logits(request["form"], request["ids"], one_by_one=request["one_by_one"])
            np.save(request["path"], found)
            return {}
        case "decode":
            before = time.process_time()
            steps = arm.decode(request["form"], request["ids"], request["num_tokens"])
        case _:
            before = time.process_time()
            steps = arm.prefill(request["form"], request["ids"])
    seconds, num_tokens, num_forwards = steps
    cpu_s = time.process_time() - before
    return {"seconds": seconds, "num_tokens": num_tokens, "num_forwards": num_forwards, "cpu_s": cpu_s}


def take_peak_bytes() -> int | None:
    """Return the most memory that was resident since the last call, None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else None


def main() -> None:
    """Load the arm that the first argument describes, say how it went, and answer requests until the input ends."""
    given = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the asker ends its workers itself
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)  # what a library prints is no answer

        def answer(content: dict[str, Any]) -> None:
            output.write(json.dumps(content) + "\n")
            output.flush()

        try:
            arm = ARMS[given["arm"]](given["model"], given["precision"], given["num_threads"], given["context"])
        except ModuleNotFoundError as error:
            answer({"missing": error.name})
            return
        answer({"forms": arm.forms, "dtype": arm.dtype})
        for line in sys.stdin:
            answer(handle(arm, json.loads(line)))


if __name__ == "__main__":
    main()
