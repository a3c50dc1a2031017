"""JSON from files nobody vouches for: bounded size, one object at the root, no key twice.

Place: used by the config, safetensors and registry readers. Does not know what the keys mean.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from microllm.errors import MicroLLMError
from microllm.io.paths import open_plain


def parse_json_object(data: bytes, what: str, error: type[MicroLLMError]) -> dict[str, Any]:
    """Return the object that ``data`` holds; ``what`` names it in the text of ``error``.

    Raises:
        MicroLLMError: of class ``error``: not UTF-8, not JSON, a repeated key, or not an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"got key {twice!r} twice in {what}; need each key once; write the file again")
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, error):
            raise
        raise error(f"got {what} that is not valid JSON ({problem}); need one UTF-8 JSON object") from problem
    if not isinstance(value, dict):
        raise error(f"got {what} with a JSON {type(value).__name__}; need one JSON object")
    return value


def read_json_object(path: Path, max_bytes: int, error: type[MicroLLMError]) -> dict[str, Any]:
    """Return the JSON object in the file at ``path``, which may hold ``max_bytes`` at most.

    Raises:
        MicroLLMError: of class ``error``: no such plain file, too big, or not one JSON object.
    """
    try:
        with open_plain(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as problem:
        raise error(f"got no readable {path} ({problem.strerror}); need that file") from problem
    if len(data) > max_bytes:
        raise error(f"got {path} of more than {max_bytes} bytes; need at most that; is it the right file?")
    return parse_json_object(data, str(path), error)
