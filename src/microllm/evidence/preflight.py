"""Is this machine fit to measure on: foreign work, clocks, throttling.

Place: before, during and after every timing. On NVIDIA it asks NVML when the extra ``[gpu]`` is installed; on a CPU
it reads how busy other processes keep the cores. Does not wait and does not judge a result.

Sources: NVML's clocks-event-reason bits; proc(5) for /proc/stat.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_FOREIGN_SHARE = 0.10  # of all cores: other work above this disturbs a CPU timing
SPOILING = {"hw_slowdown": 0x8, "sw_thermal": 0x20, "hw_thermal": 0x40, "hw_power_brake": 0x80}
ALLOWED = {"gpu_idle": 0x1, "app_clocks": 0x2, "sw_power_cap": 0x4, "sync_boost": 0x10, "display": 0x100}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One look at a GPU through NVML."""

    sm_mhz: int
    power_w: float
    temperature_c: int
    throttle: tuple[str, ...]
    foreign_pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The state of the machine; ``problems`` is empty when a timing may be believed.

    Units:   ``foreign_cpus`` in cores kept busy by other processes (None where the system does not say)
    """

    device: str
    load_average: float
    num_cpus: int
    foreign_cpus: float | None
    gpu: GpuState | None
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


class CpuMeter:
    """Counts the cores that other processes kept busy since it was made."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float] | None:
        """Return the time and the processor seconds that others have used so far."""
        try:
            words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[:8])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy - time.process_time()

    def foreign_cpus(self) -> float | None:
        """Return the mean number of cores that were busy with other processes' work."""
        start, now = self._start, self._read()
        return None if start is None or now is None else max(0.0, now[1] - start[1]) / (now[0] - start[0] + 1e-9)


class GpuMeter:
    """Reads one GPU's clocks, power and throttle reasons; ``read`` returns None where NVML does not answer."""

    def __init__(self, device: str) -> None:
        self.note, self._nvml, self._device = "", None, device
        if torch.device(device).type == "cuda":
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                self.note = "NVML not read: pip install 'microllm[gpu]' brings it"

    def read(self) -> GpuState | None:
        """Return the GPU's state now."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(self._device).uuid).removeprefix("GPU-")
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            return GpuState(
                sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                throttle=tuple(name for name, bit in {**SPOILING, **ALLOWED}.items() if reasons & bit),
                foreign_pids=foreign_pids(pids, os.getpid()),
            )
        except nvml.NVMLError as error:
            self.note, self._nvml = f"NVML not read: {error}", None
            return None


def foreign_pids(pids: set[int], own: int) -> tuple[int, ...]:
    """Return the processes that are not this one; in a container NVML may name this one by the host's number."""
    unnamed_self = own not in pids and len(pids) == 1
    return () if unnamed_self else tuple(sorted(pids - {own}))


def check_machine(device: str, *, watch_s: float = 0.3) -> Preflight:
    """Look at the machine for ``watch_s`` seconds while this process is idle."""
    meter, gpu_meter = CpuMeter(), GpuMeter(device)
    time.sleep(watch_s)
    foreign, gpu = meter.foreign_cpus(), gpu_meter.read()
    return Preflight(
        device=device, load_average=os.getloadavg()[0], num_cpus=os.cpu_count() or 1, foreign_cpus=foreign, gpu=gpu,
        problems=cpu_problems(foreign) if torch.device(device).type == "cpu" else gpu_problems(gpu),
        notes=(gpu_meter.note,) if gpu_meter.note else (),
    )  # fmt: skip


def cpu_problems(foreign_cpus: float | None) -> tuple[str, ...]:
    """Return what is wrong with the host's load, in words."""
    limit = MAX_FOREIGN_SHARE * (os.cpu_count() or 1)
    if foreign_cpus is None or foreign_cpus <= limit:
        return ()
    return (f"other processes keep {foreign_cpus:.2f} cores busy; at most {limit:.2f} leaves a timing undisturbed",)


def gpu_problems(state: GpuState | None) -> tuple[str, ...]:
    """Return what is wrong with the GPU's state, in words."""
    if state is None:
        return ()
    problems = [f"throttled: {name}" for name in state.throttle if name in SPOILING]
    if state.foreign_pids:
        problems.append(f"other processes use this GPU: {', '.join(map(str, state.foreign_pids))}")
    return tuple(problems)
