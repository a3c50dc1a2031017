"""Paths as people and downloads write them: ``~`` where it can be resolved, and plain files only.

Place: every reader of ``io`` opens what it was pointed at through here. Does not know formats.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def expanded(path: Path | str) -> Path:
    """Return ``path`` with its ``~`` resolved; one that stands for nobody's home stays as it is."""
    path = Path(path)
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading in binary.

    Raises:
        OSError: it cannot be read, or is a pipe or device, whose opening or reading might never end.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a directory says what it is by itself
        raise OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: a pipe or device, no plain file", str(path))
    return path.open("rb")
