"""No kernel goes uninterpreted: each takes an example of its row, in each dtype, which the one test then drives."""

import pytest
import torch

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops.kernels import KERNELS

pytestmark = pytest.mark.interpreter


def takes(row, dtype):
    for sizes in row.sizes:
        try:
            yield ops.select(row.name, row.example(sizes, dtype)).level == "triton"
        except OperatorError:
            yield False


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_an_example_of_its_row(name):
    row = ops.CONTRACTS[name]
    assert {str(dtype) for dtype in (torch.float32, torch.float16) if dtype in row.forward} == {
        str(dtype) for dtype in (torch.float32, torch.float16) if dtype in row.forward and any(takes(row, dtype))
    }
