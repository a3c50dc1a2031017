"""``microllm align``: our model beside its Hugging Face twin on the same tokens."""
from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class Align:
    """Compare."""
    model: str = "demo"
    def run(self) -> int:
        """Run."""
        return 0
