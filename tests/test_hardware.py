"""The hardware probe: machine code in a child process, the AMX trap, memory and disk."""

from __future__ import annotations

import ast
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvtier.machine import buildargs, hardware

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "probe-build.py"
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 machine code")

RET, UD2, HANG = "c3", "0f0b", "ebfe"


@X86
def test_code_runs_in_a_child_and_dies_there() -> None:
    assert hardware.run_code(RET) == 0
    assert hardware.run_code(UD2) == -signal.SIGILL
    assert hardware.run_code("31c08b00c3") == -signal.SIGSEGV  # xor eax, eax; mov eax, [rax]


@X86
def test_code_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROBE_TIMEOUT_S", 1.0)
    assert hardware.run_code(HANG) == 1


@X86
def test_the_tile_configuration_reaches_the_code() -> None:
    # cmp byte [rdi], 1; jne -> ud2; cmp byte [rdi+16], 64; jne -> ud2; cmp byte [rdi+50], 16; jne -> ud2; ret
    assert hardware.run_code("803f01750d807f10407507807f32107501c30f0b") == 0


@X86
@pytest.mark.parametrize(("code", "state"), [(RET, "works"), (UD2, "faults")])
def test_amx_states_where_the_kernel_gives_tiles(monkeypatch: pytest.MonkeyPatch, code: str, state: str) -> None:
    """The instruction that runs is replaced, the way to run it is the real one; tiles are asked for only on a machine
    that has them."""
    has_amx = "amx_tile" in hardware.cpu_flags()
    monkeypatch.setattr(hardware, "_AMX_CODE", code)
    if not has_amx:
        monkeypatch.setattr(hardware, "_CHILD", hardware._CHILD.replace('sys.argv[2] == "tiles"', "False"))
    assert hardware.amx_state(frozenset({"amx_tile"})) == state


@X86
@pytest.mark.skipif("amx_tile" in hardware.cpu_flags(), reason="this processor has AMX")
def test_amx_code_faults_where_there_is_no_amx() -> None:
    assert hardware.run_code(hardware._AMX_CODE) == -signal.SIGILL
    assert hardware.amx_state() == "absent"
    assert hardware.amx_state(frozenset({"amx_tile"})) in ("denied", "faults")


def test_the_script_needs_only_the_standard_library(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    flags = hardware.cpu_flags()
    wanted = buildargs.best_args(flags, hardware.amx_state(flags), buildargs.compiler_takes)
    assert done.stdout.strip() == wanted
    for file in (SCRIPT, Path(hardware.__file__), Path(buildargs.__file__)):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)
            assert not (isinstance(node, ast.ImportFrom) and node.level)


def test_memory_is_what_the_system_says() -> None:
    memory = hardware.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes <= psutil.virtual_memory().total
    assert hardware.cpu_count() == len(os.sched_getaffinity(0))
    assert hardware.cpu_name()


@pytest.mark.parametrize("n_mib", [1, 5])
def test_disk_speed_leaves_nothing_behind(tmp_path: Path, n_mib: int) -> None:
    speed = hardware.disk_speed(tmp_path, n_mib << 20)
    assert speed.write_rate > 0 and speed.read_rate > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at hand")
def test_disk_speed_on_tmpfs() -> None:
    before = set(os.listdir("/dev/shm"))
    assert hardware.disk_speed(Path("/dev/shm"), 1 << 20).read_rate > 0
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(".kvtier")} == set()


def test_disk_speed_of_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        hardware.disk_speed(tmp_path / "missing", 1 << 20)


def test_freed_memory_goes_back_to_the_system() -> None:
    """In a child, whose heap is known: many small blocks, of which the last stays.

    A C library other than glibc is not asked.
    """
    code = """if True:
        import ctypes, psutil
        from kvtier.machine.hardware import give_back_free_memory
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        blocks = [libc.malloc(60_000) for _ in range(1000)]
        for block in blocks:
            ctypes.memset(block, 1, 60_000)
        for block in blocks[:-1]:
            libc.free(ctypes.c_void_p(block))
        before = psutil.Process().memory_info().rss
        asked = give_back_free_memory()
        print(asked, before - psutil.Process().memory_info().rss)
    """
    asked, freed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert (asked == "True") == (platform.libc_ver()[0] == "glibc")
    assert asked == "False" or int(freed) > 30_000_000
