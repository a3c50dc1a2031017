"""``microllm generate``: one prompt in, text out as it is made."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.sampling import SamplingParams

if TYPE_CHECKING:
    from microllm.inference import LLM, Completion


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Answer one prompt, with the model's chat template unless --raw is given."""

    prompt: str
    """What to answer; "-" reads standard input."""
    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    raw: bool = False
    """Continue the prompt as plain text, without the chat template."""
    system: str | None = None
    """A system message for the chat template."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "auto"
    """auto, fp32, bf16, fp16, int8, int4, or on a GPU fp8; auto is the checkpoint's own on a GPU, on a CPU int4 for a
    GGUF file in four-bit blocks and else fp32."""
    num_threads: int | None = None
    """Threads on a CPU; without it torch's own choice, a thread a core."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object: text, token_ids, prompt_token_ids, finish_reason, timings, ..."""
    explain_token: int | None = None
    """Answer in an engine, and say where token N (0 is the first) was made and by how much it won; on a CPU precision
    auto is fp32 then."""
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def run(self) -> int:
        """Print the answer as it comes; with --json, or several choices, all at the end. 1 when a sequence failed."""
        llm, text = self.load()
        if self.explain_token is not None:
            return _explain(llm, text, self.sampling, self.explain_token)
        if self.as_json or self.sampling.n > 1:
            completions = llm.generate([text], self.sampling)
            _print_choices(completions, as_json=self.as_json)
        else:
            completions = [_print_stream(llm, text, self.sampling)]
        return 1 if any(c.finish_reason == "error" for c in completions) else 0

    def load(self) -> tuple[LLM, str | list[int]]:
        """Return the model, and the prompt as it takes it: text, or the ids that the chat template gives."""
        from microllm.errors import RequestError
        from microllm.inference import load
        from microllm.inference.placement import engine_precision

        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
        if not prompt:
            raise RequestError("got an empty prompt; need some text; pass it with --prompt")
        if self.raw and self.system is not None:
            raise RequestError("got --system with --raw; need one of them: a system message is the chat template's")
        precision = self.precision
        if self.explain_token is not None:
            precision = engine_precision(precision, self.device)
        llm = load(self.model, device=self.device, precision=precision, num_threads=self.num_threads)
        text: str | list[int] = prompt
        if not self.raw:
            messages = [{"role": "user", "content": prompt}]
            if self.system is not None:
                messages.insert(0, {"role": "system", "content": self.system})
            text = llm.tokenizer.encode_chat(messages)
        return llm, text


def _print_stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Completion:
    """Print one answer as it is made, and its speed on standard error."""
    with llm.stream(prompt, params) as pieces:
        try:
            for piece in pieces:
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            pieces.close()
        print()
    _print_prompt_logprobs(llm, pieces.completion)
    print(describe_speed(pieces.completion), file=sys.stderr)
    return pieces.completion


def _explain(llm: LLM, prompt: str | list[int], params: SamplingParams, index: int) -> int:
    """Print the answer and the origin of one of its tokens."""
    from microllm.errors import RequestError
    from microllm.inference import Engine, EngineConfig

    engine = Engine(llm, EngineConfig(max_rows=1, diagnose=True))
    with engine.stream(prompt, params) as pieces:
        for piece in pieces:
            print(piece.text, end="", flush=True)
    print()
    origins = pieces.request.origins
    if not 0 <= index < len(origins):
        raise RequestError(f"got --explain-token {index}; need 0 to {len(origins) - 1}, the answer's tokens")
    found = origins[index]
    shown = [f"{i} {llm.tokenizer.decode([i], skip_special_tokens=False)!r} {logit:.4f}" for i, logit in found.best]
    print(
        f"token {index}: {found.token_id}, at position {found.position}, made by {found.producer} in step {found.step}"
        f", in {llm.precision}"
    )
    print(f"  slot {found.slot}; {found.num_rows} requests and {found.num_tokens} tokens in the step")
    print(f"  best logits: {shown[0]}; then {shown[1]}; margin {found.margin:.4f}")
    return 1 if pieces.completion.finish_reason == "error" else 0


def _print_choices(completions: list[Completion], *, as_json: bool) -> None:
    if not as_json:
        for c in completions:
            print(f"[{c.index}] {c.text}")
    elif len(completions) == 1:
        print(json.dumps(completions[0].to_dict()))
    else:
        print(json.dumps({"choices": [c.to_dict() for c in completions]}))


def _print_prompt_logprobs(llm: LLM, completion: Completion) -> None:
    if completion.prompt_logprobs is None:
        return
    print("\nprompt token, its log-probability, and what was likelier:")
    for token_id, entry in zip(completion.prompt_token_ids, completion.prompt_logprobs, strict=True):
        shown = repr(llm.tokenizer.decode([token_id], skip_special_tokens=False))
        if entry is None:
            print(f"  {shown:<24} first token")
            continue
        top = ", ".join(f"{llm.tokenizer.decode([i], skip_special_tokens=False)!r} {p:.2f}" for i, p in entry.top)
        print(f"  {shown:<24} {entry.logprob:8.3f}  {top}")


def describe_speed(completion: Completion) -> str:
    """Return one line about how a completion went: tokens, seconds to the first, tokens a second after it."""
    times = completion.timings
    words = [f"{len(completion.token_ids)} tokens", f"finish: {completion.finish_reason}"]
    if times.ttft_ms is not None:
        words.append(f"first after {times.ttft_ms / 1000:.2f} s")
    if times.decode_tokens_per_s is not None:
        words.append(f"{times.decode_tokens_per_s:.1f} tokens/s")
    if completion.error is not None:
        words.append(completion.error)
    return f"[{', '.join(words)}]"
