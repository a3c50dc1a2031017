"""Names on disk and names at run time: Hugging Face's, with and without the leading ``model.``.

Place: used by ``checkpoint`` when it loads and saves. ``gguf`` turns its own names
(``blk.0.attn_q``) into these itself. Does not touch tensors.
"""

from __future__ import annotations

import re

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_PREFIX = "model."

_COMPUTED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def is_ignored(file_name: str) -> bool:
    """Return whether a load passes a stored tensor over, because it is computed from the config."""
    return _COMPUTED.fullmatch(file_name) is not None


def runtime_name(file_name: str) -> str | None:
    """Return the run-time name of a stored tensor, or None where the layout has no such place."""
    if file_name.startswith(_PREFIX):
        return file_name.removeprefix(_PREFIX)
    return file_name if file_name == HEAD else None


def file_name(runtime_name: str) -> str:
    """Return the on-disk name of a run-time parameter."""
    return runtime_name if runtime_name == HEAD else _PREFIX + runtime_name
