"""Operators' tests run twice: as they are, and with every kernel interpreted.

``TRITON_INTERPRET`` is read when a kernel is decorated, so the second run is a process of its own (make test-kernels):

    TRITON_INTERPRET=1 python -m pytest tests/ops -m "interpreter and not gpu"

There an operator that has a kernel runs it, on the CPU, in fp32 and fp16: interpreted bf16 and fp8 are not the GPU's.
"""

import os

import pytest

from microllm import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else ["interpreter"]

if INTERPRETED:
    from triton.runtime import interpreter

    def _patch_lang_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        """Loops with tensors for bounds: triton 3.6 asks for the int of an array of one element; numpy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor


@pytest.fixture(autouse=True)
def _kernels():
    """Force the kernels where they are interpreted: a call that one of them does not take is an error."""
    if not INTERPRETED:
        yield
        return
    with ops.use("triton", *(name for name, row in ops.CONTRACTS.items() if "triton" in row.levels["cuda"])):
        yield
