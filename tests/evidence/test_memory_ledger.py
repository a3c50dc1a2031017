"""The ledger: planted allocations, copies and waits are caught, also inside a custom operator; a clean region is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from microllm.errors import EvidenceError
from microllm.evidence.memory_ledger import LedgerReport, _report, memory_ledger, tag

X = torch.randn(64, 100)
OUT = torch.empty(64, 100)


def ledger_of(work) -> LedgerReport:
    with memory_ledger() as ledger:
        work()
    return ledger.report


def test_a_clean_region():
    def work():
        torch.mul(X, X, out=OUT)
        OUT.add_(1)  # the number becomes a host scalar: seen, and let pass
        OUT.t().view(-1, 64)[0].neg_()

    report = ledger_of(work)
    report.require_clean()
    assert all(e.largest_bytes <= 8 for e in report.of("allocation"))
    with pytest.raises(EvidenceError, match="allocation"):
        report.require_clean(scalar_bytes=0)


PLANTS = {
    "sum": (lambda: X + X, r"allocation: 1 \(25600 bytes, cpu\) by aten::add"),
    "empty": (lambda: torch.empty(1000), r"allocation: 1 \(4000 bytes, cpu\) by aten::empty"),
    "cat": (lambda: torch.cat([X, X]), r"allocation: 1 \(51200 bytes, cpu\) by aten::cat"),
    "contiguous": (lambda: X.t().contiguous(), r"copy: 1 \(25600 bytes, h2h\)"),
    "cast": (lambda: X.to(torch.bfloat16), r"copy: 1 \(12800 bytes, h2h\)"),
    "copy": (lambda: OUT.copy_(X), r"copy: 1 \(25600 bytes, h2h\)"),
    "foreach": (lambda: torch._foreach_copy_([OUT, OUT], [X, X]), r"copy: 2 \(51200 bytes, h2h\)"),
    "item": (lambda: X[0, 0].item(), r"synchronisation: 1 .* by aten::_local_scalar_dense"),
    "branch": (lambda: bool(X[0, 0] > 0), r"synchronisation: 1 .* by aten::_local_scalar_dense"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_work_is_caught(name):
    plant, complaint = PLANTS[name]
    with pytest.raises(EvidenceError, match=complaint):
        ledger_of(plant).require_clean()


def test_inside_a_custom_operator():
    library = torch.library.Library("microllm_ledger_test", "DEF")
    library.define("hidden(Tensor x) -> Tensor")
    library.impl("hidden", lambda x: x.t().contiguous().sum(), "CPU")
    report = ledger_of(lambda: torch.ops.microllm_ledger_test.hidden(X))
    assert sum(c.bytes for c in report.of("copy")) == 25600
    assert max(a.largest_bytes for a in report.of("allocation")) == 25600


def test_sources_bytes_and_peak():
    kept = []

    def work():
        with tag("cache"):
            kept.append(torch.empty(1000))
            with tag("staging"):
                torch.empty(5000)
        torch.empty(200)
        kept.append(torch.empty(300))

    report = ledger_of(work)
    by_tag = {a.tag: (a.calls, a.bytes, a.largest_bytes) for a in report.of("allocation")}
    assert by_tag == {"cache": (1, 4000, 4000), "staging": (1, 20000, 20000), "": (2, 2000, 1200)}
    assert report.peak_bytes == {"cpu": 24000}


def test_the_peak_counts_what_is_alive_together():
    def work():
        for _ in range(3):
            torch.empty(10_000)  # each freed before the next
        held = torch.empty(2000)
        torch.empty(9000)
        del held

    assert ledger_of(work).peak_bytes == {"cpu": 44000}


def test_copies_and_waits_carry_their_tag():
    def work():
        with tag("sampling"):
            X[3, 4].item()
            OUT.copy_(X)

    report = ledger_of(work)
    assert [(c.place, c.tag, c.calls, c.bytes) for c in report.of("copy")] == [("h2h", "sampling", 1, 25600)]
    assert [(s.operator, s.tag, s.calls) for s in report.of("synchronisation")] == [
        ("aten::_local_scalar_dense", "sampling", 1)
    ]


def test_backward_is_watched():
    weight = torch.randn(100, 30, requires_grad=True)
    with memory_ledger() as ledger:
        (X @ weight).sum().backward()
    assert sum(a.bytes for a in ledger.report.of("allocation") if a.largest_bytes == 12000) >= 12000


def test_only_the_region_counts_and_it_ends_on_an_exception():
    torch.empty(77)
    with pytest.raises(RuntimeError, match="stop"), memory_ledger() as ledger:
        raise RuntimeError("stop")
    with pytest.raises(EvidenceError, match="open"):
        ledger.report  # noqa: B018
    report = ledger_of(lambda: None)
    assert (report.entries, report.peak_bytes) == ((), {})


def test_misuse():
    with memory_ledger() as ledger:
        with pytest.raises(EvidenceError, match="one at a time"), memory_ledger():
            pass
        with pytest.raises(EvidenceError, match="open"):
            ledger.report  # noqa: B018


def test_an_untraced_device_proves_nothing():
    blind = LedgerReport(entries=(), peak_bytes={}, device_traced=False)
    with pytest.raises(EvidenceError, match="no trace of the CUDA device"):
        blind.require_clean()


def test_json_round_trip():
    report = ledger_of(lambda: X + X)
    assert LedgerReport.model_validate_json(report.model_dump_json()) == report


class Event:
    """An event as the profiler gives it on a CUDA machine, as far as the ledger reads it."""

    def __init__(self, name, start=0, end=None, *, device="CPU", link=0, own=0, nbytes=0, num=0, extra=""):
        self.values = {
            "name": name, "start_ns": start, "end_ns": start if end is None else end, "nbytes": nbytes,
            "device_type": SimpleNamespace(name=device), "linked_correlation_id": link, "correlation_id": own,
            "structured_input_shapes": [[num], [num], []], "dtypes": ["float", "float", "Scalar"],
            "metadata_json": extra, "start_thread_id": 1, "duration_ns": 0 if end is None else end - start,
        }  # fmt: skip

    def __getattr__(self, name):
        if name not in self.values and name != "shapes":
            raise AttributeError(name)
        return lambda: self.values[name]


def test_how_device_events_are_read():
    """No GPU here: events of known shape stand in for the profiler's."""
    report = _report(
        [
            Event("cudaDeviceSynchronize", 5, 9),  # before the region
            Event("microllm.ledger.region", 10, 100, own=1),
            Event("microllm.ledger.tag:stage", 20, 50, own=2),
            Event("aten::copy_", 21, 29, own=3, num=100),
            Event("cudaMemcpyAsync", 22, 24, own=7, link=3),
            Event("Memcpy HtoD (Pinned -> Device)", 23, 28, device="CUDA", link=3, own=7, extra='"bytes": 400'),
            Event("aten::copy_", 31, 39, own=4, num=50),
            Event("direct_copy_kernel", 33, 38, device="CUDA", link=4),
            Event("[memory]", 40, device="CUDA", nbytes=512),
            Event("aten::item", 60, 70, own=5),
            Event("aten::_local_scalar_dense", 61, 69, own=6),
            Event("Memcpy DtoH (Device -> Pageable)", 62, 63, device="CUDA", link=6, extra='"bytes": 4'),
            Event("cudaStreamSynchronize", 64, 65, own=3, link=6),
            Event("Memcpy DtoD (Device -> Device)", 150, 160, device="CUDA", extra='"bytes": 64'),  # of a graph
            Event("cudaDeviceSynchronize", 101, 170),  # after it
        ],
        cuda=True,
    )
    assert {(c.place, c.tag, c.calls, c.bytes) for c in report.of("copy")} == {
        ("h2d", "stage", 1, 400),
        ("d2d", "stage", 1, 200),
        ("d2h", "", 1, 4),
        ("d2d", "", 1, 64),
    }
    assert [(s.operator, s.calls) for s in report.of("synchronisation")] == [
        ("aten::_local_scalar_dense", 1),
        ("cudaStreamSynchronize", 1),
    ]
    assert [(a.place, a.tag, a.bytes) for a in report.of("allocation")] == [("cuda", "stage", 512)]
    assert report.device_traced
    assert not _report([Event("microllm.ledger.region", 1, 2)], cuda=True).device_traced


