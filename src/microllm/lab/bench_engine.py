"""The engine beside transformers with a static cache and torch.compile, on one GPU: targets D1 to D8, P1, S1.

Place: ``microllm bench engine`` and ``tools/gpu_engine.py``. Weights are random, of a preset's exact shape, the same in
every arm. A decode rate is what more tokens add: the time of a prompt and N + 1 tokens, less that of a prompt and one,
through the public API, the host's work and the reading of tokens in it. Arms take turns (A B B A). Parity, before any
of it: the log-probabilities that the engine gave its own tokens, against transformers' in fp32, are off by at most half
as much again as transformers' own in our dtype.

Units:   the limit divides the bytes that a step must read (weights, keys and values) by ``bench roofline``'s read rate
"""

from __future__ import annotations

import gc
import inspect
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from microllm.errors import ConfigError
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields, read_rows, write_row
from microllm.inference import LLM, Engine, EngineConfig
from microllm.inference.placement import choose_device
from microllm.inference.quantised import Quantisation, quantise_model
from microllm.lab.hf_twin import cast_twin, make_twin
from microllm.lab.random_model import random_llm
from microllm.sampling import SamplingParams

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEER = "transformers static + compiled"
CODES_TARGET = {"int8": "D5"}
PARITY_TIMES, PARITY_FLOOR = 1.5, 1e-5
READ_TBPS = 4.0
"""Read rate of a 1 GB buffer on an H200, where no roofline row says it."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """What is run, against whom, how often.

    Args:
        model: A preset; its weights are random.
        dtype: bf16, fp16 or fp32.
        batch: Sequences that decode at once; a row for each.
        tokens: Tokens of their prompts; a row for each.
        new_tokens: Tokens that a round decodes, beyond the first.
        peer: Run transformers too (its compiler takes a minute for each batch).
        weights: Quantise the weights to int8, int4 or fp8: the peer is then our engine with the floats that they came
            from, and parity is with the eager form of the same codes.
        deterministic: Rows' bits do not know their batch (mode B).
        sequences: Of the throughput run at temperature 0.6, 0 for none.
        lengths: Least and most tokens of its prompts and of its answers.
        rounds: Rounds of each arm, an even number.
        limits: Rows of bench roofline.
        out: Append the rows to this JSONL file.
    """

    model: str = "qwen2.5-0.5b"
    dtype: str = "bf16"
    device: str = "cuda"
    batch: tuple[int, ...] = (1, 8, 32, 64)
    tokens: tuple[int, ...] = (512,)
    new_tokens: int = 128
    peer: bool = False
    weights: str = ""
    deterministic: bool = False
    sequences: int = 0
    lengths: tuple[int, int] = (100, 1024)
    rounds: int = 4
    limits: Path = Path("lab/rows/roofline.jsonl")
    out: Path | None = None

    def __post_init__(self) -> None:
        counts = (*self.batch, *self.tokens, self.new_tokens)
        if min(counts) < 1 or self.rounds < 2 or self.rounds % 2 or self.dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"got {counts} sequences and tokens, {self.rounds} rounds, dtype {self.dtype!r}; need at least 1 of "
                f"each, an even number of rounds, and one of {', '.join(TORCH_DTYPES)}"
            )
        if self.weights and self.peer:
            raise ConfigError(f"got weights={self.weights!r} and a peer; need one of them: ours in floats is the peer")


@dataclass(slots=True)
class Arm:
    """One way to run: seconds of a prompt and one token, and of a prompt and many, a round each."""

    run: Callable[[list[list[int]], int], object]
    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def time(self, prompts: list[list[int]], num_tokens: int, device: torch.device) -> None:
        """Time a round of both lengths."""
        for count, into in ((1, self.short_s), (num_tokens + 1, self.long_s)):
            into.append(_seconds(lambda count=count: self.run(prompts, count), device))

    def rate(self, num_sequences: int, num_tokens: int) -> float:
        """Return tokens a second while decoding."""
        return num_sequences * num_tokens / (median(self.long_s) - median(self.short_s))


@dataclass(frozen=True, slots=True)
class Peer:
    """What runs beside our engine: names for its decoding and its prompts, and its arm for sequences of a length."""

    name: str
    prefill_name: str
    arm: Callable[[int, int], Arm]


class StaticCompiled:
    """transformers with a static cache, its one-token step compiled into CUDA graphs, in the shortest loop."""

    def __init__(self, twin: Any, num_sequences: int, capacity: int, *, compiles: bool) -> None:  # noqa: ANN401
        from transformers import StaticCache  # noqa: PLC0415 - an extra

        self._twin, self._cache = twin, StaticCache(config=twin.config, max_cache_len=capacity)
        names = inspect.signature(type(twin).forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"
        self._takes_position = "cache_position" in names
        self._step = torch.compile(twin.forward, mode="reduce-overhead", fullgraph=True) if compiles else twin.forward
        self._num_sequences = num_sequences

    @torch.no_grad()
    def run(self, prompts: list[list[int]], num_tokens: int) -> Tensor:
        """Return the greedy tokens of prompts of one length, [B, num_tokens], read at the end."""
        device = self._twin.device
        ids, length = torch.tensor(prompts, device=device), len(prompts[0])
        self._cache.reset()
        position = torch.arange(length, device=device)
        token = self._call(self._twin.forward, ids, position, logits_to_keep=1)
        chosen, position = [token], position[-1:] + 1
        for _ in range(num_tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self._call(self._step, token, position)
            chosen.append(token)
            position = position + 1
        return torch.cat(chosen, dim=1).cpu()

    def _call(self, forward: Any, ids: Tensor, position: Tensor, **more: int) -> Tensor:  # noqa: ANN401
        given: dict[str, Any] = {self._name: self._cache, "use_cache": True, **more}
        given |= {"cache_position": position} if self._takes_position else {}
        logits = forward(input_ids=ids, position_ids=position[None], **given).logits
        return logits[:, -1:].argmax(-1)


def measure_engine(config: EngineBenchConfig, progress: Progress = lambda _: None) -> Iterator[Row]:
    """Yield rows for each batch and prompt length, then one for the throughput run; write them to ``config.out``."""
    device, dtype = choose_device(config.device), TORCH_DTYPES[config.dtype]
    llm = random_llm(config.model, config.device, dtype)
    fields = environment_fields(capture_environment(config.device))
    fields |= {"dtype": config.weights or config.dtype, "unit": "tok/s"}
    if config.weights:
        floats, twin = random_llm(config.model, config.device, dtype), llm.transformer
        quantise_model(twin, cast("Quantisation", config.weights))
        peer = _our_floats(config, floats)
    else:
        twin = twin_of(llm, dtype)
        peer = _transformers(twin) if config.peer else None
    parity = measure_parity(config, llm, twin)
    progress(f"parity: {parity}")
    del twin
    for tokens in config.tokens:
        for batch in config.batch:
            for row in _shape_rows(config, llm, peer, (batch, tokens), parity, fields):
                progress(summary(row))
                yield kept(config, row)
            forget(device)
    if config.sequences:
        row = _throughput_row(config, llm, parity, fields)
        progress(summary(row))
        yield kept(config, row)


def _transformers(twin: Any) -> Peer:  # noqa: ANN401
    on_gpu = twin.device.type == "cuda"

    def arm(num_sequences: int, capacity: int) -> Arm:
        return Arm(StaticCompiled(twin, num_sequences, capacity, compiles=on_gpu).run)

    return Peer(PEER if on_gpu else "transformers static", "transformers eager", arm)


def _our_floats(config: EngineBenchConfig, llm: LLM) -> Peer:
    name = f"microllm {config.dtype}"
    return Peer(name, name, lambda num_sequences, capacity: _our_arm(config, llm, num_sequences, capacity))


def _our_arm(config: EngineBenchConfig, llm: LLM, num_sequences: int, capacity: int) -> Arm:
    engine = new_engine(config, llm, num_sequences, capacity)
    return Arm(lambda prompts, count: engine.generate(prompts, greedy(count)))


def _shape_rows(
    config: EngineBenchConfig, llm: LLM, peer: Peer | None, shape: tuple[int, int], parity: str, fields: dict[str, Any]
) -> tuple[Row, Row]:
    """Return the rows of decoding and of the prompt before it."""
    batch, tokens = shape
    device, capacity = torch.device(config.device), tokens + config.new_tokens + 8
    prompts = [[(7 * row + i) % (llm.config.vocab_size - 5) + 5 for i in range(tokens)] for row in range(batch)]
    arms = [_our_arm(config, llm, batch, capacity), *([] if peer is None else [peer.arm(batch, capacity)])]
    for arm in arms:
        for count in (3, config.new_tokens + 1, config.new_tokens + 1):
            arm.run(prompts, count)
        arm.peak_bytes = peak_of(arm, prompts, device)
    for number in range(config.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            arm.time(prompts, config.new_tokens, device)
    ours, *others = arms
    steps_bytes = bytes_a_step(llm, batch, tokens + config.new_tokens // 2)
    limit = batch * read_rate(config, fields["device"]) / steps_bytes
    what, mode = f"{config.model} B{batch} T{tokens}", "B" if config.deterministic else "A"
    mode += f" {config.weights} weights" if config.weights else ""
    in_ms: dict[str, Any] = {**fields, "unit": "ms"}
    passes = parity == "pass"
    prefill = Row(
        target="prefill", workload=f"{what} mode {mode}", ours=1e3 * median(ours.short_s) if passes else None,
        peer_name=peer and peer.prefill_name, peer=1e3 * median(others[0].short_s) if others else None,
        num_forwards=1, parity=parity, **in_ms,
    )  # fmt: skip
    decode = Row(
        target=CODES_TARGET.get(config.weights, "decode"), workload=f"{what} N{config.new_tokens} mode {mode}",
        ours=ours.rate(batch, config.new_tokens) if passes else None, limit=limit,
        peer_name=peer and peer.name, peer=others[0].rate(batch, config.new_tokens) if others else None,
        num_forwards=config.new_tokens, peak_bytes=ours.peak_bytes or None,
        peer_peak_bytes=(others[0].peak_bytes or None) if others else None, parity=parity, **fields,
    )  # fmt: skip
    return decode, prefill


def _throughput_row(config: EngineBenchConfig, llm: LLM, parity: str, fields: dict[str, Any]) -> Row:
    (least, longest), draw, device = config.lengths, random.Random(0), torch.device(config.device)
    prompts = [
        [draw.randrange(llm.config.vocab_size) for _ in range(draw.randint(least, longest))]
        for _ in range(config.sequences)
    ]
    counts = [draw.randint(least, longest) for _ in range(config.sequences)]
    most = llm.config.max_position_embeddings
    prompts, counts = [p[: most // 2] for p in prompts], [min(n, most // 2) for n in counts]
    capacity = min(most, 2 * longest + 8)
    engine = new_engine(config, llm, config.sequences, capacity)

    def run() -> None:
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            params = SamplingParams(temperature=0.6, seed=number, max_tokens=count, min_tokens=0, ignore_eos=True)
            engine.add(prompt, params)
        while engine.has_work:
            engine.step()

    run()
    seconds = [_seconds(run, device) for _ in range(2)]
    return Row(
        target="S1", workload=f"{config.model} {config.sequences} prompts and answers of {least} to {longest} tokens",
        ours=sum(counts) / median(seconds) if parity == "pass" else None, parity=parity,
        num_forwards=engine.report().num_steps // 3, **fields,
    )  # fmt: skip


def new_engine(config: EngineBenchConfig, llm: LLM, num_rows: int, capacity: int) -> Engine:
    """Return an engine that finds no prefix again and takes prompts whole."""
    return Engine(llm, EngineConfig(
        max_rows=num_rows, max_context=min(capacity, llm.config.max_position_embeddings), prefix_cache=False,
        max_step_tokens=max(4096, 2 * num_rows), deterministic=config.deterministic,
    ))  # fmt: skip


def greedy(count: int) -> SamplingParams:
    """Return the parameters of so many of the likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def twin_of(llm: LLM, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return transformers' model with a copy of the weights."""
    weights = dict(llm.transformer.named_parameters())
    return make_twin(llm.config, weights, dtype=dtype, device=str(llm.device)).eval()


@torch.no_grad()
def measure_parity(config: EngineBenchConfig, llm: LLM, twin: Any) -> str:  # noqa: ANN401
    """Return "pass", or how far the engine's log-probabilities are off those of ``twin`` in fp32, and the bound.

    ``twin`` is transformers' model, or our own Transformer, whose forward pass is held to it elsewhere.
    """
    prompt = [(11 * i) % (llm.config.vocab_size - 5) + 5 for i in range(48)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    done = new_engine(config, llm, 1, 128).generate(prompt, params)
    assert done.logprobs is not None, "asked for"
    tokens = torch.tensor(done.token_ids, device=llm.device)
    ids = torch.tensor([[*prompt, *done.token_ids]], device=llm.device)

    def logprobs(model: Any) -> Tensor:  # noqa: ANN401
        found = model(ids)
        logits = (found if isinstance(found, Tensor) else found.logits)[0, len(prompt) - 1 : -1].double()
        return logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]

    exact = logprobs(cast_twin(twin, torch.float32))
    ours = torch.tensor([each.logprob for each in done.logprobs], dtype=torch.float64, device=llm.device)
    off, theirs = (float((each - exact).square().mean().sqrt()) for each in (ours, logprobs(twin)))
    bound = PARITY_TIMES * theirs + PARITY_FLOOR
    return "pass" if off <= bound else f"log-probabilities off by {off:.2e} (root mean square); at most {bound:.2e}"


def bytes_a_step(llm: LLM, batch: int, length: int) -> int:
    """Return the bytes that a decode step must read: the weights but not the table's other rows, keys and values."""
    model, config = llm.transformer, llm.config
    table = 0 if model.lm_head is None else model.embed_tokens.weight.nbytes
    weights = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    return sum(weights.values()) - table + batch * keys * llm.dtype.itemsize


def read_rate(config: EngineBenchConfig, device: str) -> float:
    """Return bytes a second that this device was seen to read."""
    if not config.limits.exists():
        return READ_TBPS * 1e12
    rows = [row for row in read_rows(config.limits) if row.device == device and row.unit == "GB/s"]
    figures = [row.ours for row in rows if row.ours and row.workload.startswith("read 1024 MiB")]
    return max(figures, default=1e3 * READ_TBPS) * 1e9


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of(arm: Arm, prompts: list[list[int]], device: torch.device) -> int:
    """Return the device's most bytes while an arm runs, all arms' weights and caches in it."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    arm.run(prompts, 2)
    return torch.cuda.max_memory_allocated(device)


def forget(device: torch.device) -> None:
    """Give back what nobody holds, compiled steps too."""
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()


def kept(config: EngineBenchConfig, row: Row) -> Row:
    """Return a row, written down where rows are kept."""
    return write_row(config.out, row) if config.out is not None else row


def summary(row: Row) -> str:
    """Return a row in one line."""
    if row.ours is None:
        return f"{row.workload}: {row.parity}"
    beside = "" if row.peer is None else f", {row.ratio_peer:.2f} x {row.peer_name} ({row.peer:,.0f})"
    share = "" if row.ratio_limit is None else f", {row.ratio_limit:.2f} of the limit"
    return f"{row.target} {row.workload}: {row.ours:,.5g} {row.unit}{beside}{share}"
