"""The quality gate: does a precision still choose what fp32 chooses, on real text that nothing was fitted to?

Place: ``microllm bench quality``. Teacher-forced over windows of text, against the plain ``Transformer`` of the
dequantised weights in fp32: top-1 agreement, KL, perplexity. Both ways that tokens run are judged: ``decode``, one
token a forward pass, and ``prefill``, a window in one; on a CPU those of the plan, on a GPU those of the engine's fused
pass, uncaptured. What ``precision="auto"`` takes for the demo has a receipt that passes, or a test fails. No times.

    a precision passes    agreement ≥ 0.96, at most 0.01 below bf16's own, perplexity within 1 %, both ways
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from microllm.errors import ConfigError, EvidenceError
from microllm.evidence.environment import capture_environment
from microllm.evidence.gates import Metrics, gate_metrics, run_gate
from microllm.evidence.journal import append_line, canonical_json, sha256_hex
from microllm.evidence.rows import environment_fields, markdown_table
from microllm.evidence.tensor_statistics import Record
from microllm.inference import LLM, load
from microllm.inference.paged_forward import Arena, PagedForward
from microllm.inference.placement import choose_device
from microllm.inference.quantised import QUANTISATIONS
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import ModelSource, resolve_model
from microllm.io.tokenizer import Tokenizer
from microllm.model import Transformer, load_model
from microllm.step import PagePool, RowGroup, layer_dtypes

Way = Literal["decode", "prefill"]
WAYS: tuple[Way, ...] = ("decode", "prefill")
MIN_AGREEMENT = 0.96
MAX_BELOW_BF16 = 0.01
MAX_PERPLEXITY_CHANGE = 0.01
MIN_WINDOW = 32
"""Tokens under which the rest of a text is left out: its first tokens have little to go by."""
PAGE_TOKENS = 16
_TEXTS = Path(__file__).with_name("quality_text.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to judge on, and where it comes from."""

    name: str
    source: str
    licence: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """Which precisions are judged, and on how much."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    device: str = "cpu"
    """Where it runs: "cpu", "cuda" or "cuda:1"."""
    precision: tuple[str, ...] = ()
    """What to judge (none: int4; on a GPU int8, int4 and fp8)."""
    window: int = 512
    """Tokens that are run together; the first of each window follows nothing."""
    num_windows: int | None = None
    """Take the first of them (default: all of the text)."""
    out: Path | None = None
    """Append the receipts to this JSONL file; those of a release lie in lab/rows/quality.jsonl."""

    def __post_init__(self) -> None:
        if self.window < MIN_WINDOW or (self.num_windows or 1) < 1:
            raise ConfigError(f"got {self.num_windows} windows of {self.window}; need at least 1 of {MIN_WINDOW}")


class QualityRow(Record):
    """One precision on one way of running: a receipt, under its digest.

    Units:   KL in nats; ``perplexity_ratio`` is the precision's over fp32's
    """

    model: str
    model_sha256: str
    precision: str
    way: Way
    agreement: float
    bf16_agreement: float
    mean_kl: float
    fp32_perplexity: float
    perplexity_ratio: float
    num_tokens: int
    text_sha256: str
    passed: bool
    reasons: tuple[str, ...]
    cpu_capability: str
    device: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    digest: str = ""

    def compute_digest(self) -> str:
        """Return the sha256 of everything in the receipt but its digest."""
        content = self.model_dump(mode="json")
        del content["digest"]
        return sha256_hex(canonical_json(content))


def read_texts() -> list[Text]:
    """Return the texts that ship with the package."""
    return [Text(**each) for each in json.loads(_TEXTS.read_text(encoding="utf-8"))]


def measure_quality(config: QualityConfig, progress: Callable[[str], None] = lambda _: None) -> list[QualityRow]:
    """Judge each precision on both ways, write the receipts to ``config.out`` if it is given, and return them.

    Raises:
        EvidenceError: the gate sees nothing: fp32 run again differs, or wrong tokens do not move the metric.
    """
    source, device = resolve_model(config.model), choose_device(config.device)
    precisions = tuple(dict.fromkeys(config.precision or (QUANTISATIONS if device.type == "cuda" else ("int4",))))
    models = {p: load(config.model, device=config.device, precision=p) for p in dict.fromkeys((*precisions, "bf16"))}
    reference = load_model(open_checkpoint(source), dtype=torch.float32, device=device)
    judged: dict[tuple[str, Way], list[Metrics]] = {(p, way): [] for p in precisions for way in WAYS}
    judged.setdefault(("bf16", "prefill"), [])
    losses = []
    windows = list(_windows(models["bf16"].tokenizer, config))
    for number, (ids, targets) in enumerate(windows):
        expected = _plain_logits(reference, ids)
        losses.append(functional.cross_entropy(expected, targets).item())
        for (precision, way), found in judged.items():
            progress(f"window {number + 1} of {len(windows)}: {precision}, {way}")
            if number == 0:
                judge = partial(forced_logits, models[precision], way="prefill")
                _prove_gate(reference, judge, ids[:MIN_WINDOW])
            logits = forced_logits(models[precision], ids, way)
            found.append(gate_metrics("distribution", logits, expected, targets))
    sizes = [len(ids) for ids, _ in windows]
    bf16 = _mean([m.top1_agreement for m in judged["bf16", "prefill"]], sizes)
    environment = capture_environment(config.device)
    fields = environment_fields(environment) | {
        "model": config.model, "model_sha256": model_sha256(source), "bf16_agreement": bf16, "num_tokens": sum(sizes),
        "fp32_perplexity": math.exp(_mean(losses, sizes)), "text_sha256": sha256_hex(_TEXTS.read_bytes()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    rows = [
        QualityRow.model_validate({**fields, "precision": p, "way": way, **_verdict(judged[p, way], sizes, bf16)})
        for p in precisions for way in WAYS
    ]  # fmt: skip
    rows = [row.model_copy(update={"digest": row.compute_digest()}) for row in rows]
    if config.out is not None:
        for text in (canonical_json(row.model_dump(mode="json")) for row in rows):
            append_line(config.out, lambda _, text=text: text)
    return rows


def forced_logits(llm: LLM, ids: Sequence[int], way: Way) -> Tensor:
    """Return the logits after each of ``ids``: from the steps that decoding takes, or from one pass.

    Shapes:  -> [T, V] fp32, on the CPU
    """
    if isinstance(llm.model, Transformer):
        return _fused_logits(llm, ids, way)
    if way == "prefill":
        return llm.logits(ids).float()
    cache, found = llm.model.new_cache(1, len(ids)), []
    with torch.inference_mode():
        for token in ids:
            found.append(llm.model(torch.tensor([[token]]), cache=cache, last_only=True)[0].float())
        return torch.cat(found)


@torch.inference_mode()
def _fused_logits(llm: LLM, ids: Sequence[int], way: Way) -> Tensor:
    """Return them from the pass over pages that an engine captures."""
    model, width = llm.transformer, len(ids) if way == "prefill" else 1
    pages, dtypes = -(-len(ids) // PAGE_TOKENS), layer_dtypes(llm.config, "auto", llm.dtype)
    pool = PagePool(llm.config, pages, page_tokens=PAGE_TOKENS, dtypes=dtypes, device=llm.device)
    forward = PagedForward(model, pool, context=len(ids), one_tiling=False)
    group = RowGroup(1, width, decodes=way == "decode", device=llm.device)
    arena, found = Arena(forward, group, width), []
    arena.table.copy_(torch.arange(pages, dtype=torch.int32)[None])
    arena.wanted.copy_(torch.arange(width))
    logits = arena.last.new_empty(width, llm.config.vocab_size)
    for start in range(0, len(ids), width):
        group.fill([(0, start, ids[start : start + width])])
        forward.hidden(group, arena)
        found.append(forward.logits(forward.last(arena), logits).to("cpu", torch.float32, copy=True))
    return torch.cat(found)


def parse_quality_row(line: str) -> QualityRow:
    """Read one receipt.

    Raises:
        EvidenceError: it does not fit its model or its digest.
    """
    try:
        row = QualityRow.model_validate_json(line)
    except ValidationError as error:
        raise EvidenceError(f"got a line that is no quality receipt: {error}; restore it") from error
    if row.digest != row.compute_digest() or line != canonical_json(row.model_dump(mode="json")):
        raise EvidenceError("got a quality receipt that is not as its digest says; restore it")
    return row


def quality_table(rows: Sequence[QualityRow]) -> str:
    """Return the last receipt of each model, precision, way and device as a Markdown table."""
    last = {(row.model_sha256, row.precision, row.way, row.device): row for row in rows}
    columns = (
        "model", "precision", "way", "agrees with fp32", "bf16 agrees", "KL", "perplexity / fp32's", "tokens", "passed"
    )  # fmt: skip
    return markdown_table(columns, [
        (
            row.model, row.precision, row.way, f"{row.agreement:.4f}", f"{row.bf16_agreement:.4f}",
            f"{row.mean_kl:.1e}", f"{row.perplexity_ratio:.4f}", f"{row.num_tokens:,}",
            "yes" if row.passed else "; ".join(row.reasons),
        )
        for row in last.values()
    ])  # fmt: skip


def model_sha256(source: ModelSource) -> str:
    """Return the sha256 of the weights: of the GGUF file, or of the safetensors files of a directory in order."""
    files = [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _windows(tokenizer: Tokenizer, config: QualityConfig) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the ids of each window, and the ids that follow them."""
    num_windows = 0
    for text in read_texts():
        ids = tokenizer.encode(text.text)
        for start in range(0, len(ids) - MIN_WINDOW, config.window):
            if num_windows == config.num_windows:
                return
            num_windows += 1
            part = ids[start : start + config.window + 1]
            yield list(part[:-1]), torch.tensor(part[1:])


