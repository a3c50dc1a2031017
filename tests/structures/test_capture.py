"""The capture door where there is nothing to capture with."""

from __future__ import annotations

import pytest
import torch

from microllm import structures


def test_a_computation_on_a_cpu_or_on_no_tensor_is_refused():
    x = torch.ones(3)
    with pytest.raises(structures.CaptureRefused, match="need tensors of one GPU"):
        structures.capture(lambda: x * 2, windows={"x": x})
    with pytest.raises(structures.CaptureRefused, match="no tensor"):
        structures.capture(lambda: None, windows={})
    assert torch.equal(x * 2, torch.full((3,), 2.0))


def test_a_model_that_is_dropped_while_attached_is_freed(attached):
    import gc
    import weakref

    from tiny_hosts import make_host

    model = make_host("llama")
    plan, gone = attached(model), weakref.ref(model)
    del model, plan
    gc.collect()
    assert gone() is None
