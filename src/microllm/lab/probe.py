"""Does a request get the same bits whatever runs beside it? Run it in many surroundings and compare.

Place: called by ``microllm probe``. A request alone is the truth; each case puts the same one elsewhere and says where
the first token or log-probability differs. Cases make sure that they are what they claim: a prefix hit that did not
hit, a preemption that did not happen, or guesses of which none was right, or none wrong, are a failed case.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from microllm.errors import ConfigError
from microllm.inference.completion import Completion
from microllm.inference.engine import Engine
from microllm.inference.engine_config import EngineConfig
from microllm.inference.llm import LLM
from microllm.inference.request import Request
from microllm.sampling import SamplingParams
from microllm.sampling.draft import Draft
from microllm.step import layer_dtypes, page_bytes

PROMPT_TOKENS, PAGE_TOKENS = 40, 16
CHUNKS = (5, 16, 64)
"""Prompt tokens a step: below a page, a page, more than the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """What the probe runs.

    Args:
        strangers: Requests beside the probed one; None is 63 on a GPU and 7 on a CPU.
        max_tokens: Tokens that it generates, at least 10, so that a preemption has time to come; with the prompt's 40
            within the model's context.
        kv_dtype: What keys and values are stored as: auto, fp32, bf16, fp16 or fp8.
        seed: Of the prompts and the draws.
    """

    strangers: int | None = None
    max_tokens: int = 16
    kv_dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.strangers is not None and self.strangers < 1) or self.max_tokens < 10:
            raise ConfigError(
                f"got strangers={self.strangers}, max_tokens={self.max_tokens}; need at least 1 and at least 10"
            )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One surrounding: whether tokens and log-probabilities are those of the request alone, and what differs."""

    case: str
    passed: bool
    detail: str
    seconds: float


def probe_batch_invariance(llm: LLM, config: ProbeConfig) -> list[ProbeResult]:
    """Return the verdict on each surrounding, for a greedy and a sampled request.

    Raises:
        ConfigError: prompt and answer do not fit into the model's context; its weights are int8 or int4.
    """
    most = llm.config.max_position_embeddings - PROMPT_TOKENS
    if config.max_tokens > most:
        raise ConfigError(f"got max_tokens={config.max_tokens}; need at most {most}, the context after the prompt")
    probe = _Probe(llm, config)
    plain = probe.plain
    alone = [probe.run_alone(params, plain).completion for params in probe.params]
    cases: dict[str, Callable[[SamplingParams], Request]] = {
        "alone, again": lambda params: probe.run_alone(params, plain),
        "alone, serial scheduler": lambda params: probe.run_alone(params, replace(plain, scheduler="serial")),
        f"first of {probe.num_strangers + 1}": lambda params: probe.run_among(params, before=0),
        f"last of {probe.num_strangers + 1}": lambda params: probe.run_among(params, before=probe.num_strangers),
        f"amid {probe.num_strangers} strangers": lambda params: probe.run_among(
            params, before=probe.num_strangers // 2
        ),
        "after a prefix hit": probe.run_after_hit,
        "after a preemption": probe.run_preempted,
        "with speculation": lambda params: probe.run_guessed(params, alone[probe.params.index(params)]),
    }
    if llm.device.type == "cuda":  # the cases above replay captured steps, one by one
        uncaptured = replace(plain, steps="uncaptured")
        cases["alone, not captured"] = lambda params: probe.run_alone(params, uncaptured)
        cases[f"in bursts of steps, amid {probe.num_strangers} strangers"] = lambda params: probe.run_among(
            replace(params, logprobs=None), before=probe.num_strangers // 2
        )
    for chunk in CHUNKS:
        chunked = replace(plain, max_rows=1, max_step_tokens=1 + chunk)
        cases[f"prompt in chunks of {chunk}"] = lambda params, chunked=chunked: probe.run_alone(params, chunked)
    results = []
    for case, run in cases.items():
        started, problems = time.perf_counter(), []
        for kind, params, truth in zip(("greedy", "sampled"), probe.params, alone, strict=True):
            request = run(params)
            found = _difference(truth, request.completion) or _untrue(case, request)
            problems += [f"{kind}: {found}"] if found else []
        results.append(ProbeResult(case, not problems, "; ".join(problems), time.perf_counter() - started))
    return results


class _Probe:
    """The probed request, its strangers, and an engine for each case."""

    def __init__(self, llm: LLM, config: ProbeConfig) -> None:
        self._llm, self._config = llm, config
        self._tight_pages = max(6, -(-(PROMPT_TOKENS + config.max_tokens) // PAGE_TOKENS) + 1)
        self.plain = EngineConfig(
            max_rows=4, max_context=max(128, self._tight_pages * PAGE_TOKENS), page_tokens=PAGE_TOKENS,
            kv_dtype=config.kv_dtype, deterministic=True,
        )  # fmt: skip
        self.num_strangers = config.strangers or (63 if llm.device.type == "cuda" else 7)
        self._random = random.Random(config.seed)
        known = llm.tokenizer.known_ids_mask(llm.config.vocab_size).nonzero()[:, 0].tolist()
        self._ids = [token for token in known if token not in llm.eos_ids]
        self._prompt = self._draw(PROMPT_TOKENS)
        greedy = SamplingParams(temperature=0, max_tokens=config.max_tokens, logprobs=3, ignore_eos=True)
        self.params = (greedy, replace(greedy, temperature=0.9, top_p=0.95, seed=config.seed + 1))

    def run_alone(self, params: SamplingParams, config: EngineConfig) -> Request:
        """Run it in an engine of its own."""
        return _run_last(Engine(self._llm, config), [(self._prompt, params)])

    def run_among(self, params: SamplingParams, *, before: int) -> Request:
        """Run it with strangers that came before and after it."""
        work = [self._stranger(3 + 5 * i % 60) for i in range(self.num_strangers)]
        engine = Engine(self._llm, replace(self.plain, max_rows=self.num_strangers + 1))
        added = [engine.add(*each)[0] for each in (*work[:before], (self._prompt, params), *work[before:])]
        _finish(engine)
        return added[before]

    def run_after_hit(self, params: SamplingParams) -> Request:
        """Run it after another prompt that began alike."""
        engine = Engine(self._llm, self.plain)
        _run_last(engine, [([*self._prompt[:33], *self._draw(5)], params)])
        return _run_last(engine, [(self._prompt, params)])

    def run_preempted(self, params: SamplingParams) -> Request:
        """Run it beside an older request that takes its pages away."""
        pages = self._tight_pages  # for both prompts, or for one whole request: not for two
        older = replace(params, max_tokens=pages * PAGE_TOKENS - PROMPT_TOKENS, seed=5)
        dtype = self._llm.transformer.norm.weight.dtype
        dtypes = layer_dtypes(self._llm.config, self._config.kv_dtype, dtype)
        tight = replace(self.plain, kv_bytes=pages * page_bytes(self._llm.config, PAGE_TOKENS, dtypes))
        return _run_last(Engine(self._llm, tight), [(self._draw(PROMPT_TOKENS), older), (self._prompt, params)])

    def run_guessed(self, params: SamplingParams, truth: Completion) -> Request:
        """Run it with guesses of which the first are right and the last is wrong, whatever the model is."""
        engine = Engine(self._llm, replace(self.plain, speculate=4))
        (request,) = engine.add(self._prompt, params)
        request.draft = Draft(lambda: _Oracle(truth.token_ids, self._ids), 4)
        _finish(engine)
        return request

    def _stranger(self, length: int) -> tuple[list[int], SamplingParams]:
        seed = self._random.randrange(2**31)
        return self._draw(length), SamplingParams(temperature=1, seed=seed, max_tokens=self._random.randint(2, 20))

    def _draw(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)


class _Oracle:
    """Proposes what an answer is known to go on with, and at the end one token that it does not."""

    num_bytes = 0

    def __init__(self, answer: Sequence[int], ids: Sequence[int]) -> None:
        self._answer, self._ids = answer, ids

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        guess = list(self._answer[len(tokens) - PROMPT_TOKENS :][:most])
        if guess:
            guess[-1] = next(token for token in self._ids if token != guess[-1])
        return guess


def _run_last(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> Request:
    """Run prompts together, the last of them the probed one."""
    requests = [engine.add(*each)[0] for each in work]
    _finish(engine)
    return requests[-1]


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _difference(want: Completion, got: Completion) -> str:
    """Return where two completions first differ in a bit; empty when nowhere."""
    if got.finish_reason == "error":
        return got.error or "error"
    assert want.logprobs is not None, "the probe asks for log-probabilities"
    for place, (a, b) in enumerate(zip(want.logprobs, got.logprobs or (), strict=False)):
        if a.token_id != b.token_id:
            return f"token {place} is {b.token_id}, alone {a.token_id}"
        if a != b:
            return f"log-probabilities of token {place} differ: {b.logprob!r}, alone {a.logprob!r}"
    return "" if want.token_ids == got.token_ids else f"tokens are {got.token_ids}, alone {want.token_ids}"


def _untrue(case: str, request: Request) -> str:
    """Return why a case was not what it claims to be."""
    if "prefix hit" in case and not request.cached_prefix_tokens:
        return "no page was found again"
    if "speculation" in case and request.draft is not None:
        proposed, accepted = request.draft.num_proposed, request.draft.num_accepted
        if not 0 < accepted < proposed:
            return f"{accepted} of {proposed} guesses were right"
    return "it was not preempted" if "preemption" in case and not request.preemptions else ""
