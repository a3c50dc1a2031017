"""What README and docs/serving.md say to type works, and the files and flags that they name are there."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, PAGE, SCALING = (ROOT / name for name in ("README.md", "docs/serving.md", "docs/scaling.md"))


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_the_curl_commands_work(page, server, settled):
    commands = re.findall(r"^\$ (curl localhost:8000(?:.*\\\n)*.*)", page.read_text(), flags=re.MULTILINE)
    assert commands
    for command in commands:
        here = command.replace("curl ", "curl -s ").replace("http://", "").replace("localhost:8000", server.url)
        printed = subprocess.run(here.replace('"demo"', '"tiny"'), shell=True, capture_output=True, check=True).stdout
        assert json.loads(printed)["choices"]


def test_readmes_serving_section_is_five_lines():
    section = README.read_text().split("### Serve")[1].split("```")[1]
    assert len(section.strip().splitlines()) - 1 == 5


def test_the_pages_python_works(server, settled):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    scope = {}
    exec(
        compile(code.replace("http://localhost:8000", server.url).replace('"demo"', '"tiny"'), "serving.md", "exec"),
        scope,
    )
    assert scope["answer"].choices
    scope["client"].close()


def test_flags_and_files_that_the_pages_name_exist(capsys):
    from microllm.cli import parse_command

    texts = {}
    for name in ("serve", "bench"):
        words = ["serve", "--help"] if name == "bench" else ["--help"]
        with pytest.raises(SystemExit):
            parse_command(name, words, "x")
        texts[name] = capsys.readouterr().out
    for page in (README, PAGE, SCALING):
        text = page.read_text()
        if page == README:  # what is told of the other commands, in the table, has tests of its own
            text = "\n".join(line for line in text.split("### Serve")[-1].splitlines() if line[:1] != "|")
        for flag in re.findall(r"`(--[a-z-]+)", text):
            assert re.search(rf"{flag}\b", "".join(texts.values())), flag
        for name in re.findall(r"`((?:examples|tests|docs|src)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), name
    files = re.findall(r"`(\w+\.py)`", PAGE.read_text().split("How it is built")[1])
    assert len(files) >= 7
    assert all((ROOT / "src/microllm/serving" / name).exists() for name in files)
