"""The decode loop: a host generates through a cache of ours, a whole step captured, over whatever is attached.

Place: ``decode_loop`` makes one of any host that a binding fits. On a GPU a step (stack, head, argmax) is
one graph a number of rows, replayed ahead of what is read back; elsewhere it runs as it is. A row has its own length,
parameters and end. The host's own ``generate`` is not touched, nor its config.

Axes:    B = rows, T = tokens, V = vocabulary
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microllm.errors import RequestError, StructureError
from microllm.sampling import SamplingParams
from microllm.sampling.sampler import Sampler
from microllm.structures.binding import load_bindings
from microllm.structures.build import AttachConfig
from microllm.structures.discovery import SAME
from microllm.structures.host import Host, find_host
from microllm.structures.impls import cosine
from microllm.structures.judge import logits_in
from microllm.structures.sites import MAX_TOKENS, attachment_of
from microllm.structures.speculation import Speculation, open_draft
from microllm.structures.stack import logits_of, run_prompt
from microllm.structures.step import Step

MAX_STEPS_KEPT = 4
"""Numbers of rows whose caches and graphs a loop keeps."""


def decode_loop(model: nn.Module, *, max_len: int = 4096, config: AttachConfig | None = None) -> DecodeLoop:
    """Return a loop over a model, with whatever is attached to it now or later.

    Raises:
        StructureError: no binding fits the model, it trains, or its forward is more than its stack and head.
    """
    config = config or AttachConfig()
    host = find_host(model, load_bindings(config.load_catalog(), config.bindings))
    if any(module.training for module in model.modules()):
        raise StructureError("got a model in training mode; need eval()")
    implementation = getattr(host.calls, "implementation", "sdpa")
    if implementation not in ("sdpa", "eager"):
        raise StructureError(f"got attention {implementation!r}; need sdpa or eager, which take a mask; load it so")
    if any(getattr(m, "sliding_window", None) is not None for layer in host.layers for m in layer.modules()):
        raise StructureError("got a sliding window; need attention to all keys")
    return DecodeLoop(host, max_len)


class DecodeLoop:
    """A host's stack, a cache and a step for each number of rows, and the requests that run through them.

    Units:   ``max_len`` in tokens, prompt and answer together
    """

    def __init__(self, host: Host, max_len: int) -> None:
        if max_len < 2:
            raise RequestError(f"got max_len={max_len}; need at least 2")
        self.host, self.max_len = host, max_len
        self._steps: dict[tuple[int, int], Step] = {}
        self._fingerprint: tuple[int, ...] = ()
        self._busy = threading.Lock()
        self._closed = False
        self._speculation: Speculation | None = None
        self.last_acceptance: float | None = None
        """Tokens a round of the last speculative run."""
        self._check_forward()

    @property
    def captured(self) -> bool:
        """Return whether its steps are graphs."""
        return self.host.weight.is_cuda

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a sequence, as the host's own configuration says."""
        for holder in ("generation_config", "config"):
            found = getattr(getattr(self.host.model, holder, None), "eos_token_id", None)
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        return frozenset()

    def generate(
        self, prompts: Sequence[int] | Sequence[Sequence[int]] | Tensor, params: SamplingParams | None = None, *,
        max_new_tokens: int | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return each prompt's new tokens; greedy without parameters. The end token is the last of them.

        Raises:
            RequestError: an empty prompt, one that leaves no room, an id that is none, or stop texts.
        """
        rows = _rows(prompts)
        answers: list[list[int]] = [[] for _ in rows]
        for found in self._tokens(rows, params, max_new_tokens):
            for row, token in found:
                answers[row].append(token)
        return answers

    def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, max_new_tokens: int | None = None
    ) -> Iterator[int]:  # fmt: skip
        """Yield one prompt's new tokens as they come; leaving the iteration ends it."""
        for found in self._tokens([[int(token) for token in prompt]], params, max_new_tokens):
            yield from (token for _, token in found)

    def enable_draft(self, draft: str | Path | nn.Module, k: int = 6) -> None:
        """Let guesses run ahead: "ngram", a model, a directory of one, or a directory with ``mtp.*`` tensors ("mtp").

        Raises:
            StructureError: k does not fit a step, or the draft does not fit the host.
        """
        if not 1 <= k < MAX_TOKENS:
            raise StructureError(f"got k={k}; need 1 to {MAX_TOKENS - 1}: a step takes {MAX_TOKENS} tokens a row")
        self._speculation = Speculation(open_draft(draft, self.host, self._another), k)

    @torch.inference_mode()
    def generate_speculative(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that ``generate`` gives greedily, in fewer steps where guesses are right.

        Raises:
            StructureError: no draft is enabled.
            RequestError: as ``generate``; the room includes the guesses.
        """
        if self._speculation is None:
            raise StructureError("got no draft; need enable_draft() first")
        row = [int(token) for token in prompt]
        speculation = self._speculation
        self._check([row], max_new_tokens + speculation.k)
        with self._running():
            step = self._step(1, speculation.k + 1)
            tokens, rounds = speculation.run(step, row, max_new_tokens, self.eos_ids)
            step.settle()
        self.last_acceptance = len(tokens) / max(1, rounds)
        return tokens

    def _another(self, model: nn.Module) -> DecodeLoop:
        return decode_loop(model, max_len=self.max_len)

    def close(self) -> None:
        """Drop caches and graphs; the host is what it was all along. Once more does nothing."""
        self._steps.clear()
        self._speculation, self._closed = None, True

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._closed:
            raise StructureError("got a closed loop; need an open one; make another with decode_loop()")
        if not self._busy.acquire(blocking=False):
            raise StructureError("got a second generation while one runs; need one at a time; end the other first")
        try:
            fingerprint = self._seen()
            if fingerprint != self._fingerprint:  # attached, detached or moved since: graphs speak of what was
                self._steps.clear()
                self._fingerprint = fingerprint
            yield
        finally:
            self._busy.release()

    def _seen(self) -> tuple[int, ...]:
        model = self.host.model
        forwards = [id(vars(module).get("forward")) for module in model.modules() if "forward" in vars(module)]
        attachment = attachment_of(model)
        forms = [] if attachment is None else [hash((s.form, s.active)) for s in attachment.seats]
        return (*forwards, *forms, *(p.data_ptr() for p in model.parameters()))

    def _step(self, num_rows: int, width: int) -> Step:
        key = (num_rows, width)
        if key not in self._steps:
            while len(self._steps) >= MAX_STEPS_KEPT:
                self._steps.pop(next(iter(self._steps)))
            self._steps[key] = Step(self.host, num_rows, width, self.max_len)
        return self._steps[key]

    def _tokens(
        self, rows: list[list[int]], params: SamplingParams | None, max_new_tokens: int | None
    ) -> Iterator[list[tuple[int, int]]]:  # fmt: skip
        params = params or SamplingParams(temperature=0.0)
        if max_new_tokens is not None:
            params = replace(params, max_tokens=max_new_tokens)
        self._check(rows, 1)
        if params.stop_texts or params.n != 1 or params.logprobs is not None:
            raise RequestError("got stop texts, n or logprobs; need none: a loop knows token ids alone; use an engine")
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        samplers = [Sampler(params, seed=seed, choice=0, prompt_ids=row, stop_ids=ends) for row in rows]
        limits = [min(params.max_tokens, self.max_len - len(row)) for row in rows]
        with self._running():
            step = self._step(len(rows), 1)
            try:
                yield from _decoded(self.host, step, rows, samplers, limits, ends)
            finally:
                step.settle()

    def _check(self, rows: list[list[int]], room: int) -> None:
        vocabulary = self.host.weight.shape[0]
        for row in rows:
            if not row or len(row) + room > self.max_len or not all(0 <= token < vocabulary for token in row):
                raise RequestError(
                    f"got a prompt of {len(row)} tokens; need 1 to {self.max_len - room} ids below {vocabulary}; "
                    "make max_len larger or the prompt shorter"
                )
        if not rows:
            raise RequestError("got no prompt; need at least one")

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Raise unless stack and head give what the host's own forward gives."""
        like = self.host.weight
        ids = (torch.arange(5, device=like.device) * 7919 % like.shape[0])[None]
        wanted = logits_in(self.host.model(ids))[:, -1:]
        step = Step(self.host, 1, 1, 16, capture=False)
        agreement = cosine(logits_of(self.host, run_prompt(self.host, ids, step.cache)), wanted)
        if not agreement >= SAME:
            raise StructureError(
                f"got a model whose forward is more than its stack and head (cosine {agreement:.5f}); need {SAME}"
            )


def _decoded(
    host: Host, step: Step, rows: list[list[int]], samplers: list[Sampler], limits: list[int], ends: frozenset[int]
) -> Iterator[list[tuple[int, int]]]:  # fmt: skip
    """Yield (row, token) of each step until every row has ended."""
    live = list(range(len(rows)))
    greedy = all(sampler.takes_top for sampler in samplers)
    chosen = step.prompt(rows, None if greedy else samplers)
    source = step.greedy() if greedy else step.sampled(samplers)
    while True:
        found = []
        for row in list(live):
            token = chosen[row]
            if token < 0:
                raise RequestError(f"got logits of row {row} that are not finite; need a model that computes")
            samplers[row].accept(token)
            limits[row] -= 1
            found.append((row, token))
            if token in ends or not limits[row]:
                live.remove(row)
        yield found
        if not live:
            return
        chosen = next(source)


def _rows(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if len(prompts) and isinstance(prompts[0], int):
        prompts = [prompts]
    return [[int(token) for token in row] for row in prompts]
