"""With which CMake switches llama.cpp is at its best on a processor, and how to install it so.

llama.cpp's default is `-march=native`, and that is best on most machines. Two are exceptions, where naming the
instruction sets one by one is better: AMX that is advertised but faults (the default build crashes), and AVX512_FP16,
with which ggml sums up attention over F16 values in half precision, in steps of 128 channels, and has only slow code
for what is left of a head (all of one with 64). docs/measuring.md has the evidence.

Only the standard library is imported here, and nothing of this package: `scripts/probe-build.py` loads this file by its
path before anything is installed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Final

COMPILER_TIMEOUT_S: Final = 20.0
HALF_PRECISION: Final = "avx512_fp16"  # as /proc/cpuinfo names it

# llama.cpp's switch; what it needs, in the words of /proc/cpuinfo; the compiler's option for it. GGML_AVX512 turns on
# five sets at once. AVX512_FP16 has no switch, which is the point.
_SWITCHES: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    ("GGML_SSE42", ("sse4_2",), "-msse4.2"),
    ("GGML_AVX", ("avx",), "-mavx"),
    ("GGML_AVX2", ("avx2",), "-mavx2"),
    ("GGML_FMA", ("fma",), "-mfma"),
    ("GGML_F16C", ("f16c",), "-mf16c"),
    ("GGML_BMI2", ("bmi2",), "-mbmi2"),
    ("GGML_AVX_VNNI", ("avx_vnni",), "-mavxvnni"),
    ("GGML_AVX512", ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"), "-mavx512vl"),
    ("GGML_AVX512_VBMI", ("avx512vbmi",), "-mavx512vbmi"),
    ("GGML_AVX512_VNNI", ("avx512_vnni",), "-mavx512vnni"),
    ("GGML_AVX512_BF16", ("avx512_bf16",), "-mavx512bf16"),
)
_AMX_SWITCHES: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    ("GGML_AMX_TILE", ("amx_tile",), "-mamx-tile"),
    ("GGML_AMX_INT8", ("amx_tile", "amx_int8"), "-mamx-int8"),
    ("GGML_AMX_BF16", ("amx_tile", "amx_bf16"), "-mamx-bf16"),
)

Takes = Callable[[str], bool]


def native_is_best(flags: frozenset[str], amx: str) -> bool:
    """Whether llama.cpp's default build is safe and fast.

    `flags` are those of /proc/cpuinfo, `amx` is what `hardware.amx_state` found.
    """
    return amx not in ("faults", "unknown") and HALF_PRECISION not in flags


def named_args(flags: frozenset[str], amx: str, takes: Takes = lambda _option: True) -> str:
    """CMAKE_ARGS that name every instruction set of the processor which llama.cpp has a switch for.

    AMX is among them only where it works. `takes` says whether the compiler knows an option: one it does not would end
    the build.
    """
    switches = _SWITCHES + (_AMX_SWITCHES if amx == "works" else ())
    named = [f"-D{name}=ON" for name, needs, option in switches if flags.issuperset(needs) and takes(option)]
    return " ".join(["-DGGML_NATIVE=OFF", *named])


def best_args(flags: frozenset[str], amx: str, takes: Takes = lambda _option: True) -> str:
    """CMAKE_ARGS for `pip install llama-cpp-python` on such a machine; empty where llama.cpp's default is best."""
    return "" if native_is_best(flags, amx) else named_args(flags, amx, takes)


def compiler_takes(option: str) -> bool:
    """Whether the C++ compiler that CMake will find knows `option`. True where there is none to ask: the build then
    says so itself."""
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    if not command[0]:
        return True
    try:
        done = subprocess.run(
            [*command, option, "-E", "-x", "c++", os.devnull],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMPILER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode == 0


def install_command(args: str, version: str = "") -> str:
    """The shell command that compiles and installs llama-cpp-python (of `version`, if it is named) with these
    CMAKE_ARGS."""
    wanted = f"llama-cpp-python=={version}" if version else "llama-cpp-python"
    pip = f"pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python {wanted}"
    return f'CMAKE_ARGS="{args}" {pip}' if args else pip
