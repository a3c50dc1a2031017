"""Plain English out of packages: HTML pages, wrapped text, verse, R's data, each as documents of paragraphs.

Place: ``reference_data.py`` fetches the packages and writes what these functions yield. Only prose and verse are kept:
code, tables, menus and signatures would teach a small model nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from html import unescape
from html.parser import HTMLParser

Files = Iterator[tuple[str, bytes]]
Paragraphs = list[str]

_SKIPPED = frozenset("script style nav svg head footer aside pre table form button textarea summary sup".split())
_BLOCKS = frozenset(
    "p div section article main body ul ol li dl dt dd blockquote h1 h2 h3 h4 h5 h6 br hr center details".split()
)
_MENUS = re.compile(
    r"related|navigation|sidebar|footer|navheader|toc|menu|out-of-band|item-decl|code-header|versionmodified|"
    r"indextable|synopsis|listing|highlight|example-wrap"
)
_MARKED = frozenset("div ul h3 h4 span".split())
_SIGNS = re.compile(r"[¶§\ufeff\u200b]|\[(?:src|source|edit|\d{1,3})\]|\(#[\w-]+\)")
_QUOTES = "\"'\u2018\u2019\u201c\u201d"
_WORD = re.compile(rf"[({_QUOTES}-]*[A-Za-z]?[a-z'\u2019-]*[.,;:!?){_QUOTES}]*")
_ENDS = frozenset(".:!?)" + _QUOTES)
LONG = 40
"""Characters from which a paragraph that was seen before, anywhere, is a repetition and dropped."""


class _Page(HTMLParser):
    """Collects the text of a page's blocks; what lies in a skipped element is not looked at."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: Paragraphs = []
        self._parts: list[str] = []
        self._skipping: list[str] = []  # the open elements from the skipped one inward
        self._item = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping:
            if tag == self._skipping[0]:  # only the same name can hide its end
                self._skipping.append(tag)
            return
        if tag in _BLOCKS:
            self.flush()
            self._item = "- " if tag == "li" else self._item
        marks = " ".join(value or "" for key, value in attrs if key in ("class", "role"))
        if tag in _SKIPPED or (tag in _MARKED and _MENUS.search(marks)):
            self._skipping = [tag]

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            if tag == self._skipping[0]:
                self._skipping.pop()
        elif tag in _BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._parts.append(data)

    def flush(self) -> None:
        """End the paragraph that is open."""
        text = tidy("".join(self._parts))
        self._parts = []
        if text:
            self.paragraphs.append(self._item + text)
            self._item = ""


def tidy(text: str) -> str:
    """Return a paragraph on one line, without a page's signs."""
    return " ".join(_SIGNS.sub("", text).split())


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph reads as English: words of small letters, few signs, a sentence's end."""
    words = paragraph.split()
    plain = sum(_WORD.fullmatch(word) is not None for word in words)
    return len(words) >= 6 and plain >= 0.75 * len(words) and paragraph[-1] in _ENDS


def pages(files: Files) -> Iterator[Paragraphs]:
    """Yield the prose of HTML pages, each under its own title."""
    for name, data in files:
        if not name.endswith((".html", ".htm")):
            continue
        page, content = _Page(), data.decode("utf-8", "replace")
        page.feed(content)
        page.flush()
        title = re.search(r"<title>([^<]*)", content)
        name_of_page = [tidy(re.split(r" — Python| &#8212; Python| - ", unescape(title[1]))[0])] if title else []
        yield name_of_page + [p for p in page.paragraphs if is_prose(p)]


def jargon(files: Files) -> Iterator[Paragraphs]:
    """Yield the Jargon File's chapters and entries; an entry begins with its word and how it is said."""
    for name, data in files:
        if not name.endswith("jargon.txt.gz"):
            continue
        document: Paragraphs = []
        for block in map(tidy, re.split(r"\n\s*\n", gzip.decompress(data).decode("utf-8"))):
            entry = re.match(r":[^:]{1,40}:( |$)", block)
            if (entry or re.match(r"Chapter \d+\.|Appendix [A-Z]\.", block)) and document:
                yield document
                document = []
            if entry or (len(block) > 30 and not set(block) & set("═│")):
                document.append(re.sub(r"\{([^{}]*)\}", r"\1", block))
        yield document


