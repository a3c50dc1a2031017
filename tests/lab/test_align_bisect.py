"""Bisecting: the planted set is found by name, every time and within the bound; what cannot be bisected is refused."""

from __future__ import annotations

import json
import random

import pytest
import torch

from microllm.cli import main
from microllm.errors import ConfigError, EvidenceError
from microllm.lab import align_bisect
from microllm.lab.align import AlignConfig
from microllm.lab.align_bisect import minimise, run_align_bisect, substituted

pytestmark = pytest.mark.slow

TOKENS = tuple(torch.randint(97, (64,), generator=torch.Generator().manual_seed(3)).tolist())
# family -> two planted faults, and a limit that neither passes alone (with all else in bf16) but both do
PLANTS = {
    "llama": ("layers.0.mlp.gate_proj", "layers.1.mlp.down_proj", 0.09),
    "qwen2": ("layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", 0.125),
    "qwen3": ("layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", 0.085),
}


def bisect(directory, progress=lambda text: None, **changes):
    return run_align_bisect(AlignConfig(model=str(directory), tokens=TOKENS, bisect="precision", **changes), progress)


@pytest.mark.parametrize("family", PLANTS)
def test_two_planted_faults_in_two_layers_are_found_three_times_of_three(family, random_model, tmp_path):
    first, second, limit = PLANTS[family]
    lines = []
    reports = [
        bisect(random_model(family), lines.append, perturb=f"{first},{second}", limit=limit, output=tmp_path)
        for _ in range(3)
    ]
    assert [report.sites for report in reports] == [(first, second)] * 3
    assert reports[0].trials == reports[1].trials == reports[2].trials
    report = reports[0]
    assert report.minimal
    assert f"2 of 21 projections in bf16 fail by logits' relative L2 error over {limit:g}" in report.verdict
    assert f"{first}, {second}; without any one of them it passes" in report.verdict
    assert f"{len(report.trials) + 1} runs of at most 500" in report.verdict
    assert len(report.trials) < 100
    assert len(lines) == 3 * (len(report.trials) - 1)  # a line for both ends, one for each run between
    assert json.loads((tmp_path / "bisect.json").read_text())["sites"] == [first, second]


def test_a_planted_fault_that_flips_a_token_is_found_from_the_command_line(random_model, capsys):
    words = ["align", "--model", str(random_model("llama")), "--bisect", "precision", "--json"]
    words += ["--perturb", "layers.0.mlp.up_proj", "--tokens", *(str(t) for t in TOKENS)]
    assert main(words) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["sites"] == ["layers.0.mlp.up_proj"]
    assert report["gate"].startswith("another token after position ")
    assert "all 21 projections in bf16 fail" in printed.err
    position = report["gate"].split()[-1]
    assert main([*words, "--position", position]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == report["trials"]


def test_used_up_runs_leave_a_failing_set_that_is_not_called_minimal(random_model, capsys):
    first, second, limit = PLANTS["llama"]
    report = bisect(random_model("llama"), perturb=f"{first},{second}", limit=limit, max_runs=8)
    assert len(report.trials) == 7
    assert not report.minimal
    assert {first, second} < set(report.sites)
    assert "NOT known to be minimal" in report.verdict
    words = ["align", "--model", str(random_model("llama")), "--bisect", "precision", "--max-runs", "3"]
    words += ["--limit", "0.001", "--tokens", *(str(t) for t in TOKENS)]
    assert main(words) == 1
    assert "3 runs of at most 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"limit": 0.5}, EvidenceError, r"got no failure \(logits' relative L2 error over 0.5\) with all 21"),
        ({"position": 0}, EvidenceError, r"got no failure \(another token after position 0\)"),
        ({"limit": 1e-9}, EvidenceError, "fails with every projection in fp32"),
        ({"position": 64}, ConfigError, "need 0 to 63"),
        ({"limit": 0.0}, ConfigError, "need a finite relative error above 0"),
        ({"limit": 0.1, "position": 3}, ConfigError, "need one gate"),
        ({"max_runs": 2}, ConfigError, "need at least 3"),
        ({"train": True}, ConfigError, "need one of the two"),
        ({"perturb": "layers.0.mlp.up_proj,layers.9.mlp"}, ConfigError, "got perturb='layers.9.mlp'"),
    ],
)
def test_what_cannot_be_bisected_is_refused(changes, kind, text, random_model):
    with pytest.raises(kind, match=text):
        bisect(random_model("llama"), **changes)


def test_an_unknown_mode_is_refused(random_model, capsys):
    directory = str(random_model("llama"))
    with pytest.raises(ConfigError, match="need 'precision'"):
        run_align_bisect(AlignConfig(model=directory, tokens=TOKENS, bisect="speed"), print)
    with pytest.raises(SystemExit) as stopped:
        main(["align", "--model", directory, "--bisect", "speed"])
    assert stopped.value.code == 2
    assert "precision" in capsys.readouterr().err


def test_a_model_without_a_differing_token_is_refused(random_model):
    with pytest.raises(EvidenceError, match="another token at any position"):
        bisect(random_model("qwen2"), num_tokens=4)


def test_runs_that_do_not_repeat_are_refused(random_model, monkeypatch):
    honest = align_bisect._Trials.logits
    monkeypatch.setattr(align_bisect._Trials, "logits", lambda *args: honest(*args) + 1e-3 * torch.rand(()))
    with pytest.raises(EvidenceError, match="other logits from a second equal run"):
        bisect(random_model("llama"), limit=0.01)


def test_substituted_modules_go_back_whatever_happens():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    own = list(model)

    def stop(*args):
        raise RuntimeError

    other = torch.nn.Identity()
    other.register_forward_hook(stop)
    with pytest.raises(RuntimeError), substituted(model, {"1": other}):
        model(torch.ones(2))
    assert list(model) == own


@pytest.mark.parametrize("count", [1, 2, 7, 168])
def test_minimise_finds_random_culprits_within_its_bound(count):
    items = [str(i) for i in range(count)]
    for seed in range(20):
        culprits = set(random.Random(seed).sample(items, min(count, 1 + seed % 4)))
        asked = []

        def fails(subset, culprits=culprits, asked=asked):
            asked.append(subset)
            return culprits <= set(subset)

        assert set(minimise(items, fails)) == culprits
        assert len(asked) <= count * count + 3 * count


def test_minimise_of_what_is_not_monotone_passes_without_any_one():
    items = [str(i) for i in range(24)]

    def fails(subset):
        return len(subset) in (24, 12, 9, 5)

    found = minimise(items, fails)
    assert fails(found)
    assert not any(fails([i for i in found if i != one]) for one in found)
