"""Speculation in the loop: guesses of what comes next, verified by the host in one step, so that no token changes.

Place: ``DecodeLoop.generate_speculative`` runs it. A draft proposes k tokens, the step takes them behind the last one,
and what the host would have chosen itself is kept, with the token after it. Cached slots of wrong guesses are
overwritten before a query sees them.

Source:  arXiv:2211.17192 (greedy case); prompt lookup as in ``sampling.draft``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from microllm import ops
from microllm.errors import StructureError
from microllm.sampling.draft import NgramProposer
from microllm.structures.host import Host
from microllm.structures.stack import logits_of
from microllm.structures.step import Step


class Draft(Protocol):
    """Guesses what follows a text of tokens."""

    def start(self) -> None:
        """Forget the last text."""
        ...

    def __call__(self, tokens: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Return at most ``most`` tokens; ``hidden`` [1, 1, D] is the host's state that gave the last token."""
        ...


class Generates(Protocol):
    """What a draft model is run by: a loop like the host's own."""

    host: Host
    max_len: int

    def generate(self, prompts: Sequence[int], *, max_new_tokens: int) -> list[list[int]]:
        """Return a prompt's greedy tokens."""
        ...


class Speculation:
    """A draft, and how many tokens it guesses at once."""

    def __init__(self, draft: Draft, k: int) -> None:
        self._draft, self.k = draft, k

    def run(self, step: Step, prompt: list[int], count: int, ends: frozenset[int]) -> tuple[list[int], int]:
        """Return the host's greedy tokens after a prompt, and how many steps they took."""
        self._draft.start()
        tokens, made, rounds = list(prompt), step.prompt([prompt], None), 1
        hidden: Tensor | None = step.last_hidden
        while len(made) < count and made[-1] not in ends:
            guesses = self._draft([*tokens, *made], hidden, self.k)
            place = len(tokens) + len(made) - 1
            ids = [made[-1], *guesses, *[0] * (self.k - len(guesses))]
            step.token_ids.copy_(torch.tensor([ids], device=step.token_ids.device))
            step.positions.copy_(torch.arange(place, place + self.k + 1, device=step.positions.device)[None])
            chosen = step.run()[0].tolist()
            right = 0
            while right < len(guesses) and guesses[right] == chosen[right]:
                right += 1
            hidden, rounds = step.hidden[:, right : right + 1], rounds + 1
            for token in chosen[: right + 1]:
                made.append(token)
                if len(made) == count or token in ends:
                    break
        return made[:count], rounds


def open_draft(
    draft: str | Path | nn.Module, host: Host, make_loop: Callable[[nn.Module], Generates]
) -> Draft:  # fmt: skip
    """Return a draft: n-grams, a model of the same vocabulary, or the ``mtp.*`` tensors of a directory.

    Raises:
        StructureError: it is none of them, or does not fit the host.
    """
    if draft == "ngram":
        return NgramDraft()
    if isinstance(draft, nn.Module):
        return ModelDraft(make_loop(draft), host)
    if isinstance(draft, str) and draft == "mtp":
        raise StructureError(
            "got draft 'mtp' without its tensors; need the directory that holds them: enable_draft(path)"
        )
    folder = Path(draft)
    found = _mtp_tensors(folder) if folder.is_dir() else {}
    if found:
        return MtpDraft(found, host)
    raise StructureError(
        f"got draft {str(draft)!r}; need 'ngram', a loaded model, or a directory whose safetensors hold mtp.* tensors"
    )


class NgramDraft:
    """What followed when the last tokens last stood in the text."""

    def __init__(self) -> None:
        self._proposer = NgramProposer()

    def start(self) -> None:
        """Forget the last text."""
        self._proposer = NgramProposer()

    def __call__(self, tokens: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Return ``most`` tokens, or none."""
        return self._proposer(tokens, most)


class ModelDraft:
    """Another host's greedy tokens, over a cache of its own that keeps what stays true of the text."""

    def __init__(self, loop: Generates, host: Host) -> None:
        self._loop = loop
        own, theirs = self._loop.host.weight.shape[0], host.weight.shape[0]
        if own != theirs:
            raise StructureError(f"got a draft of {own} tokens; need the host's vocabulary of {theirs}")

    def start(self) -> None:
        """Forget the last text."""

    def __call__(self, tokens: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Return ``most`` tokens."""
        room = self._loop.max_len - len(tokens)
        return self._loop.generate(list(tokens), max_new_tokens=min(most, room))[0] if room > 0 else []


class MtpDraft:
    """A multi-token head: the host's state and the next token's embedding, normed, joined, and one block over them.

    Its tensors: ``mtp.pre_fc_norm_hidden.weight``, ``mtp.pre_fc_norm_embedding.weight``, ``mtp.fc.weight`` [D, 2 D],
    ``mtp.norm.weight``, and a feed-forward network ``mtp.layers.0.mlp.*`` with its norm. The token table and the head
    are the host's. Without attention of its own, it guesses from the last state alone.
    """

    _NEEDED = (
        "pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight", "fc.weight", "norm.weight",
        "layers.0.post_attention_layernorm.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
    )  # fmt: skip

    def __init__(self, tensors: Mapping[str, Tensor], host: Host) -> None:
        missing = [name for name in self._NEEDED if f"mtp.{name}" not in tensors]
        D = host.weight.shape[1]
        if missing or tensors["mtp.fc.weight"].shape != (D, 2 * D):
            raise StructureError(f"got mtp tensors without {missing}; need them, with fc.weight [{D}, {2 * D}]")
        self._host, self._eps = host, float(host.constant("eps"))
        self._w = {name: tensors[f"mtp.{name}"].to(host.weight.device, host.weight.dtype) for name in self._NEEDED}

    def start(self) -> None:
        """Forget the last text: it keeps none."""

    def __call__(self, tokens: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Return ``most`` tokens, each from the state that gave the one before it."""
        found: list[int] = []
        token, w = tokens[-1], self._w
        while hidden is not None and len(found) < most:
            embedded = self._host.weight[token][None, None]
            joined = torch.cat(
                (
                    ops.rms_norm(embedded.contiguous(), w["pre_fc_norm_embedding.weight"], eps=self._eps),
                    ops.rms_norm(hidden.contiguous(), w["pre_fc_norm_hidden.weight"], eps=self._eps),
                ), dim=-1,
            )  # fmt: skip
            x = ops.linear(joined, w["fc.weight"])
            normed = ops.rms_norm(x, w["layers.0.post_attention_layernorm.weight"], eps=self._eps)
            gate, up = (ops.linear(normed, w[f"layers.0.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + ops.linear(ops.swiglu(gate, up), w["layers.0.mlp.down_proj.weight"])
            hidden = ops.rms_norm(x, w["norm.weight"], eps=self._eps)
            token = int(logits_of(self._host, hidden)[0, -1].argmax())
            found.append(token)
        return found


def _mtp_tensors(folder: Path) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("mtp.")}
    return found
