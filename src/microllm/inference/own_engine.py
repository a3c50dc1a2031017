"""The engines that an ``LLM`` keeps for its own calls on a GPU: made at the first call, kept, grown when need be.

Place: ``LLM.generate`` and ``LLM.stream`` run their sequences here wherever ``runs_captured`` says so. An engine has
one of a few contexts, of which a call's longest request picks one, so that bits do not depend on the calls before;
prompts of one call share their beginnings, those of different calls do not, for the same reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from microllm import ops
from microllm.inference.engine import Engine
from microllm.inference.engine_config import EngineConfig
from microllm.inference.plan import Plan
from microllm.inference.sequence import GeneratedSequence
from microllm.model import Transformer
from microllm.step import layer_dtypes, page_bytes

if TYPE_CHECKING:
    from microllm.inference.llm import LLM

CONTEXTS = (1024, 8192)
"""Contexts of engines, and the model's own: few, for attention splits the keys by them."""
MAX_ROWS, MIN_ROWS = 32, 8
MAX_STEP_TOKENS = 4096
"""Tokens of a step: a prompt up to that many runs as one."""
_PLAIN = "microllm.model.", "microllm.inference.quantised", "torch.nn.modules.container"


def runs_captured(model: Transformer | Plan) -> bool:
    """Return whether a model's steps may run captured: on a GPU, as it was built, with nobody looking at its parts.

    Hooks, replaced modules, a forced level and a ledger of operators need the model's own forward pass.
    """
    if not isinstance(model, Transformer) or model.norm.weight.device.type != "cuda" or ops.is_watched():
        return False
    return is_plain(model)


def is_plain(model: Transformer) -> bool:
    """Return whether a Transformer is of its own modules alone, and none of them has a hook."""
    return all(
        type(module).__module__.startswith(_PLAIN) and not (module._forward_hooks or module._forward_pre_hooks)
        for module in model.modules()
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine, the pages that were asked for it, and where the weights lay that it packed."""

    engine: Engine
    num_pages: int
    places: tuple[int, ...]


class OwnEngines:
    """The engines of one ``LLM``, by their context; ``make`` makes one, ``suit`` says which models run so."""

    def __init__(
        self, make: Callable[[LLM, EngineConfig], Engine] = Engine,
        suit: Callable[[Transformer | Plan], bool] = runs_captured,
    ) -> None:  # fmt: skip
        self._make, self.suit = make, suit
        self._kept: dict[int, Kept] = {}
        self._num_calls = 0
        self._lock = threading.Lock()

    def steps(self, llm: LLM, sequences: Sequence[GeneratedSequence]) -> Generator[None]:
        """Run sequences to their ends, pausing after each step; closed early, those that still run are cancelled."""
        with self._lock:
            engine, number = self._engine(llm, sequences), self._num_calls
            self._num_calls += 1
            requests = engine.submit(sequences, salt=number.to_bytes(8, "little"))
        try:
            while any(request.finish_reason is None for request in requests):
                engine.step()
                yield
        finally:
            for request in requests:
                engine.cancel(request)

    def _engine(self, llm: LLM, sequences: Sequence[GeneratedSequence]) -> Engine:
        """Return an engine that has room for more sequences, the one that is there or a larger one in its place."""
        longest = llm.config.max_position_embeddings
        lengths = [len(sequence.prompt_ids) + sequence.max_new_tokens for sequence in sequences]
        context = next((c for c in CONTEXTS if max(lengths) <= c < longest), longest)
        kept = self._kept.get(context)
        if kept is not None and kept.places != _places(llm.transformer):
            kept = None
        if kept is not None:  # what runs there already
            with kept.engine.lock:
                scheduler = kept.engine.scheduler
                lengths += [r.max_stored_tokens for r in (*scheduler.running, *scheduler.waiting)]
        num_rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (len(lengths) - 1).bit_length()))
        size = EngineConfig().page_tokens
        num_pages = sum(sorted(-(-length // size) for length in lengths)[-num_rows:])
        if kept is not None and num_rows <= kept.engine.config.num_rows and num_pages <= kept.num_pages:
            return kept.engine
        num_pages = max(1 << (num_pages - 1).bit_length(), context // size)
        del kept
        self._kept.pop(context, None)  # its memory goes before the next one's comes, unless a stream still reads
        bare = llm.uncaptured()  # without engines: no circle keeps a GPU's memory alive
        engine = self._make(bare, _config(llm, context, num_rows, num_pages))
        self._kept[context] = Kept(engine, num_pages, _places(llm.transformer))
        return engine


def _config(llm: LLM, context: int, num_rows: int, num_pages: int) -> EngineConfig:
    size = EngineConfig().page_tokens
    return EngineConfig(
        max_rows=num_rows, max_context=context, max_step_tokens=MAX_STEP_TOKENS, page_tokens=size,
        kv_bytes=num_pages * page_bytes(llm.config, size, layer_dtypes(llm.config, "auto", llm.dtype)),
    )  # fmt: skip


def _places(model: Transformer) -> tuple[int, ...]:
    """Return where the weights lie: an engine whose weights were moved or replaced since is of no use."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
