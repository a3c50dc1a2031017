"""A loaded model with its text: ``load`` a name, then generate, stream, chat, score.

Place: what ``import microllm`` offers, and what the commands and examples use. It turns prompts into sequences and
sequences into completions; the loop is ``generator.py``'s. Does not schedule requests that come and go.
"""

from __future__ import annotations

import math
import operator
import secrets
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from torch import Tensor

from microllm.config import ModelConfig
from microllm.errors import ConfigError, ModelNotFoundError, RequestError
from microllm.inference.completion import Completion, Score, StreamPiece
from microllm.inference.generator import generate_tokens, prefill
from microllm.inference.own_engine import OwnEngines
from microllm.inference.placement import PACKED_PRECISIONS, PRECISIONS, choose_device
from microllm.inference.plan import Plan
from microllm.inference.prompts import Prompt, as_batch, checked_params, is_list, one_choice
from microllm.inference.quantised import QUANTISATIONS, quantisation_of, quantise_model
from microllm.inference.sequence import IF_NOT_FINITE, GeneratedSequence
from microllm.model import Transformer, load_model
from microllm.sampling import SamplingParams

if TYPE_CHECKING:
    from microllm.inference.plan_weights import PlanPrecision
    from microllm.io.checkpoint import Checkpoint
    from microllm.io.hf_config import GenerationDefaults
    from microllm.io.tokenizer import Tokenizer

Message = Mapping[str, object]
MAX_ROWS = 32
"""Sequences that run as one batch; further ones wait for the next batch."""


def load(name: str | Path, *, device: str = "auto", precision: str = "auto", num_threads: int | None = None) -> LLM:
    """Return the model called ``name``: "demo", a directory, a GGUF file, or a name in the local Hugging Face cache.

    device: "auto" is the first GPU where there is one, else the CPU; or "cpu", "cuda", "cuda:1".
    precision: "auto" is the checkpoint's own on a GPU; on a CPU it is int4 for a GGUF file whose layers are in four-bit
        blocks, else fp32. Or "fp32", "bf16", "fp16"; "int8" and "int4", and on a GPU "fp8": weights in codes, the rest
        in the checkpoint's own dtype (fp32 on a CPU).
    num_threads: of torch on the CPU, for the whole process; None leaves them as they are.

    Raises:
        ModelNotFoundError: no such model; the text suggests near names.
        CheckpointError, ConfigError, TextError: its files are damaged, or hold what this project refuses.
        UnavailableError: the device is not there.
    """
    # Readers load with the first model, so that `import microllm` stays light.
    from microllm.inference.plan_loading import is_four_bit, load_plan  # noqa: PLC0415
    from microllm.io.checkpoint import open_checkpoint  # noqa: PLC0415
    from microllm.io.resolve import resolve_model  # noqa: PLC0415
    from microllm.io.tokenizer import load_tokenizer  # noqa: PLC0415

    if not isinstance(name, str | Path):
        raise ModelNotFoundError(f"got a model name of type {type(name).__name__}; need text or a Path")
    place = choose_device(device)
    known = (*PRECISIONS, *(PACKED_PRECISIONS if place.type == "cpu" else QUANTISATIONS))
    if precision not in ("auto", *known):
        raise ConfigError(
            f"got precision {precision!r}; need auto or one of {', '.join(known)} on a {place.type} device"
        )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"got num_threads={num_threads}; need at least 1, or None")
    source = resolve_model(str(name))
    checkpoint = open_checkpoint(source)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if place.type == "cpu" and precision != "fp16":
        chosen = ("int4" if is_four_bit(checkpoint) else "fp32") if precision == "auto" else precision
        model = load_plan(checkpoint, cast("PlanPrecision", chosen))
    else:
        dtype: torch.dtype = getattr(torch, PRECISIONS.get(precision, checkpoint.config.dtype))
        model = load_model(checkpoint, dtype=dtype, device=place)
        model = quantise_model(model, precision) if precision in QUANTISATIONS else model
    tokenizer = load_tokenizer(source)
    return LLM(model, tokenizer, defaults=checkpoint.generation, name=source.name, checkpoint=checkpoint)


