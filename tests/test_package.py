"""The wheel as a stranger meets it: installed in an empty environment outside the checkout, run and type-checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

CONSUMER = '''\
"""Save a small random model, load it back by name, and continue a prompt."""

import sys

import tokenizers

import microllm
from microllm.io.checkpoint import save_checkpoint

folder = sys.argv[1]
letters = {letter: number for number, letter in enumerate("abcdefgh")}
config: microllm.ModelConfig = microllm.preset("tiny", vocab_size=len(letters))
model = microllm.Transformer(config).initialise(seed=7)
save_checkpoint(folder, config, model.state_dict())
tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[])).save(f"{folder}/tokenizer.json")
llm: microllm.LLM = microllm.load(folder, device="cpu")
params = microllm.SamplingParams(temperature=0, max_tokens=5)
completion: microllm.Completion = llm.generate("abba", params)
score: microllm.Score = llm.score("abba" + completion.text)
assert llm.generate([0, 1, 1, 0], params).token_ids == completion.token_ids
assert score.num_tokens == 8 and score.perplexity is not None
print(microllm.__file__, completion.finish_reason, *completion.token_ids)
'''

WRONG = """
from microllm import ModelConfig

size: str = ModelConfig.num_parameters
"""

# A module that is None in sys.modules cannot be imported.
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from microllm.cli import main
sys.exit(main(sys.argv[2:]))
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of this checkout."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the sources, so that nothing is left in the checkout or taken from an old build."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources)
    shutil.copytree(REPOSITORY / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".", cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (sources / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel; its dependencies come from this environment."""
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    done = run(sys.executable, "-m", "venv", "--without-pip", home, cwd=wheel.parent)
    assert done.returncode == 0, done.stderr
    python = home / "bin" / "python"
    paths = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    site = Path(paths.stdout.strip())
    done = run(
        sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", site, wheel, cwd=home
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Searched after the environment's own folder; an editable microllm there is not followed from a .pth file.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_types_tables_and_licence(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "microllm/py.typed" in names
    assert "microllm/io/registry.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"microllm", wheel.name.split("-py3")[0] + ".dist-info"}
    on_disk = {p.relative_to(REPOSITORY / "src").as_posix() for p in (REPOSITORY / "src/microllm").rglob("*.py")}
    assert on_disk == {name for name in names if name.endswith(".py")}


@pytest.fixture(scope="module")
def consumed(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the consumer; return the folder where it left ``model``, and what it printed."""
    folder = tmp_path_factory.mktemp("consumer")
    (folder / "consumer.py").write_text(CONSUMER)
    done = run(python, "consumer.py", "model", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_consumer_runs_outside_the_checkout(python: Path, consumed: tuple[Path, str]):
    assert len([line for line in CONSUMER.splitlines() if line]) <= 20
    file, reason, *token_ids = consumed[1].split()
    assert Path(file).is_relative_to(python.parents[1]), f"ran {file}, not the wheel's copy"
    assert (reason, len(token_ids)) == ("length", 5)


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("transformers", "hf", ("align", "--model", "model", "--quick")),
        ("matplotlib", "plot", ("align", "--model", "model", "--quick", "--output", "report")),
    ],
)
def test_missing_extra_is_named(
    package: str, extra: str, arguments: tuple[str, ...], python: Path, consumed: tuple[Path, str]
):
    done = run(python, "-c", WITHOUT, package, *arguments, cwd=consumed[0])
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"got no package '{package}'" in done.stderr
    assert f"pip install 'microllm[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_consumer_type_checks_against_the_wheel(python: Path, tmp_path: Path):
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "wrong.py").write_text(WRONG)
    pyright = (sys.executable, "-m", "pyright", "--pythonpath", python)
    done = run(*pyright, "consumer.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run(*pyright, "wrong.py", cwd=tmp_path)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "reportAssignmentType" in refused.stdout, "the package's types were not read"
