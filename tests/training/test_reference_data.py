"""How the reference run's text is got out of packages: pages, novels in R's data, entries, what repeats."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
import zlib

import pytest

import reference_data
import reference_text as text
from fetch_test_data import FetchError

PAGE = b"""<html><head><title>9. Trees &#8212; Python 3</title><style>p { x }</style></head><body>
<div class="related"><p>Previous page and next page are in here, all of them.</p></div><h1>Trees</h1>
<p>A tree has one root&nbsp;and as many leaves
 as it likes.<p>It grows in <code>winter()</code> too, as all of them do.
<pre>for leaf in tree: print(leaf)</pre><table><tr><td>A table is not a text, and is left out.</table>
<ul><li>The first of the things that a tree does.</li></ul><p>leaf_count = 3</p></body></html>"""


def test_a_page_gives_its_title_and_its_sentences():
    (found,) = text.pages(iter([("a/trees.html", PAGE), ("a/trees.css", b"p")]))
    assert found == [
        "9. Trees", "A tree has one root and as many leaves as it likes.",
        "It grows in winter() too, as all of them do.",
        "- The first of the things that a tree does.",
    ]  # fmt: skip


def test_novels_are_read_out_of_serialised_strings():
    lines = ["EMMA", "", "CHAPTER I", "", "Emma was _very_", "clever.", "", "She knew.", "CHAPTER II", "", "More."]
    vector = b"X\n" + bytes(12) + b"".join(struct.pack(">II", 0x40009, len(s)) + s.encode() for s in lines)
    data = b"".join(struct.pack(">I", len(vector)) + zlib.compress(vector) for _ in range(2))
    found = list(text.novels(iter([("x/data/Rdata.rdb", data)])))
    assert found == [["EMMA"], ["Emma was very clever.", "She knew."], ["More."]] * 2


def test_an_entry_begins_with_its_word():
    entries = (
        "   :foo: /foo/\n\n   A word that is used where\n   there is {no other}.\n\n   ═══\n\n   :bar: n.\n\n   Foo's."
    )
    found = list(text.jargon(iter([("jargon.txt.gz", gzip.compress(entries.encode()))])))
    assert found == [[":foo: /foo/", "A word that is used where there is no other."], [":bar: n."]]


def test_what_was_said_before_is_not_said_again():
    long = "This sentence is in the footer of every page."
    documents = [["One.", long], ["Two.", long], ["One.", long.upper()], ["Short."], ["Short."]]
    assert list(text.Repetitions().clean(documents, 4)) == [f"One.\n\n{long}\n", "Two.\n", "One.\n", "Short.\n"]


def test_a_debian_package_is_read_without_dpkg(tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("./usr/share/doc/x.html")
        info.size = len(PAGE)
        tar.addfile(info, io.BytesIO(PAGE))
    data = lzma.compress(packed.getvalue())
    members = [("debian-binary", b"2.0"), ("data.tar.xz", data)]
    package = b"!<arch>\n" + b"".join(
        f"{name:16}{0:<12}{0:<6}{0:<6}{0:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        for name, content in members
    )
    (tmp_path / "x.deb").write_bytes(package)
    assert list(reference_data.files_of(tmp_path / "x.deb")) == [("./usr/share/doc/x.html", PAGE)]


def test_an_archive_of_other_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MICROLLM_HOME", str(tmp_path))

    def other(manager, requirement, scratch):
        (scratch / "other.deb").write_bytes(b"other")
        return scratch / "other.deb"

    monkeypatch.setattr(reference_data, "download", other)
    with pytest.raises(FetchError, match="another SHA-256"):
        reference_data.archive_of(reference_data.SOURCES[0])
    assert list((tmp_path / "reference").iterdir()) == []
