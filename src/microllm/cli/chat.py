"""``microllm chat``: a conversation in the terminal; Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.sampling import SamplingParams

if TYPE_CHECKING:
    from microllm.inference import LLM, Completion

HELP = "Commands: /new starts over, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer."


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with a model: several turns, the answer as it is made."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    system: str | None = None
    """A system message that opens the conversation."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "auto"
    """auto, fp32, bf16, fp16, int8, int4, or on a GPU fp8; auto is the checkpoint's own there, on a CPU int4 for a GGUF
    file in four-bit blocks and else fp32."""
    num_threads: int | None = None
    """Threads on a CPU; without it torch's own choice, a thread a core."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object a turn instead of text; for scripts that write turns to standard input."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.7, top_p=0.9))

    def run(self) -> int:
        """Read a line, print the answer, until /exit or the end of input."""
        from microllm.inference import load

        llm = load(self.model, device=self.device, precision=self.precision, num_threads=self.num_threads)
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = list(opening)
        if not self.as_json:
            print(f"{llm.name}. {HELP}")
        for line in _lines(prompt="" if self.as_json else "> "):
            if line == "/exit":
                break
            if line == "/new":
                messages = list(opening)
                continue
            if line.startswith("/") and line[1:].isalpha():
                print(f"microllm: got {line}. {HELP}", file=sys.stderr)
                continue
            messages.append({"role": "user", "content": line})
            completion = self._answer(llm, messages)
            if completion is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": completion.text})
        return 0

    def _answer(self, llm: LLM, messages: list[dict[str, str]]) -> Completion | None:
        """Print one answer and return it; None when the request cannot be served, which is said."""
        from microllm.cli.generate import describe_speed
        from microllm.errors import RequestError, TextError

        try:
            pieces = llm.chat(messages, self.sampling, stream=True)
        except (RequestError, TextError) as error:
            print(f"microllm: {error}", file=sys.stderr)
            return None
        with pieces:
            try:
                for piece in pieces:
                    if not self.as_json:
                        print(piece.text, end="", flush=True)
            except KeyboardInterrupt:
                pieces.close()
        completion = pieces.completion
        print(json.dumps(completion.to_dict()) if self.as_json else f"\n{describe_speed(completion)}", flush=True)
        return completion


def _lines(prompt: str) -> Iterator[str]:
    """Yield what a person types, line by line; Ctrl-C at the prompt only starts a new line."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves", file=sys.stderr)
            continue
        if line:
            yield line
