"""``microllm inspect``: what a checkpoint is, without allocating its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from microllm.lab.inspect_model import Inspection


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show a model's config, parameters, bytes, cache cost and what would be refused; no weight is read."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def run(self) -> int:
        """Print the inspection; 1 when the model would be refused."""
        from microllm.lab.inspect_model import inspect_model

        found = inspect_model(self.model)
        if self.as_json:
            print(json.dumps(found.to_dict()))
        else:
            _show(found)
        return 1 if found.refused else 0


def _show(found: Inspection) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("", Column(overflow="fold"), box=None, show_header=False)
    table.add_row("model", f"{found.name} ({found.kind})")
    if found.config is not None:
        for name, value in asdict(found.config).items():
            parts = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [str(value)]
            table.add_row(name, ", ".join(parts))
        table.add_row("parameters", f"{found.num_parameters:,} in {found.num_tensors} stored tensors")
        for dtype, num_bytes in found.bytes_by_dtype.items():
            table.add_row(f"stored as {dtype}", f"{num_bytes:,} bytes")
        for dtype, num_bytes in found.kv_bytes_per_token.items():
            table.add_row(f"KV cache, {dtype}", f"{num_bytes:,} bytes a token")
        for name, value in found.generation.items():
            table.add_row(f"author's {name}", str(value))
    for reason in found.refused:
        table.add_row("refused", reason, style="red")
    Console(markup=False).print(table)  # a file's own words may look like markup
