"""Whole-sequence attention: the backend that the ledger names is the one that runs, and MATH never by surprise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from microllm import ops

KERNELS = {
    "FLASH_ATTENTION": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "EFFICIENT_ATTENTION": ("_scaled_dot_product_efficient_attention",),
    "CUDNN_ATTENTION": ("_scaled_dot_product_cudnn_attention",),
}
"""What torch calls for each backend; MATH is a composite of these:"""
MATH = {"bmm", "matmul", "_softmax", "_safe_softmax"}


class Called(TorchDispatchMode):
    """Note the name of every torch operator that is called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def check(device, dtype, heads, groups, width, length, *, grad=False):
    """Run one call, and compare what the ledger says with what torch called."""
    q, k, v = (torch.randn(2, length, n, width, dtype=dtype, device=device) for n in (heads, groups, groups))
    q.requires_grad_(grad)
    with ops.ledger() as ran, Called() as called:
        ops.attention_full(q, k, v, scale=0.1)
    ((entry, count),) = ran.items()
    assert count == 1
    backend = entry.reason.rpartition(" ")[2]
    assert (entry.level, entry.reason) == ("vendor", f"SDPA's backend {backend}")
    assert set(KERNELS[backend]) & called.names, called.names
    assert not MATH & called.names
    return backend


SHAPES = [(9, 3, 64, 17), (14, 2, 64, 33), (16, 8, 128, 5), (12, 2, 128, 1), (4, 4, 80, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_on_a_cpu_the_backend_in_the_ledger_is_the_one_that_runs(dtype, shape, grad):
    assert check("cpu", dtype, *shape, grad=grad) == "FLASH_ATTENTION"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_on_a_gpu_the_backend_in_the_ledger_is_the_one_that_runs(dtype, shape, grad):
    assert check("cuda", dtype, *shape, grad=grad) in KERNELS