class LLM:
    """A model and its tokenizer.

    On a CPU each call has a cache of its own and changes nothing here. On a GPU calls run as captured steps, in an
    engine that is made at the first one and kept; with ``captured`` False, and wherever ``runs_captured`` says so,
    operator by operator. Threads may call at the same time; on a GPU their requests may share steps. A prompt is text,
    with special tokens as the tokenizer's files ask, or token ids.
    """

    def __init__(
        self, model: Transformer | Plan, tokenizer: Tokenizer, *, defaults: GenerationDefaults | None = None,
        name: str = "", checkpoint: Checkpoint | None = None, captured: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._defaults, self._checkpoint = defaults, checkpoint
        self._engines = OwnEngines() if captured else None
        ids = {*model.config.eos_token_ids, *tokenizer.eos_ids, *(defaults.eos_token_ids if defaults else ())}
        self.eos_ids = frozenset(i for i in ids if i < model.config.vocab_size)

    @property
    def config(self) -> ModelConfig:
        """Return the model's config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        return self.model.rotary.inv_freq_P.device

    @property
    def dtype(self) -> torch.dtype:
        """Return what the stream between layers, and the cache, are in."""
        return torch.float32 if isinstance(self.model, Plan) else self.model.norm.weight.dtype

    @property
    def precision(self) -> str:
        """Return what the weights are in: fp32, bf16, fp16, int8, int4 or fp8."""
        if isinstance(self.model, Plan):
            return self.model.weights.precision
        names = (name for name, dtype in PRECISIONS.items() if str(self.dtype) == f"torch.{dtype}")
        return quantisation_of(self.model) or next(names)

    @cached_property
    def transformer(self) -> Transformer:
        """Return the model as a ``Transformer``: its own, or beside a plan's weights the file's, loaded now.

        Raises:
            ConfigError: the weights are int8 or int4, which a Transformer has not, or came without their file.
        """
        if not isinstance(self.model, Plan):
            return self.model
        if self._checkpoint is None or self.precision not in PRECISIONS:
            raise ConfigError(f"got a plan of {self.precision} weights; need fp32 or bf16; load(..., precision='fp32')")
        return load_model(self._checkpoint, dtype=getattr(torch, PRECISIONS[self.precision]))

    def uncaptured(self) -> LLM:
        """Return the same model, one that runs operator by operator everywhere: for whoever looks at operators."""
        return LLM(
            self.model, self.tokenizer, defaults=self._defaults, name=self.name, checkpoint=self._checkpoint,
            captured=False,
        )  # fmt: skip

    @property
    def default_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint's author published; used only where they are passed."""
        return SamplingParams() if self._defaults is None else SamplingParams.from_defaults(self._defaults)

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Return the completion of one prompt, or a list for a list: prompt by prompt, each with its ``n`` choices.

        Without ``params`` it is ``SamplingParams()``: up to 256 tokens drawn from the model's own distribution.
        A sequence that fails (non-finite logits) ends with reason "error" and leaves the others alone.

        Raises:
            RequestError: a prompt is empty, too long or has unknown ids; a token id in the parameters is unknown;
                one prompt alone with n above 1.
        """
        params = checked_params(params)
        batch, is_one = as_batch(prompts)
        sequences = self.sequences(batch, one_choice(params) if is_one else params)
        for _ in self._steps(sequences):
            pass
        completions = [sequence.completion() for sequence in sequences]
        return completions[0] if is_one else completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> CompletionStream:
        """Return an iterator over one prompt's completion, a token at a time; closing it cancels the rest.

        Raises:
            RequestError: as ``generate``, at once and not at the first piece.
        """
        (sequence,) = self.sequences([prompt], one_choice(checked_params(params)))
        return CompletionStream(self._steps([sequence]), sequence)

    def _steps(self, sequences: Sequence[GeneratedSequence]) -> Generator[None]:
        """Run sequences to their ends, pausing after each step; closed early, those that still run are cancelled."""
        if self._engines is not None and self._engines.suit(self.model):
            yield from self._engines.steps(self, sequences)
            return
        for start in range(0, len(sequences), MAX_ROWS):
            yield from generate_tokens(self.model, sequences[start : start + MAX_ROWS])

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: Literal[False] = False
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> CompletionStream: ...
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: bool = False
    ) -> Completion | CompletionStream:
        """Return the answer to a conversation, put through the model's chat template.

        Messages look like {"role": "user", "content": "Hello"}. For tools or a template's own variables, pass the ids
        that ``tokenizer.encode_chat`` gives to ``generate``.

        Raises:
            TextError: the model has no chat template, or it refuses the messages.
            RequestError: as ``generate``.
        """
        ids = self.tokenizer.encode_chat(messages)
        return self.stream(ids, params) if stream else self.generate(ids, params)

    @torch.no_grad()
    def logits(self, prompt: Prompt, *, last_only: bool = False) -> Tensor:
        """Return the model's logits after each token of a prompt, or after its last one alone.

        Shapes:  T tokens -> [T, V], or [1, V] with ``last_only``, in the model's dtype and on its device
        Raises:
            RequestError: the prompt is empty, longer than the context, or has unknown ids.
        """
        ids = self._prompt_ids(prompt, self.config.max_position_embeddings)
        return self.model(torch.tensor([ids], device=self.device), last_only=last_only)[0]

    @overload
    def score(self, texts: Prompt) -> Score: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def score(self, texts: Sequence[Prompt]) -> list[Score]: ...
    def score(self, texts: Prompt | Sequence[Prompt]) -> Score | list[Score]:
        """Return how likely the model finds a text, or each of a list.

        Numbers: log-softmax in fp32 of the model's logits; the prompt runs in chunks, so that logits of a long text are
                 never held at once
        Raises:
            RequestError: a text is empty, longer than the context, or has unknown ids; its logits are not finite.
        """
        batch, is_one = as_batch(texts)
        prompts = [self._prompt_ids(text, self.config.max_position_embeddings) for text in batch]
        scores = [self._score(ids) for ids in prompts]
        return scores[0] if is_one else scores

    def _score(self, ids: tuple[int, ...]) -> Score:
        _, (entries,) = prefill(self.model, [ids], self.model.new_cache(1, len(ids)), num_top=0)
        logprobs = tuple(entry and entry.logprob for entry in entries)
        spoiled = next((i for i, x in enumerate(logprobs) if x is not None and not math.isfinite(x)), None)
        if spoiled is not None:
            raise RequestError(f"got non-finite logits at token {spoiled} of a text; need finite ones; {IF_NOT_FINITE}")
        total, count = math.fsum(x for x in logprobs if x is not None), len(ids) - 1
        loss = -total / count if count else math.nan
        perplexity = None if not count else math.exp(loss) if loss < 700 else math.inf
        return Score(token_ids=ids, logprobs=logprobs, sum_logprob=total, num_tokens=count, perplexity=perplexity)

    @cached_property
    def banned_ids(self) -> Tensor | None:
        """Return the rows of the vocabulary that are no token of the tokenizer: padding."""
        unknown = ~self.tokenizer.known_ids_mask(self.config.vocab_size)
        return unknown.nonzero()[:, 0].to(self.device) if bool(unknown.any()) else None

    def sequences(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[GeneratedSequence]:
        """Return a sequence for each choice of each prompt, not started, after all that the model decides is checked.

        Raises:
            RequestError: as ``generate``.
        """
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            self._check_ids(name, ids)
        prompt_ids = [self._prompt_ids(prompt, self.config.max_position_embeddings - 1) for prompt in prompts]
        sequences: list[GeneratedSequence] = []
        for ids in prompt_ids:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            sequences += [
                GeneratedSequence(
                    ids, params, self.tokenizer, seed=seed, choice=choice, eos_ids=self.eos_ids,
                    context=self.config.max_position_embeddings, banned_ids=self.banned_ids,
                )
                for choice in range(params.n)
            ]  # fmt: skip
        return sequences

    def _prompt_ids(self, prompt: Prompt, most: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            try:
                if not is_list(prompt) or any(isinstance(token, bool) for token in prompt):
                    raise TypeError("no list of whole numbers")
                ids = tuple(operator.index(token) for token in prompt)
            except TypeError as error:
                raise RequestError(f"got a prompt of {type(prompt).__name__}: {error}; need text or ids") from error
        if not ids:
            raise RequestError("got an empty prompt; need at least one token; write something, or pass the BOS id")
        if len(ids) > most:
            raise RequestError(
                f"got a prompt of {len(ids)} tokens; need at most {most} "
                f"(the model's context is {self.config.max_position_embeddings}); shorten it"
            )
        self._check_ids("the prompt", ids)
        return ids

    def _check_ids(self, name: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise RequestError(
                f"got token ids {bad[:5]} in {name}; need ids from 0 to {self.config.vocab_size - 1} (the vocabulary)"
            )


class CompletionStream(Iterator[StreamPiece]):
    """The pieces of one completion, as they come; a context manager that cancels what is left.

    Another thread may close it: that waits for the step that runs, if any.
    """

    def __init__(self, steps: Generator[None], sequence: GeneratedSequence) -> None:
        self._steps, self._sequence = steps, sequence
        self._is_done = False
        self._lock = threading.RLock()

    def __next__(self) -> StreamPiece:
        with self._lock:
            while not self._is_done:
                piece = self._sequence.piece(most=1)
                self._is_done = piece.finish_reason is not None
                if self._is_done:
                    self._steps.close()
                if piece.token_ids or self._is_done:
                    return piece
                next(self._steps)
            raise StopIteration

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the sequence as "cancelled" if it still runs; its cache goes at once. May be called again."""
        with self._lock:
            self._is_done = True
            self._steps.close()
            self._sequence.finish("cancelled")

    @property
    def completion(self) -> Completion:
        """Return the completion, once the stream has ended or been closed.

        Raises:
            RequestError: it still runs.
        """
        if self._sequence.finish_reason is None:
            raise RequestError("got a stream that still runs; need its end; read on, or close() it")
        return self._sequence.completion()
