"""Every kernel compiled ahead of time for every target, with no GPU: what it takes of the chip, and what is wrong.

Place: called by ``microllm doctor --kernels`` and the tests. Compilers say nothing about a spilled register or a sum
that became fp64, so their output is read: resource usage, assembly, metadata. Runs nothing, and measures no time.

Source:  ``triton.compile`` with an ``ASTSource`` and a ``GPUTarget``; cuobjdump from triton's own wheel
"""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microllm.errors import MissingExtraError, UnavailableError
from microllm.ops.target import MUCH_SHARED_BYTES, TARGETS, Target

if TYPE_CHECKING:
    from microllm.ops.kernels import Compiled

_FP8_TYPES = {"*fp8e4nv": "e4m3fn", "*fp8e4b8": "e4m3fnuz"}
_READS_FP64 = re.compile(r"\s*(\.reg|\.param|ld\.param|mov|cvt\.rn\.f32\.f64)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One case of a kernel on one target: its resources, and the sentences of what must not be.

    ``skipped``: why the target does not take the case; its numbers are then 0.

    Units:   ``registers`` a thread, ``shared_bytes`` a program, ``spilled`` bytes a thread (AMD: registers)
    """

    file: str
    kernel: str
    case: int
    target: str
    registers: int = 0
    shared_bytes: int = 0
    spilled: int = 0
    faults: tuple[str, ...] = ()
    skipped: str = ""


def compile_all(
    tables: Mapping[str, Sequence[Compiled]] | None = None, targets: Mapping[str, Target] = TARGETS
) -> Iterator[Compilation]:
    """Compile every case for every target, in their order; Triton keeps what it compiled in its cache.

    ``tables``: cases by file, compiled in this process; None takes those of ``ops/kernels``, a process for each core.

    Raises:
        MissingExtraError: triton is absent.
        UnavailableError: the kernels are interpreted in this process.
    """
    try:
        from triton import knobs  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingExtraError("triton", "gpu", "compiling kernels") from error
    if knobs.runtime.interpret:
        raise UnavailableError("got TRITON_INTERPRET=1; need kernels that are compiled; unset it and start again")
    if tables is None:
        yield from _compile_ours(targets)
        return
    for file, cases in tables.items():
        for number, case in enumerate(cases):
            for target in targets.values():
                yield compile_case(file, number, case, target)


def _compile_ours(targets: Mapping[str, Target]) -> Iterator[Compilation]:
    from microllm.ops.kernels import COMPILED  # noqa: PLC0415 - brings triton

    cases = [(file, number) for file, table in COMPILED.items() for number in range(len(table))]
    jobs = [(*case, target) for case in cases for target in targets.values()]
    ignore = (signal.SIGINT, signal.SIG_IGN)  # is for this process: no new job begins
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignore) as pool:
        yield from pool.map(_compile_named, *zip(*jobs, strict=True))


def _compile_named(file: str, number: int, target: Target) -> Compilation:
    from microllm.ops.kernels import COMPILED  # noqa: PLC0415 - brings triton

    return compile_case(file, number, COMPILED[file][number], target)


def compile_case(file: str, number: int, case: Compiled, target: Target) -> Compilation:
    """Compile one case for one target and look at what came out."""
    place: dict[str, Any] = {"file": file, "kernel": case.kernel.__name__, "case": number, "target": target.name}
    lacking = _lacking(case, target)
    if lacking:
        return Compilation(**place, skipped=lacking)
    try:
        found = _compiled(case, target, case.signature)
        if target.backend == "cuda" and "fp32" in case.signature.values():
            wide = {name: "fp64" if kind == "fp32" else kind for name, kind in case.signature.items()}
            in_fp64 = _fp64_lines(_compiled(case, target, wide).asm["ptx"], scalars=True)
        else:
            in_fp64 = []
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is a finding
        return Compilation(**place, faults=(f"does not compile: {_last_line(error)}",))
    registers, spilled = _nvidia_usage(found.asm["cubin"]) if target.backend == "cuda" else _amd_usage(found.asm)
    faults = [*_faults(case, target, found), *(f"fp64 where a scalar is fp64: {line}" for line in in_fp64[:1])]
    if spilled > case.may_spill:
        faults.append(f"spills {spilled} {'bytes a thread' if target.backend == 'cuda' else 'registers'}")
    shared = found.metadata.shared
    return Compilation(**place, registers=registers, shared_bytes=shared, spilled=spilled, faults=tuple(faults))


def _lacking(case: Compiled, target: Target) -> str:
    """Return why the target does not take the case, or nothing."""
    for kind in case.signature.values():
        if kind in _FP8_TYPES and target.fp8 != _FP8_TYPES[kind]:
            return f"reads {_FP8_TYPES[kind]} as bytes, in another case"
    if "warps of 32" in case.uses and target.warp_size != 32:
        return f"has warps of {target.warp_size} lanes, and another form for them"
    if "much shared memory" in case.uses and target.shared_bytes < MUCH_SHARED_BYTES:
        return f"has {target.shared_bytes} bytes of shared memory, and other tiles for them"
    return ""


def _compiled(case: Compiled, target: Target, signature: Mapping[str, str]) -> Any:  # noqa: ANN401 - triton's own
    from triton import compile as compile_kernel  # noqa: PLC0415 - optional
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - optional
    from triton.compiler import ASTSource  # noqa: PLC0415 - optional

    pdl = bool(case.constexprs.get("PDL")) and target.pdl
    constexprs = dict(case.constexprs) | ({"PDL": pdl} if "PDL" in case.constexprs else {})
    names = case.kernel.arg_names
    assert set(names) == set(signature) | set(constexprs), set(names) ^ (set(signature) | set(constexprs))
    types = {name: signature[name].partition(":")[0] if name in signature else "constexpr" for name in names}
    aligned = [i for i, name in enumerate(names) if re.search(r"^\*|:16$", signature.get(name, ""))]
    options: dict[str, Any] = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    options["enable_fp_fusion"] = case.fusion
    if target.pdl and case.max_registers:
        options["maxnreg"] = case.max_registers
    return compile_kernel(
        ASTSource(case.kernel, types, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned}),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=options | ({"launch_pdl": True} if pdl else {}),
    )


def _faults(case: Compiled, target: Target, found: Any) -> list[str]:  # noqa: ANN401 - triton's own
    """Return what the output must not have, and what it lacks."""
    faults = []
    if found.metadata.shared > target.shared_bytes:
        faults.append(f"takes {found.metadata.shared} bytes of shared memory; {target.name} has {target.shared_bytes}")
    if target.backend != "cuda":
        return faults
    ptx = found.asm["ptx"]
    faults += [f"fp64: {line}" for line in _fp64_lines(ptx)[:1]]
    if "griddepcontrol" in ptx and not target.pdl:
        faults.append(f"has PDL instructions, which {target.name} does not know")
    if "pdl" in case.uses and target.pdl and "griddepcontrol" not in ptx:
        faults.append("claims PDL and has no such instruction")
    if "wgmma" in case.uses and target.wgmma and "wgmma" not in ptx:
        faults.append("claims wgmma and has no such instruction")
    return faults


def _fp64_lines(ptx: str, *, scalars: bool = False) -> list[str]:
    """Return the lines that work in fp64; ``scalars``: but for those that read an fp64 argument and narrow it."""
    lines = [line for line in ptx.splitlines() if ".f64" in line]
    return [line.strip() for line in lines if not (scalars and _READS_FP64.match(line))]


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers a thread, and the bytes of stack and local memory that stand for spilled ones."""
    import triton.backends.nvidia  # noqa: PLC0415 - optional

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", run.stdout)
    assert found, run.stdout
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_usage(asm: Mapping[str, str]) -> tuple[int, int]:
    """Return vector registers a thread, and how many are spilled: scalar ones are where they leave the registers."""
    counts = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)", asm["amdgcn"])}
    scalar = counts["sgpr_spill_count"] if counts["private_segment_fixed_size"] else 0
    return counts["vgpr_count"], counts["vgpr_spill_count"] + scalar


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
