"""Gates: the metrics against hand-made numbers, the bands, the floors, and the two checks a gate makes of itself."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn import functional

from microllm.errors import EvidenceError
from microllm.evidence.gates import (
    STRICT,
    band,
    gate_metrics,
    refusals,
    run_gate,
    same_bits,
)

torch.manual_seed(0)
REFERENCE = torch.randn(40, 50)
value_metrics = functools.partial(gate_metrics, "values")
distribution_metrics = functools.partial(gate_metrics, "distribution")


def rotated(cosine: float) -> torch.Tensor:
    """Return REFERENCE turned so that its cosine to itself is ``cosine``."""
    flat = REFERENCE.double().flatten()
    other = torch.randn(flat.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other -= (other @ flat) / (flat @ flat) * flat
    other *= flat.norm() / other.norm()
    return (cosine * flat + math.sqrt(1 - cosine**2) * other).reshape(REFERENCE.shape)


def flipped(count: int) -> torch.Tensor:
    """Return REFERENCE with the argmax of ``count`` of its 40 rows moved."""
    changed = REFERENCE.clone()
    for row in range(count):
        changed[row, (int(changed[row].argmax()) + 1) % 50] = 10.0
    return changed


@pytest.mark.parametrize("cosine", [0.9995, 0.997, 0.9, -0.5])
def test_cosine_by_construction(cosine):
    assert value_metrics(rotated(cosine), REFERENCE.double()).cosine == pytest.approx(cosine, abs=1e-9)


def test_values_by_hand():
    found = value_metrics(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    assert found.cosine == pytest.approx(0.6)
    assert found.max_abs == 4.0
    assert found.rms == pytest.approx(4 / math.sqrt(2))
    assert found.relative_l2 == pytest.approx(4 / 3)
    assert value_metrics(torch.zeros(3), torch.zeros(3)).cosine == 1.0
    assert value_metrics(torch.ones(3), torch.zeros(3)).cosine == 0.0
    assert value_metrics(torch.tensor(2.0), torch.tensor(1.0)).num_rows == 1


def test_distribution_by_hand():
    reference = torch.log(torch.tensor([[0.5, 0.5 - 1e-9, 1e-9], [0.9, 0.05, 0.05]], dtype=torch.float64))
    candidate = torch.log(torch.tensor([[0.25, 0.75 - 1e-9, 1e-9], [0.8, 0.1, 0.1]], dtype=torch.float64))
    found = distribution_metrics(candidate, reference, torch.tensor([0, 0]))
    assert found.top1_agreement == 0.5
    kl = [0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.5)]
    assert found.kl == pytest.approx(sum(kl) / 2, abs=1e-7)
    ratio = math.sqrt((0.5 * 0.9) / (0.25 * 0.8))
    assert found.perplexity_change == pytest.approx(ratio - 1, abs=1e-7)
    assert distribution_metrics(candidate, reference).perplexity_change is None


def test_perplexity_against_cross_entropy():
    targets = torch.randint(0, 50, (40,))
    candidate = rotated(0.9).float()
    ours = distribution_metrics(candidate, REFERENCE, targets).perplexity_change
    oracle = functional.cross_entropy(candidate, targets).exp() / functional.cross_entropy(REFERENCE, targets).exp() - 1
    assert ours == pytest.approx(oracle.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("cosine", 0.999, "pass"),
        ("cosine", 0.99899, "warn"),
        ("cosine", 0.995, "warn"),
        ("cosine", 0.99499, "low"),
        ("cosine", math.nan, "low"),
        ("cosine", None, "low"),
        ("top1_agreement", 0.95, "pass"),
        ("top1_agreement", 0.949, "warn"),
        ("top1_agreement", 0.85, "warn"),
        ("top1_agreement", 0.849, "low"),
        ("top1_agreement", math.nan, "low"),
    ],
)
def test_bands(metric, value, expected):
    assert band(metric, value) == expected


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["values", "distribution"])
def test_non_finite_passes_nothing(kind, poison):
    candidate = REFERENCE.clone()
    candidate[3, 4] = poison
    found = gate_metrics(kind, candidate, REFERENCE, torch.zeros(40, dtype=torch.long))
    assert found.num_non_finite == 1
    for name in ("cosine", "top1_agreement", "kl", "max_abs", "rms", "relative_l2", "perplexity_change"):
        value = getattr(found, name)
        floor = -math.inf if name in ("cosine", "top1_agreement") else math.inf
        if value is not None and math.isnan(value):
            assert refusals(found, {name: floor}), name
    assert refusals(found, {"max_abs": 1e300})
    judged = "cosine" if kind == "values" else "top1_agreement"
    assert band(judged, getattr(found, judged)) == "low"


def test_floors_are_least_or_most_and_names_are_checked():
    found = value_metrics(rotated(0.997), REFERENCE.double())
    assert not refusals(found, {"cosine": 0.996, "max_abs": 10.0})
    assert "at least 0.998" in refusals(found, {"cosine": 0.998})[0]
    assert "at most 0.0001" in refusals(found, {"rms": 1e-4})[0]
    assert refusals(found, {"kl": 1.0}), "a metric that was not measured refuses"
    with pytest.raises(EvidenceError, match="need one of cosine"):
        refusals(found, {"cosinus": 0.9})


def test_strict_gate():
    near = REFERENCE + 0.01 * torch.sign(torch.randn(REFERENCE.shape))
    assert not refusals(distribution_metrics(near, REFERENCE), STRICT)
    for candidate, name in ((flipped(1), "top1_agreement"), (REFERENCE + 0.03, "rms")):
        assert any(name in text for text in refusals(distribution_metrics(candidate, REFERENCE), STRICT))
    spike = REFERENCE.clone()
    spike[0, int(spike[0].argmax())] += 0.11
    assert [text.split()[0] for text in refusals(distribution_metrics(spike, REFERENCE), STRICT)] == ["max_abs"]


def gate(candidate, kind="values", host=None, broken=None, floors=None):
    return run_gate(
        kind,
        host=host or (lambda: REFERENCE),
        candidate=lambda: candidate,
        broken=broken or (lambda: -REFERENCE),
        floors=floors or {},
    )


def test_bands_warn_and_floors_refuse():
    assert (gate(REFERENCE).band, gate(REFERENCE).passed) == ("pass", True)
    warned = gate(rotated(0.997).float())
    assert (warned.band, warned.passed) == ("warn", True)
    refused = gate(rotated(0.997).float(), floors={"cosine": 0.999})
    assert (refused.band, refused.passed) == ("warn", False)
    assert "cosine" in refused.reasons[0]
    assert gate(flipped(3), "distribution").band == "warn"
    assert gate(flipped(7), "distribution").band == "low"
    assert gate(flipped(2), "distribution").band == "pass"


def test_null_check_finds_a_host_that_is_not_deterministic():
    noise = iter((0.0, 1e-7))
    found = gate(REFERENCE, host=lambda: REFERENCE + next(noise))
    assert not found.null_identical
    assert not found.passed
    assert "null check" in found.reasons[0]


def test_null_check_sees_in_place_reuse_of_the_output():
    buffer = REFERENCE.clone()

    def host():
        buffer.add_(1.0)
        return buffer

    assert not gate(REFERENCE, host=host).null_identical


def test_negative_control_finds_a_gate_that_sees_nothing():
    found = gate(REFERENCE, broken=lambda: REFERENCE * 1.0)
    assert not found.control_moved
    assert not found.passed
    assert "negative control" in found.reasons[0]
    assert gate(REFERENCE, broken=lambda: REFERENCE * math.nan).control_moved
    assert gate(REFERENCE, "distribution", broken=lambda: flipped(1)).control_moved


def test_report_survives_json():
    found = gate(REFERENCE * math.nan)
    again = type(found).model_validate_json(found.model_dump_json())
    assert math.isnan(again.metrics.cosine)
    assert again.band == "low"
    assert again.model_dump_json() == found.model_dump_json()


def test_bits():
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert same_bits(REFERENCE.t(), REFERENCE.t().contiguous())


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "equal shapes"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "equal shapes with elements"),
        (torch.zeros(3), torch.zeros(3), r"logits \(N, V\)"),
    ],
)
def test_refuses_what_cannot_be_compared(candidate, reference, expected):
    with pytest.raises(EvidenceError, match=expected):
        distribution_metrics(candidate, reference)
