"""Preflight: foreign work is seen, throttling is told from what is allowed, NVML is read as documented."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from microllm.evidence import preflight
from microllm.evidence.preflight import CpuMeter, GpuMeter, check_machine, cpu_problems, foreign_pids, gpu_problems


def test_this_machine_is_described():
    found = check_machine("cpu", watch_s=0.05)
    assert found.num_cpus == os.cpu_count()
    assert found.gpu is None
    assert found.foreign_cpus is not None
    assert found.problems == cpu_problems(found.foreign_cpus)


def test_own_work_is_not_foreign_and_another_process_is():
    meter, wall, own = CpuMeter(), time.perf_counter(), time.process_time()
    while time.perf_counter() < wall + 0.4:
        pass
    own_only = meter.foreign_cpus()
    own = (time.process_time() - own) / (time.perf_counter() - wall)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        meter = CpuMeter()
        time.sleep(0.4)
        with_other = meter.foreign_cpus()
    finally:
        busy.kill()
        busy.wait()
    assert own > 0.05
    assert 0 <= own_only <= (os.cpu_count() or 1) - own + 0.2, "the loop above was this process's"
    assert with_other > 0.3


def test_load_is_a_problem_above_a_tenth_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert cpu_problems(1.0) == ()
    assert cpu_problems(None) == ()
    assert "1.01 cores busy; at most 1.00" in cpu_problems(1.01)[0]


class FakeNvml(SimpleNamespace):
    """The calls of nvidia-ml-py that are used, with the numbers of its header."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, reasons=0, pids=()):
        super().__init__(reasons=reasons, pids=pids, uuid=None)

    def nvmlInit(self): ...

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980}[kind]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 612_345

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61


def read_gpu(monkeypatch, nvml):
    monkeypatch.setattr(importlib, "import_module", lambda name: nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-cd"))
    return GpuMeter("cuda")


def test_nvml_is_read(monkeypatch):
    nvml = FakeNvml(reasons=0x4, pids=(os.getpid(),))
    state = read_gpu(monkeypatch, nvml).read()
    assert nvml.uuid == b"GPU-ab-cd"
    assert (state.sm_mhz, state.power_w, state.temperature_c) == (1980, 612.345, 61)
    assert state.throttle == ("sw_power_cap",)
    assert gpu_problems(state) == ()


@pytest.mark.parametrize(
    ("bit", "name"), [(0x8, "hw_slowdown"), (0x20, "sw_thermal"), (0x40, "hw_thermal"), (0x80, "hw_power_brake")]
)
def test_slowdowns_are_problems(bit, name, monkeypatch):
    state = read_gpu(monkeypatch, FakeNvml(reasons=bit | 0x4)).read()
    assert gpu_problems(state) == (f"throttled: {name}",)


def test_other_processes_on_the_gpu_are_a_problem(monkeypatch):
    state = read_gpu(monkeypatch, FakeNvml(pids=(os.getpid(), 77))).read()
    assert gpu_problems(state) == ("other processes use this GPU: 77",)
    assert foreign_pids({1, 2}, 2) == (1,)
    assert foreign_pids({9}, 2) == (), "in a container the one process may be us under another number"
    assert foreign_pids({8, 9}, 2) == (8, 9)
    assert foreign_pids(set(), 2) == ()


def test_no_nvml_is_a_note_and_an_nvml_that_fails_too(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    meter = GpuMeter("cuda")
    assert meter.read() is None
    assert "microllm[gpu]" in meter.note

    class Failing(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle):
            raise self.NVMLError("Not Supported")

    meter = read_gpu(monkeypatch, Failing())
    assert meter.read() is None
    assert "Not Supported" in meter.note
    assert meter.read() is None
    assert preflight.gpu_problems(None) == ()
