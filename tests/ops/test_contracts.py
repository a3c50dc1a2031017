"""One test drives every operator's contract: values against the fp64 oracle, gradients, refusals, the table itself."""

import ast
import pathlib

import numpy as np
import pytest
import torch

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops.sample import philox

ROWS = list(ops.CONTRACTS.values())
CASES = [
    pytest.param(row, sizes, dtype, id=f"{row.name}-{'x'.join(map(str, sizes.values()))}-{str(dtype)[6:]}")
    for row in ROWS
    for sizes in row.sizes
    for dtype in row.forward
]
REFUSALS = [pytest.param(row, r, id=f"{row.name}: {r.reason}") for row in ROWS for r in row.refusals]


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def widened(row, call):
    floats = {arg.name for arg in row.args if arg.is_float}
    return {name: value.double() if name in floats else value for name, value in call.items()}


def assert_close(got, want, tolerance):
    for a, r in zip(as_tuple(got), as_tuple(want), strict=True):
        assert a.shape == r.shape
        torch.testing.assert_close(a.to(r.dtype), r, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=False)


@pytest.mark.parametrize(("row", "sizes", "dtype"), CASES)
def test_values_agree_with_the_oracle_in_fp64(row, sizes, dtype):
    call = row.example(sizes, dtype, seed=1)
    want = row.oracle(**widened(row, call))
    assert_close(row.call(**call), want, row.forward[dtype])


@pytest.mark.parametrize(
    ("row", "sizes", "dtype"), [c for c in CASES if c.values[0].backward and c.values[2] == torch.float32]
)
def test_gradients_agree_with_the_oracle_in_fp64(row, sizes, dtype):
    call = row.example(sizes, dtype, seed=2)
    wide = widened(row, call)
    names = [arg.name for arg in row.args if arg.is_float]
    gradients = []
    for function, arguments in ((row.call, call), (row.oracle, wide)):
        leaves = {n: arguments[n].clone().requires_grad_() for n in names}
        outputs = as_tuple(function(**(arguments | leaves)))
        weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape) for o in outputs]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, list(leaves.values())))
    assert_close(gradients[0], gradients[1], row.backward[torch.float32])


@pytest.mark.parametrize(("row", "refusal"), REFUSALS)
def test_refuses(row, refusal):
    call = row.example(row.sizes[1], torch.float32)
    row.call(**call)
    with pytest.raises(OperatorError, match=rf"{row.name}: got .*; need "):
        row.call(**refusal.change(row.example(row.sizes[1], torch.float32)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_outside_the_first_are_read_through_their_strides(row):
    """A view with room between its rows gives the same values as its copy."""
    call = row.example(row.sizes[1], torch.float32, seed=3)
    strided = dict(call)
    for arg in row.args:
        x = call[arg.name]
        if x.dim() >= 2:
            strided[arg.name] = torch.cat((x, x), dim=-2)[..., : x.shape[-2], :]
            assert x.shape[-2] == 1 or x.dim() == 2 or not strided[arg.name].is_contiguous()
    assert_close(row.call(**strided), row.call(**call), row.forward[torch.float32])


def test_every_operator_file_has_a_row_with_costs_and_refusals():
    folder = pathlib.Path(ops.__file__).parent
    files = {p.stem for p in folder.glob("*.py")} - {"__init__", "contract", "interop"}
    assert files == set(ops.CONTRACTS)
    assert set(ops.__all__) == files | {"CONTRACTS", "as_tensor"}
    for row in ROWS:
        assert row.refusals, row.name
        assert row.num_bytes(row.sizes[1], 4) > 0, row.name
        assert row.num_flops(row.sizes[1]) >= 0, row.name
        assert set(row.levels) == {"cpu", "cuda"}, row.name
        tree = ast.parse((folder / f"{row.name}.py").read_text())
        assert row.name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_philox_known_answers():
    """The vectors that the generator's authors publish for all-zero and all-one counters and keys."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    got = [int(w) for w in philox((zero,) * 4, zero)]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = [int(w) for w in philox((ones,) * 4, torch.full((1,), -1))]
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_sampled_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = 20_000
    columns = {n: torch.full((rows,), v) for n, v in (("temperature", 0.7), ("top_p", 1.0), ("min_p", 0.0))}
    keys = {n: torch.zeros(rows, dtype=torch.int64) for n in ("top_k", "choice", "seed")}
    tokens = ops.sample(logits.expand(rows, 4), **columns, **keys, position=torch.arange(rows))
    counts = torch.bincount(tokens, minlength=4) / rows
    torch.testing.assert_close(counts, (logits / 0.7).softmax(0), atol=0.012, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_no_token(bad):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    assert ops.argmax(logits).tolist() == [0, -1, 0]


def test_argmax_takes_the_lowest_index_of_a_tie_and_lets_a_mask_pass():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, 0.0, -torch.inf], [-torch.inf] * 3])
    assert ops.argmax(logits).tolist() == [1, 1, -1]


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
