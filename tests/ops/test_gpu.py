"""The kernels on a GPU (make test-gpu): under the compiler, in a captured graph, and the same bits from run to run."""

import subprocess
import sys

import pytest
import torch

from microllm import ops

pytestmark = pytest.mark.gpu
ROWS = [row for row in ops.CONTRACTS.values() if "triton" in row.levels["cuda"]]
CASES = [pytest.param(row, dtype, id=f"{row.name}-{str(dtype)[6:]}") for row in ROWS for dtype in row.forward]


def moved(value):
    if isinstance(value, list):
        return [moved(v) for v in value]
    return value.cuda() if torch.is_tensor(value) else value


def call_of(row, dtype):
    """Return a call on the GPU, and a function that puts back what the call changes."""
    before = list(row.example(row.sizes[0], dtype, 7).values())
    values = moved(before)

    def restore():
        for arg, now, then in zip(row.args, values, before, strict=False):
            for a, b in zip(now, then, strict=True) if arg.many else ((now, then),) if arg.mutated else ():
                a.copy_(b)

    return values, restore


def results(row, values, returned):
    """Return copies of what a call gave, or of what it changed."""
    given = () if not row.results else returned if isinstance(returned, tuple) else (returned,)
    changed = [v for arg, v in zip(row.args, values, strict=False) if arg.mutated]
    given = (*given, *(t for v in changed for t in (v if isinstance(v, list) else [v])))
    return [t.contiguous().view(-1).view(torch.uint8).clone() for t in given]


def eager(row, values, restore):
    restore()
    with ops.use("triton", row.name):
        return results(row, values, ops.OPERATORS[row.name](*values))


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_the_compiler_takes_the_operator_whole_and_changes_no_bit(row, dtype):
    torch.compiler.reset()
    values, restore = call_of(row, dtype)
    want = eager(row, values, restore)
    restore()
    with ops.use("triton", row.name):
        compiled = torch.compile(ops.OPERATORS[row.name], fullgraph=True)
        assert_same(results(row, values, compiled(*values)), want)


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_a_captured_graph_changes_no_bit_however_often_it_runs(row, dtype):
    values, restore = call_of(row, dtype)
    want = eager(row, values, restore)
    torch.cuda.synchronize()  # before another stream writes what is still being copied
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with ops.use("triton", row.name), torch.cuda.stream(stream):
        eager(row, values, restore)  # scratch memory is a stream's own
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            returned = ops.OPERATORS[row.name](*values)
    for _ in range(3):
        restore()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results(row, values, returned), want)


HASHES = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import test_gpu
for row in test_gpu.ROWS:
    for dtype in row.forward:
        values, restore = test_gpu.call_of(row, dtype)
        found = test_gpu.eager(row, values, restore)
        print(row.name, dtype, hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in found)).hexdigest())
"""


def test_three_fresh_processes_give_the_same_bits():
    folder = __file__.rpartition("/")[0]
    runs = [
        subprocess.run([sys.executable, "-c", HASHES, folder], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert len(runs[0].splitlines()) == len(CASES)
    assert runs[0] == runs[1] == runs[2]
