"""Captured loops and the capture door on a GPU: the checks that ``tools/gpu_structures.py`` begins with."""

from __future__ import annotations

import pytest

import gpu_structures

pytestmark = pytest.mark.gpu


def test_captured_loops_give_the_hosts_tokens_in_fp32(tmp_path):
    for name, found in gpu_structures.check_tokens("cuda", tmp_path).items():
        assert found["equal"], name
        assert found["repeats"], name
        assert found["speculative"], name
        assert found["clean"], name
        assert found["replays"] > 0, name


def test_what_cannot_be_captured_is_refused_and_the_next_capture_works():
    found = gpu_structures.check_capture("cuda")
    assert found["a captured stage follows its window"] == "pass"
    assert found["a capture after refusals"] == "pass"
    for name in ("empty", "synchronises", "undeclared"):
        assert found[name].startswith("refused"), (name, found[name])