def bible(files: Files) -> Iterator[Paragraphs]:
    """Yield a chapter each, a verse a line."""
    for name, data in files:
        if not name.endswith("kjv.jsonl"):
            continue
        place, verses = None, []
        for line in data.decode("utf-8").splitlines():
            verse = json.loads(line)
            here = (verse["book"], verse["chapter"])
            if place not in (None, here):
                yield ["\n".join(verses)]
                verses = []
            place = here
            verses.append(tidy(verse["text"]))
        yield ["\n".join(verses)]


def novels(files: Files) -> Iterator[Paragraphs]:
    """Yield the chapters of the novels in a package of R: strings in compressed, serialised vectors."""
    for name, data in files:
        if not name.endswith("data/Rdata.rdb"):
            continue
        at = 0
        while at < len(data):
            stream = zlib.decompressobj()
            vector = stream.decompress(data[at + 4 :])  # four bytes say how long it will be
            at = len(data) - len(stream.unused_data)
            yield from chapters("\n".join(_strings(vector)))


def _strings(vector: bytes) -> Iterator[str]:
    """Yield the strings of a serialised character vector: a flag word of type 9, a length, the bytes."""
    at = vector.index(b"\x00\x04\x00\x09")
    while at + 8 <= len(vector):
        flags, length = struct.unpack(">Ii", vector[at : at + 8])
        if flags & 0xFF != 9:
            return
        yield vector[at + 8 : at + 8 + max(0, length)].decode("utf-8")
        at += 8 + max(0, length)


def chapters(text: str) -> Iterator[Paragraphs]:
    """Yield what lies between a book's lines that say chapter or volume; wrapped lines are joined."""
    for part in re.split(r"(?im)^\s*(?:chapter|volume)\s+[\divxlc]+\.?\s*$", text):
        yield [tidy(block.replace("_", "")) for block in re.split(r"\n\s*\n", part) if block.strip()]


def speeches(files: Files) -> Iterator[Paragraphs]:
    """Yield the annual messages of American presidents up to 1963, a message each."""
    for name, data in files:
        year = re.search(r"speeches/(\d{4})-", name)
        if year and int(year[1]) <= 1963:
            yield [tidy(block) for block in re.split(r"\n\s*\n", data.decode("utf-8"))]


def verse(files: Files) -> Iterator[Paragraphs]:
    """Yield scenes and poems of the modern-spelling texts; lines stay lines."""
    for name, data in files:
        if not re.search(r"(shksprdata|miltondata)/texts/\w.*_gut\.txt$", name) or "poemata" in name:
            continue
        text = data.decode("utf-8", "replace").replace("\r", "")
        for part in re.split(r"(?m)^\s*(?=(?:SCENE|Scene|BOOK|ACT) [IVX\d]+)", text):
            lines = [line.rstrip() for line in part.strip().split("\n")]
            yield re.split(r"\n{2,}", re.sub(r"[ \t]+\n", "\n", "\n".join(lines)))


class Repetitions:
    """Drops what was seen before: long paragraphs anywhere, and documents that are the same."""

    def __init__(self) -> None:
        self._paragraphs: set[bytes] = set()
        self._documents: set[bytes] = set()

    def clean(self, documents: Iterable[Paragraphs], least: int) -> Iterator[str]:
        """Yield documents of at least ``least`` characters as text, without what any earlier one said."""
        for paragraphs in documents:
            kept = [p for p in paragraphs if p.strip() and (len(p) < LONG or _is_new(p, self._paragraphs))]
            text = "\n\n".join(kept)
            if len(text) >= least and _is_new(text, self._documents):
                yield text + "\n"


def _is_new(text: str, seen: set[bytes]) -> bool:
    digest = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()[:16]
    new = digest not in seen
    seen.add(digest)
    return new
