"""Find a model by name or path: the demo, a directory, a GGUF file, or a name in the local Hugging Face cache.

Place: first step of every load; what it returns goes to ``io/checkpoint.py`` and ``io/tokenizer.py``.
Does not open weights and never downloads, except the demo (``io/demo.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies: ``path`` is a directory with config.json, or one GGUF file."""

    name: str
    path: Path
    kind: Literal["directory", "gguf"]
