"""What this machine is: processor, memory, disk speed, and whether its AMX instructions fault.

Only the standard library is imported here, and nothing of this package: `scripts/probe-build.py` loads this file by its
path before anything is installed. Nothing is compiled for the AMX probe either: a child process runs a few bytes of
machine code, so that a fault kills the child and not the caller.
"""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SPEED_BYTES: Final = 64 << 20
PROBE_TIMEOUT_S: Final = 20.0

# Child process: asks the kernel for the tile registers, then runs the code in argv[1] with the tile configuration's
# address as its argument. Exit code 0: it ran; 2: the kernel gives no tiles; 3: no executable memory; a signal: it
# faulted.
_CHILD: Final = """
import ctypes, mmap, sys
libc = ctypes.CDLL(None, use_errno=True)
if sys.argv[2] == "tiles" and libc.syscall(158, 0x1023, 18) != 0:
    sys.exit(2)
code = bytes.fromhex(sys.argv[1])
try:
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
except OSError:
    sys.exit(3)
memory.write(code)
tiles = bytearray(64)
tiles[0] = 1
for i in range(3):
    tiles[16 + 2*i] = 64
    tiles[48 + i] = 16
config = (ctypes.c_char * 64).from_buffer(tiles)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(config))
import os
os._exit(0)
"""

_AMX_CODE: Final = (
    "c4e2784907"  # ldtilecfg [rdi]
    "c4e27b49c0"
    "c4e27b49c8"
    "c4e27b49d0"  # tilezero tmm0, tmm1, tmm2
    "c4e26b5ec1"  # tdpbssd tmm0, tmm1, tmm2
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)

AmxState = Literal["absent", "works", "faults", "denied", "unknown"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of RAM: of the machine, or of the container where that is less."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second of sequential writing and reading. `direct`: past the page cache, so the disk's own speed."""

    write_rate: float
    read_rate: float
    direct: bool


def cpu_flags() -> frozenset[str]:
    """The instruction sets as /proc/cpuinfo names them; empty where there is no such file."""
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    """The processor's name, or the machine type if it has none."""
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def memory() -> Memory:
    """RAM in total and free for use, with the limits of control groups taken into account.

    Zeros if the system does not say.
    """
    total = available = 0
    try:
        for line in Path("/proc/meminfo").read_text("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                n_bytes = int(value.split()[0]) * 1024
                total, available = (n_bytes, available) if key == "MemTotal" else (total, n_bytes)
    except (OSError, ValueError, IndexError):
        return Memory(0, 0)
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(folder, limit_name).read_text())
            used = int(Path(folder, used_name).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def give_back_free_memory() -> bool:
    """Hand memory that was freed in this process back to the system, where the C library keeps it (glibc).

    False where it cannot be asked to.
    """
    import ctypes

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim(ctypes.c_size_t(0))
    return True


def disk_speed(folder: Path, n_bytes: int = SPEED_BYTES) -> DiskSpeed:
    """Write and read `n_bytes` (a multiple of 1 MiB) in a file of `folder` that has no name, and so cannot be left
    behind.

    Raises OSError if the folder cannot be written, or is full.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return _disk_speed(folder, n_bytes, direct)
        except OSError as err:
            if err.errno not in (22, 95):  # EINVAL, EOPNOTSUPP: this file system has no direct I/O
                raise
    return _disk_speed(folder, n_bytes, 0)


def _disk_speed(folder: Path, n_bytes: int, direct: int) -> DiskSpeed:
    name_fd, name = tempfile.mkstemp(prefix=".kvtier-speed-", dir=folder)
    try:
        os.close(name_fd)
        fd = os.open(name, os.O_RDWR | direct)
    finally:
        os.unlink(name)
    with mmap.mmap(-1, 1 << 20) as block:  # page-aligned, as direct I/O wants it
        try:
            block.write(os.urandom(1 << 20))
            n_blocks = n_bytes >> 20
            start = time.perf_counter()
            for i in range(n_blocks):
                _whole(os.pwritev(fd, [block], i << 20))
            os.fsync(fd)
            middle = time.perf_counter()
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for i in range(n_blocks):
                _whole(os.preadv(fd, [block], i << 20))
            end = time.perf_counter()
        finally:
            os.close(fd)
    return DiskSpeed(n_bytes / max(middle - start, 1e-9), n_bytes / max(end - middle, 1e-9), bool(direct))


def _whole(n_done: int) -> None:
    if n_done != 1 << 20:
        raise OSError(28, "No space left on device")


def run_code(code_hex: str, *, tiles: bool = False) -> int:
    """Run x86-64 machine code (a function, ending in ret) in a child process; returns its exit code, negative for a
    signal.

    With `tiles` the child first asks the kernel for AMX tile registers.
    """
    command = [sys.executable, "-I", "-c", _CHILD, code_hex, "tiles" if tiles else "plain"]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def amx_state(flags: frozenset[str] | None = None) -> AmxState:
    """Whether AMX can be used: it is not there, it works, its instructions kill the process, or the kernel denies the
    tiles."""
    flags = cpu_flags() if flags is None else flags
    if "amx_tile" not in flags or platform.machine() != "x86_64":
        return "absent"
    code = run_code(_AMX_CODE, tiles=True)
    if code < 0:
        return "faults"
    return "works" if code == 0 else "denied" if code == 2 else "unknown"