def _plain_logits(reference: Transformer, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids], device=reference.norm.weight.device))[0].cpu()


def _prove_gate(reference: Transformer, candidate: Callable[[list[int]], Tensor], ids: list[int]) -> None:
    report = run_gate(
        "distribution", host=lambda: _plain_logits(reference, ids), floors={},
        candidate=lambda: candidate(ids), broken=lambda: candidate(ids[1:] + ids[:1]),
    )  # fmt: skip
    if report.reasons:
        raise EvidenceError(f"got a gate that proves nothing: {'; '.join(report.reasons)}")


def _verdict(found: Sequence[Metrics], sizes: Sequence[int], bf16: float) -> dict[str, object]:
    agreement = _mean([m.top1_agreement for m in found], sizes)
    losses = [None if m.perplexity_change is None else math.log1p(m.perplexity_change) for m in found]
    ratio = math.exp(_mean(losses, sizes))
    reasons = []
    if not agreement >= MIN_AGREEMENT:
        reasons.append(f"agreement {agreement:.4f}; need at least {MIN_AGREEMENT}")
    if not agreement >= bf16 - MAX_BELOW_BF16:
        reasons.append(f"agreement {agreement:.4f}; need at most {MAX_BELOW_BF16} below bf16's {bf16:.4f}")
    if not abs(ratio - 1) <= MAX_PERPLEXITY_CHANGE:
        reasons.append(f"perplexity {ratio:.4f} times fp32's; need within {MAX_PERPLEXITY_CHANGE:.0%}")
    return {
        "agreement": agreement, "mean_kl": _mean([m.kl for m in found], sizes), "perplexity_ratio": ratio,
        "passed": not reasons, "reasons": reasons,
    }  # fmt: skip


def _mean(values: Sequence[float | None], sizes: Sequence[int]) -> float:
    return fmean([math.nan if value is None else value for value in values], weights=sizes)
