"""Whether this machine has an NVIDIA GPU, and which CUDA its driver knows: asked of the driver, nothing is computed.

Three witnesses, the most talkative first: `nvidia-smi`, the driver's files in /proc, and the driver's library, which a
child process loads.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 20.0

# Child process: prints the newest CUDA that the driver knows (12040 is 12.4) if there is a GPU, or nothing.
_ASK_LIBCUDA: Final = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, version = ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0:
    cuda.cuDriverGetVersion(ctypes.byref(version))
    print(version.value)
"""


@dataclass(frozen=True, slots=True)
class Nvidia:
    """NVIDIA GPUs. `names` may be empty where only the driver's library told of them; `cuda` is the newest version that
    the driver knows, None where it did not say."""

    names: tuple[str, ...]
    cuda: tuple[int, int] | None

    def __str__(self) -> str:
        name = ", ".join(dict.fromkeys(self.names)) or "an NVIDIA GPU"
        return f"{name} (driver for CUDA {self.cuda[0]}.{self.cuda[1]})" if self.cuda else name


def nvidia(proc: Path = Path("/proc")) -> Nvidia | None:
    """The machine's NVIDIA GPUs; None if there are none, or no driver that works."""
    names = _listed() or _names_in(proc)
    listing = _said("nvidia-smi") if names else ""
    version = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", listing)
    if version is not None:
        return Nvidia(names, (int(version[1]), int(version[2])))
    number = _said(sys.executable, "-I", "-c", _ASK_LIBCUDA).strip()
    if number.isdecimal():
        return Nvidia(names, (int(number) // 1000, int(number) % 1000 // 10))
    return Nvidia(names, None) if names else None


def _listed() -> tuple[str, ...]:
    lines = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _names_in(proc: Path) -> tuple[str, ...]:
    names = []
    for path in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Model:")]
    return tuple(names)


def _said(*command: str) -> str:
    """What a command printed; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
