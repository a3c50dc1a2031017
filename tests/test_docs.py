"""What README, docs and examples say runs, and prints what they show."""

import contextlib
import io
import pathlib
import re
import subprocess
import sys

import pytest

from microllm.cli import main
from microllm.evidence.rows import read_rows
from microllm.io.demo import fetch_demo

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def demo():
    return fetch_demo()


@pytest.mark.slow
def test_the_ten_stops_run_in_order():
    stops = blocks(ROOT / "docs" / "read-the-code.md", "python")
    assert len(stops) == 10
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, stop in enumerate(stops, start=1):
            exec(compile(stop, f"stop {number}", "exec"), scope)
    assert "Paris" in printed.getvalue()


def test_the_stops_name_files_that_exist():
    page = (ROOT / "docs" / "read-the-code.md").read_text()
    named = re.findall(r"`(src/[\w/.]+)`", page)
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_engines_page_runs_and_names_what_exists():
    page = ROOT / "docs" / "engine.md"
    (code,) = blocks(page, "python")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "engine.md", "exec"), {})
    assert "Paris" in printed.getvalue()
    source = "".join(path.read_text() for path in (ROOT / "src/microllm/inference").glob("*.py"))
    life = page.read_text().split("A request's life")[1].split("What is promised")[0]
    names = re.findall(r"`(?:\w+\.)?(\w+)`", life)
    assert len(names) >= 8
    assert [name for name in names if f"def {name}(" not in source] == []


def test_the_page_on_one_kernel_quotes_its_files_and_runs():
    page = ROOT / "docs" / "one-kernel.md"
    quoted = [block for block in blocks(page, "python") if block.startswith("# src/")]
    assert len(quoted) >= 5
    for block in quoted:
        name, _, text = block.partition("\n")
        assert text in (ROOT / name.removeprefix("# ")).read_text(), f"{name} has changed; quote it anew"
    scope = {}
    for block in blocks(page, "python"):
        if block not in quoted:
            exec(compile(block, page.name, "exec"), scope)
    rows = read_rows(ROOT / "lab" / "rows" / "ops.jsonl")
    large = re.compile(r"rms_norm .* (4096|16384) rows")  # of a few rows a launch is timed, and no bandwidth
    measured = any(row.ours is not None and large.match(row.workload) for row in rows)
    assert measured != ("not measured yet" in page.read_text()), "lab/rows and the page disagree; show the row there is"


def test_readme_python_prints_what_it_shows():
    (code,) = blocks(ROOT / "README.md", "python")
    want = re.findall(r"^# -> (.*)$", code, flags=re.MULTILINE)
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) == 8
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == want


def test_readme_commands_exist():
    """Every microllm command line in the README parses: its subcommand and flags are real."""
    commands = re.findall(r"^\$ microllm (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        words = [w.strip('"') for w in re.findall(r'"[^"]*"|\S+', command)]
        with contextlib.redirect_stdout(io.StringIO()) as page, pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0, command
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in page.getvalue(), f"{flag} of: {command}"


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path):
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert run.stderr == ""


def test_examples_are_seven_of_at_most_forty_lines():
    assert len(EXAMPLES) == 7
    assert {path.stem: n for path in EXAMPLES if (n := len(path.read_text().splitlines())) > 40} == {}


def test_the_training_pages_commands_parse():
    text = (ROOT / "docs/training.md").read_text()
    commands = re.findall(r"^\$ (?:torchrun.* -m )?microllm (.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        words = command.split()
        with contextlib.redirect_stdout(io.StringIO()) as page, pytest.raises(SystemExit) as stopped:
            main([*words[: 2 if words[0] in ("data", "bench") else 1], "--help"])
        assert stopped.value.code == 0, command
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in page.getvalue(), f"{flag} of: {command}"
    for flag in set(re.findall(r"`(--[a-z-]+)", text)):
        with contextlib.redirect_stdout(io.StringIO()) as page, pytest.raises(SystemExit):
            main(["train", "--help"])
        assert flag in page.getvalue(), flag


def test_the_page_on_structures_runs_with_a_structure_host_backend_and_scheme_of_its_own(tmp_path, monkeypatch):
    page = ROOT / "docs" / "structures.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MICROLLM_HOME", str(tmp_path / "home"))
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in re.findall(r"```(?:python|yaml)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            if block.startswith("# mine/"):
                path = pathlib.Path(block.splitlines()[0].removeprefix("# "))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block)
            else:
                exec(compile(block, "structures.md", "exec"), scope)
    assert "bound    decoder_ffn x 2" in printed.getvalue()
    assert "bound    relu_ffn x 2" in printed.getvalue()
