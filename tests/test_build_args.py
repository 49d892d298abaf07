"""The CMake switches with which llama.cpp is at its best: for machines of many kinds, and with compilers that know
less."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.machine import buildargs

from . import machines

ROOT = Path(__file__).resolve().parents[1]
AVX2 = ["GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_FMA", "GGML_F16C", "GGML_BMI2"]
AVX512 = ["GGML_AVX512", "GGML_AVX512_VBMI", "GGML_AVX512_VNNI", "GGML_AVX512_BF16"]
AMX = ["GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16"]


def switches(args: str) -> list[str]:
    """What is turned on, in order; the first argument must turn the native build off."""
    first, *rest = args.split()
    assert first == "-DGGML_NATIVE=OFF"
    assert all(part.startswith("-D") and part.endswith("=ON") for part in rest)
    return [part[2:-3] for part in rest]


@pytest.mark.parametrize(
    ("flags", "amx", "named"),
    [
        (machines.SAPPHIRE_RAPIDS, "works", [*AVX2, "GGML_AVX_VNNI", *AVX512, *AMX]),
        (machines.SAPPHIRE_RAPIDS, "faults", [*AVX2, "GGML_AVX_VNNI", *AVX512]),
        (machines.SAPPHIRE_RAPIDS, "denied", [*AVX2, "GGML_AVX_VNNI", *AVX512]),
        (machines.SAPPHIRE_RAPIDS, "unknown", [*AVX2, "GGML_AVX_VNNI", *AVX512]),
        (machines.SAPPHIRE_RAPIDS - {"avx512_fp16"}, "faults", [*AVX2, "GGML_AVX_VNNI", *AVX512]),
    ],
)
def test_machines_whose_default_build_is_a_trap(flags: frozenset[str], amx: str, named: list[str]) -> None:
    assert not buildargs.native_is_best(flags, amx)
    assert switches(buildargs.best_args(flags, amx)) == named


@pytest.mark.parametrize(
    "flags",
    [
        machines.ZEN_5,
        machines.ZEN_4,
        machines.ZEN_1,
        machines.HASWELL,
        machines.IVY_BRIDGE,
        machines.NEOVERSE,
        frozenset(),
    ],
)
def test_machines_whose_default_build_is_best(flags: frozenset[str]) -> None:
    assert buildargs.native_is_best(flags, "absent")
    assert buildargs.best_args(flags, "absent") == ""


def test_amx_that_works_is_no_reason_to_leave_the_default() -> None:
    assert buildargs.best_args(machines.SAPPHIRE_RAPIDS - {"avx512_fp16"}, "works") == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (machines.ZEN_5, [*AVX2, "GGML_AVX_VNNI", *AVX512]),
        (machines.ZEN_4, [*AVX2, *AVX512]),
        (machines.ZEN_1, AVX2),
        (machines.HASWELL, AVX2),
        (machines.IVY_BRIDGE, ["GGML_SSE42", "GGML_AVX", "GGML_F16C"]),
        (machines.NEOVERSE, []),
    ],
)
def test_what_is_named_is_what_the_processor_has(flags: frozenset[str], named: list[str]) -> None:
    assert switches(buildargs.named_args(flags, "absent")) == named
    for lost in ("avx512vl", "avx512cd"):  # one switch turns on five sets
        assert "GGML_AVX512" not in switches(buildargs.named_args(flags - {lost}, "absent"))


def test_switches_are_llama_cpps_own() -> None:
    options = ROOT / "third_party" / "llama.cpp" / "ggml" / "CMakeLists.txt"
    if not options.is_file():
        pytest.skip("the llama.cpp source is not there: scripts/fetch-llama.py fetches it")
    text = options.read_text()
    for switch in ["GGML_NATIVE", *switches(buildargs.named_args(machines.SAPPHIRE_RAPIDS, "works"))]:
        assert f"option({switch} " in text


def test_a_compiler_that_knows_less_is_asked_for_less() -> None:
    known = {"-mavxvnni", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512bf16"}
    args = buildargs.best_args(machines.SAPPHIRE_RAPIDS, "works", lambda option: option not in known)  # GCC 9
    assert switches(args) == [*AVX2, *AVX512[:-1]]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_compiler_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert buildargs.compiler_takes("-O2")
    assert not buildargs.compiler_takes("-mno-such-instructions")
    picky = tmp_path / "picky c++"
    picky.write_text('#!/bin/sh\ncase "$1" in -mavx2) exit 0;; *) exit 1;; esac\n')
    picky.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(picky)))
    assert [buildargs.compiler_takes(option) for option in ("-mavx2", "-mavxvnni")] == [True, False]
    for absent in (str(tmp_path / "missing"), ""):
        monkeypatch.setenv("CXX", absent)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert buildargs.compiler_takes("-mno-such-instructions"), "no compiler to ask: the build says so itself"


def test_the_command_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    """Run by a real shell with a `pip` of ours that says what it was given."""
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$CMAKE_ARGS" "$@"\n')
    pip.chmod(0o755)
    args = buildargs.best_args(machines.SAPPHIRE_RAPIDS, "works")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for version, wanted in (("0.3.36", "llama-cpp-python==0.3.36"), ("", "llama-cpp-python")):
        command = buildargs.install_command(args, version)
        said = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[:2] == [args, "install"]
        assert said.splitlines()[-3:] == ["--no-binary", "llama-cpp-python", wanted]
    assert "CMAKE_ARGS" not in buildargs.install_command("", "0.3.36")
