"""Arrays of other frameworks enter without a copy, or not at all."""

import numpy as np
import pytest
import torch

from microllm import ops
from microllm.errors import OperatorError


def test_arrays_enter_without_a_copy():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = ops.as_tensor(array)
    assert tensor.data_ptr() == array.ctypes.data

    class Foreign:
        """Speaks DLPack and nothing else, as another framework's array does."""

        def __init__(self, inner):
            self.inner = inner

        def __dlpack__(self, **options):
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.inner.__dlpack_device__()

    source = torch.randn(4, 8)
    entered = ops.as_tensor(Foreign(source))
    assert entered.data_ptr() == source.data_ptr()
    weight = np.ones(8, dtype=np.float32)
    assert ops.rms_norm(entered, ops.as_tensor(weight), eps=1e-6).shape == (4, 8)


@pytest.mark.parametrize("bad", ["text", [1, 2], np.array(["a"])], ids=["text", "list", "strings"])
def test_what_cannot_be_shared_is_refused(bad):
    with pytest.raises(OperatorError, match="as_tensor: got"):
        ops.as_tensor(bad)