def test_a_copy_that_the_profiler_gives_no_size_has_its_operators():
    """As torch 2.11 reports a pinned copy; its events know the shapes of tensors alone."""
    events = [
        Event("microllm.ledger.region", 10, 100, own=1),
        Event("aten::copy_", 21, 29, own=3, num=100),
        Event("Memcpy HtoD (Pinned -> Device)", 23, 28, device="CUDA", link=3),
    ]
    assert [(c.place, c.bytes) for c in _report(events, cuda=True).of("copy")] == [("h2d", 400)]
    old = events[1].values
    old["shapes"] = old.pop("structured_input_shapes")
    assert [(c.place, c.bytes) for c in _report(events, cuda=True).of("copy")] == [("h2d", 400)]


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.fixture
    def tensors(self):
        x = torch.randn(64, 100, device="cuda")
        out = torch.empty_like(x)
        torch.mul(x, x, out=out)  # kernels are loaded before the region
        x.t().contiguous()
        torch.cuda.synchronize()
        return x, out

    def test_clean(self, tensors):
        x, out = tensors
        report = ledger_of(lambda: torch.mul(x, x, out=out))
        assert report.device_traced
        report.require_clean()

    def test_planted(self, tensors):
        x, out = tensors
        host = X.pin_memory()
        for plant, direction, num_bytes in (
            (lambda: out.copy_(host, non_blocking=True), "h2d", 25600),
            (lambda: host.copy_(x), "d2h", 25600),
            (lambda: out.copy_(x), "d2d", 25600),
            (lambda: x.t().contiguous(), "d2d", 25600),
        ):
            copies = {c.place: c.bytes for c in ledger_of(plant).of("copy")}
            assert copies == {direction: num_bytes}
        assert any(a.place == "cuda" and a.bytes >= 25600 for a in ledger_of(lambda: x + x).of("allocation"))
        for wait in (torch.cuda.synchronize, lambda: x[0, 0].item()):
            assert any("Synchronize" in s.operator for s in ledger_of(wait).of("synchronisation"))
