"""Is this installation sound, and what can this machine do? A list of findings; `kvtier doctor` prints them.

Whatever loads native code is done in a child process (`kvtier.doctor.probe`), so that a crash is a finding and not the
end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..machine import buildargs, hardware
from ..machine.gpu import Nvidia, nvidia
from ..machine.stockbuild import StockBuild
from ..sizes import format_bytes
from . import cuda

Status = Literal["ok", "warn", "fail"]
MIN_PYTHON: Final = (3, 10)
PROBE_TIMEOUT_S: Final = 60.0
LOW_MEMORY_BYTES: Final = 1 << 30
LOW_DISK_BYTES: Final = 2 << 30
SLOW_READ_RATE: Final = 200e6

_REINSTALL: Final = "Install it again: pip install --force-reinstall --no-cache-dir "
_REINSTALL_OURS: Final = "Install the package again, from its sources: pip install --force-reinstall --no-deps ."
_ISA_NEEDS: Final = (
    ("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    ("avx2", ("avx2", "fma", "f16c")),
    ("neon", ("asimd",)),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `hint` says what to do about it, empty when all is well."""

    name: str
    status: Status
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the child process said, by step, and how it ended (negative: killed by that signal, None: it hung)."""

    steps: Mapping[str, Mapping[str, Any]]
    exit_code: int | None
    tail: str


def diagnose(kv_dir: Path) -> list[Finding]:
    """Look at everything. `kv_dir` is where the disk tier would be."""
    flags = hardware.cpu_flags()
    probe = run_probe()
    amx = hardware.amx_state(flags)
    findings = [_python(), *_libraries(probe), *_gpu(nvidia(), probe)]
    findings += [*_stock(probe, flags, amx), *_kernels(probe, flags)]
    findings += [_amx(amx, probe, flags), _memory(hardware.memory()), _disk(kv_dir)]
    return findings


def run_probe(command: tuple[str, ...] = (sys.executable, "-m", "kvtier.doctor.probe")) -> ProbeResult:
    """Load llama.cpp and the plug-in in a child process."""
    source = str(Path(__file__).resolve().parents[2])  # the child finds the same package, however this one was found
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)}
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False, env=env
        )
    except subprocess.TimeoutExpired as err:
        return ProbeResult(_steps(err.stdout or b""), None, "")
    tail = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return ProbeResult(_steps(child.stdout), child.returncode, tail[0] if tail else "")


def _steps(stdout: bytes) -> dict[str, dict[str, Any]]:
    steps: dict[str, dict[str, Any]] = {}
    for line in stdout.splitlines():
        try:
            step = json.loads(line)
            steps[step["step"]] = step
        except (ValueError, TypeError, KeyError):  # something that a library printed
            continue
    return steps


def _python() -> Finding:
    text = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MIN_PYTHON:
        return Finding("Python", "fail", text, f"Use Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer.")
    return Finding("Python", "ok", text)


def _how_it_ended(probe: ProbeResult) -> str:
    if probe.exit_code is None:
        return f"did not finish within {PROBE_TIMEOUT_S:.0f} s"
    if probe.exit_code < 0:
        try:
            return f"crashed ({signal.Signals(-probe.exit_code).name})"
        except ValueError:
            return f"crashed (signal {-probe.exit_code})"
    return probe.tail or f"ended with exit code {probe.exit_code}"


def _libraries(probe: ProbeResult) -> list[Finding]:
    llama, refused, plugin, devices = (probe.steps.get(name) for name in ("llama_cpp", "refused", "plugin", "devices"))
    if llama is None:
        missing = probe.steps.get("missing")
        reason = missing["message"] if missing else _how_it_ended(probe)
        hint = "Install it: pip install llama-cpp-python" if missing else f"{_REINSTALL}llama-cpp-python"
        return [Finding("llama-cpp-python", "fail", reason, cuda.missing_library(reason) or hint)]
    found = [Finding("llama-cpp-python", "ok", f"{llama['version']} with ggml {llama['ggml']}")]
    if "cpu" not in probe.steps:
        return [
            *found,
            Finding(
                "ggml", "fail", f"looking at its CPU backend {_how_it_ended(probe)}", f"{_REINSTALL}llama-cpp-python"
            ),
        ]
    if refused is not None:
        return [*found, Finding("libkvtier", "fail", refused["message"], refused["hint"])]
    if plugin is None or devices is None:
        missing = probe.steps.get("missing")
        reason = missing["message"] if missing else f"loading it {_how_it_ended(probe)}"
        return [*found, Finding("libkvtier", "fail", reason, _REINSTALL_OURS)]
    found.append(Finding("libkvtier", "ok", f"{plugin['version']} at {plugin['path']}"))
    names = [device["name"] for device in devices["devices"]]
    if "KVT0" not in names:
        return [*found, Finding("Devices", "fail", f"KVT0 is not among {', '.join(names)}", _REINSTALL_OURS)]
    return [*found, Finding("Devices", "ok", ", ".join(names))]


def _gpu(gpu: Nvidia | None, probe: ProbeResult) -> list[Finding]:
    """Whether llama.cpp can use the NVIDIA GPU, if there is one."""
    if gpu is None or "gpus" not in probe.steps:
        return []
    names = probe.steps["gpus"]["names"]
    if names:
        text = f"{gpu}: llama.cpp's own programs can compute on {', '.join(names)}, kvtier's commands use the CPU"
        return [Finding("GPU", "ok", text)]
    version = str(probe.steps.get("llama_cpp", {}).get("version", ""))
    text = f"{gpu}, but llama.cpp was built for the CPU alone"
    return [Finding("GPU", "warn", text, cuda.build_for_gpu(gpu, version))]


def _stock(probe: ProbeResult, flags: frozenset[str], amx: hardware.AmxState) -> list[Finding]:
    """What llama.cpp was compiled for against what the processor has, and how fast its own attention is."""
    build = _build_of(probe, flags)
    if build is None:
        return []
    mend = f"Compile it anew:\n{_build_command(probe, flags, amx)}"
    text = ", ".join(sorted(build.instruction_sets)) or "none"
    without = f"llama.cpp was built without {', '.join(build.lacking)}, which this processor has. {mend}"
    found = [Finding("llama.cpp's CPU code", "warn", text, without)] if build.lacking else []
    found = found or [Finding("llama.cpp's CPU code", "ok", text)]
    times = ", ".join(f"{ns:.0f} ns for heads of {size} channels" for size, ns in build.attention_ns.items())
    if build.has_slow_heads:
        slow = (
            "llama.cpp's own attention over F16 caches is slow for heads that are no multiple of 128 channels. "
            "kvtier's kernels are not concerned; stock llama.cpp decodes long contexts at half its rate or less. "
            f"{mend}"
        )
        found.append(Finding("llama.cpp attention", "warn", f"F16, per cell: {times}: longer for fewer", slow))
    elif times:
        found.append(Finding("llama.cpp attention", "ok", f"F16, per cell: {times}"))
    return found


def _build_of(probe: ProbeResult, flags: frozenset[str]) -> StockBuild | None:
    llama, cpu = probe.steps.get("llama_cpp"), probe.steps.get("cpu")
    if llama is None or cpu is None or not cpu["features"]:
        return None
    return StockBuild.from_answer(
        {**llama, **cpu, "attention_ns": probe.steps.get("attention", {}).get("ns_per_cell", {})},
        hardware.cpu_name(),
        flags,
    )


def _kernels(probe: ProbeResult, flags: frozenset[str]) -> list[Finding]:
    """What our kernels use against what the processor has."""
    plugin = probe.steps.get("plugin")
    if plugin is None:
        return []
    best = next((isa for isa, needs in _ISA_NEEDS if flags.issuperset(needs)), "scalar")
    isa = str(plugin["isa"])
    if best == "scalar" or isa.startswith(best):
        return [Finding("Attention kernels", "ok", isa)]
    hint = f"This processor has {best}; the library was built without it, or KVTIER_ISA names another."
    return [Finding("Attention kernels", "warn", isa, hint)]


def _build_command(probe: ProbeResult, flags: frozenset[str], amx: hardware.AmxState) -> str:
    """The shell command that puts the best build of the installed version in its place."""
    args = buildargs.named_args(flags, amx, buildargs.compiler_takes)
    return buildargs.install_command(args, str(probe.steps.get("llama_cpp", {}).get("version", "")))


def _amx(state: hardware.AmxState, probe: ProbeResult, flags: frozenset[str]) -> Finding:
    texts = {
        "absent": "this processor has none",
        "works": "works",
        "faults": "advertised, but its instructions kill the process",
        "denied": "advertised, but the kernel gives no tile registers",
        "unknown": "could not be tried",
    }
    if state not in ("faults", "unknown"):
        return Finding("AMX", "ok", texts[state])
    features = probe.steps.get("cpu", {}).get("features", {})
    built_in = any(name.startswith("AMX") and value != "0" for name, value in features.items())
    if built_in:
        return Finding(
            "AMX",
            "fail",
            f"{texts[state]}, and llama.cpp was built with it: it crashes at the first prompt",
            _build_command(probe, flags, state),
        )
    return Finding(
        "AMX",
        "ok" if features else "warn",
        f"{texts[state]}; llama.cpp was built without it",
        "" if features else _build_command(probe, flags, state),
    )


def _memory(memory: hardware.Memory) -> Finding:
    if memory.total_bytes == 0:
        return Finding("Memory", "warn", "the system does not say", "Give budgets by hand: --kv-host.")
    text = (
        f"{format_bytes(memory.available_bytes)} free of {format_bytes(memory.total_bytes)}, "
        f"{hardware.cpu_count()} processors ({hardware.cpu_name()})"
    )
    if memory.available_bytes < LOW_MEMORY_BYTES:
        return Finding(
            "Memory", "warn", text, "Close other programs, or give a small budget: --kv-host 256MiB with --kv-disk."
        )
    return Finding("Memory", "ok", text)


def _disk(folder: Path) -> Finding:
    """Free space and speed of the disk tier's directory; its nearest existing parent stands for one that is not there
    yet."""
    if folder.exists() and not folder.is_dir():
        return Finding("Disk", "fail", f"{folder} is not a directory", "Name a directory with --kv-dir.")
    existing = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(existing).free
        if free < 2 * hardware.SPEED_BYTES:
            return Finding(
                "Disk",
                "warn",
                f"{existing} has {format_bytes(free)} free",
                "Free some space, or name another directory with --kv-dir.",
            )
        speed = hardware.disk_speed(existing)
    except OSError as err:
        return Finding(
            "Disk",
            "fail",
            f"{existing} cannot be used: {err.strerror or err}",
            "Name a directory that can be written with --kv-dir.",
        )
    text = (
        f"{existing}: {format_bytes(free)} free, writes {speed.write_rate / 1e6:,.0f} MB/s, reads "
        f"{speed.read_rate / 1e6:,.0f} MB/s" + ("" if speed.direct else " (through the page cache)")
    )
    hint = ""
    if free < LOW_DISK_BYTES:
        hint = "Little space for a disk tier: free some, or name another directory with --kv-dir."
    elif speed.read_rate < SLOW_READ_RATE:
        hint = "A slow disk: every token reads the pages that are not in RAM, so give --kv-host as much as you can."
    return Finding("Disk", "warn" if hint else "ok", text, hint)


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status of all."""
    order: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}
    rank: Callable[[Status], int] = order.__getitem__
    return max((finding.status for finding in findings), key=rank, default="ok")
