"""`kvtier doctor`: every finding, with a library that is sound, missing, foreign or crashing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtier.cli import main, ui
from kvtier.doctor import cuda, diagnosis
from kvtier.doctor.diagnosis import Finding, ProbeResult, run_probe, worst
from kvtier.errors import UsageError
from kvtier.machine import gpu, hardware
from kvtier.machine.gpu import Nvidia, nvidia
from kvtier.measuring.progress import StatusLine

from . import machines
from .processes import pieces

SOUND: dict[str, Mapping[str, Any]] = {
    "llama_cpp": {"version": "0.3.36", "ggml": "0.25.3", "path": "/x"},
    "gpus": {"names": []},
    "cpu": {"features": {"AVX2": "1", "FMA": "1", "F16C": "1", "AVX512": "1", "AMX_INT8": "0"}},
    "attention": {"ns_per_cell": {"64": 20.0, "128": 33.0}},
    "plugin": {"path": "/x/libkvtier.so", "version": "0.1.0", "ggml": "0.25.3", "isa": "avx512vnni"},
    "devices": {"devices": [{"name": "CPU"}, {"name": "KVT0"}]},
}
ZEN = frozenset(["avx2", "fma", "f16c", "avx512f", "avx512cd", "avx512bw", "avx512vl", "avx512dq"])


def probe(
    *, without: tuple[str, ...] = (), exit_code: int | None = 0, tail: str = "", **steps: Mapping[str, Any]
) -> ProbeResult:
    """What a child would have said."""
    return ProbeResult(
        {name: step for name, step in {**SOUND, **steps}.items() if name not in without}, exit_code, tail
    )


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_sound_installation_has_nothing_to_do() -> None:
    findings = [*diagnosis._libraries(probe()), *diagnosis._stock(probe(), ZEN, "absent")]
    findings += diagnosis._kernels(probe(), ZEN)
    assert [finding.status for finding in findings] == ["ok"] * 6
    assert all(finding.text and not finding.hint for finding in findings)


@pytest.mark.parametrize(
    ("result", "name", "text"),
    [
        (
            ProbeResult({"missing": {"message": "No module named 'llama_cpp'"}}, 1, ""),
            "llama-cpp-python",
            "No module named",
        ),
        (ProbeResult({}, -4, ""), "llama-cpp-python", "crashed (SIGILL)"),
        (probe(without=("cpu", "plugin", "devices"), exit_code=-11), "ggml", "crashed (SIGSEGV)"),
        (probe(without=("plugin", "devices"), exit_code=-6), "libkvtier", "crashed (SIGABRT)"),
        (probe(without=("plugin", "devices"), exit_code=None), "libkvtier", "did not finish"),
        (probe(without=("plugin", "devices"), exit_code=1, tail="OSError: bad ELF"), "libkvtier", "bad ELF"),
        (probe(without=("plugin", "devices"), missing={"message": "No module named 'cffi'"}), "libkvtier", "cffi"),
        (
            probe(without=("plugin", "devices"), refused={"message": "ggml 0.99 is not known", "hint": "Update."}),
            "libkvtier",
            "0.99",
        ),
        (probe(devices={"devices": [{"name": "CPU"}]}), "Devices", "KVT0 is not among CPU"),
    ],
)
def test_what_is_broken_is_named_with_a_way_out(result: ProbeResult, name: str, text: str) -> None:
    findings = diagnosis._libraries(result)
    assert worst(findings) == "fail"
    assert text in by_name(findings)[name].text and by_name(findings)[name].hint


def test_instruction_sets_left_unused() -> None:
    slow = probe(
        cpu={"features": {"AVX2": "1", "FMA": "1", "F16C": "1", "AVX512": "0"}},
        plugin={**SOUND["plugin"], "isa": "scalar"},
    )
    stock = by_name(diagnosis._stock(slow, ZEN, "absent"))["llama.cpp's CPU code"]
    assert stock.status == "warn" and "without AVX512" in stock.hint
    assert "-DGGML_AVX512=ON" in stock.hint and stock.hint.endswith("llama-cpp-python==0.3.36")
    (kernels,) = diagnosis._kernels(slow, ZEN)
    assert kernels.status == "warn" and "avx512" in kernels.hint
    unused = [*diagnosis._stock(slow, frozenset(), "absent"), *diagnosis._kernels(slow, frozenset())]
    assert worst(unused) == "ok", "what the processor lacks is not missed"


@pytest.mark.parametrize(("amx", "named"), [("works", True), ("denied", False)])
def test_slow_attention_is_named_with_the_command_that_mends_it(amx: hardware.AmxState, named: bool) -> None:
    slow = probe(attention={"ns_per_cell": {"64": 110.0, "128": 25.0}})
    found = by_name(diagnosis._stock(slow, machines.SAPPHIRE_RAPIDS, amx))["llama.cpp attention"]
    assert found.status == "warn" and "110 ns for heads of 64" in found.text
    command = found.hint.splitlines()[-1]
    assert command.startswith('CMAKE_ARGS="-DGGML_NATIVE=OFF ') and command.endswith("llama-cpp-python==0.3.36")
    assert {"-DGGML_AVX512=ON", "-DGGML_AVX512_BF16=ON"} <= set(shlex.split(command)[0].split())
    assert ("-DGGML_AMX_INT8=ON" in command) is named


def test_attention_that_could_not_be_tried_is_no_finding() -> None:
    for step in ({"ns_per_cell": {}}, {"ns_per_cell": {"64": 10.0}}):
        found = by_name(diagnosis._stock(probe(attention=step), ZEN, "absent"))
        assert all(finding.status == "ok" for finding in found.values())
    assert "llama.cpp attention" not in by_name(diagnosis._stock(probe(without=("attention",)), ZEN, "absent"))
    assert diagnosis._stock(probe(without=("cpu",)), ZEN, "absent") == []


@pytest.mark.parametrize(
    ("state", "built", "status"),
    [
        ("absent", True, "ok"),
        ("works", True, "ok"),
        ("denied", True, "ok"),
        ("faults", True, "fail"),
        ("unknown", True, "fail"),
        ("faults", False, "ok"),
    ],
)
def test_the_amx_trap(state: hardware.AmxState, built: bool, status: str) -> None:
    found = diagnosis._amx(state, probe(cpu={"features": {"AMX_INT8": "1" if built else "0"}}), ZEN)
    assert found.status == status
    assert ("GGML_NATIVE=OFF" in found.hint) is (status == "fail")


def test_low_memory_is_a_warning() -> None:
    assert diagnosis._memory(hardware.Memory(8 << 30, 100 << 20)).status == "warn"
    assert diagnosis._memory(hardware.Memory(8 << 30, 6 << 30)).status == "ok"
    assert diagnosis._memory(hardware.Memory(0, 0)).status == "warn"


def test_disk_findings(tmp_path: Path) -> None:
    assert "MB/s" in diagnosis._disk(tmp_path / "not" / "yet").text
    (tmp_path / "file").touch()
    assert diagnosis._disk(tmp_path / "file").status == "fail"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_a_directory_that_cannot_be_written() -> None:
    found = diagnosis._disk(Path("/proc"))
    assert found.status in ("fail", "warn") and found.hint


@pytest.mark.parametrize(
    ("code", "ended"),
    [("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11), ("import sys; sys.exit('broken')", 1)],
)
def test_the_child_may_die(code: str, ended: int) -> None:
    said = 'print(\'{"step": "llama_cpp", "version": "1", "ggml": "2"}\', flush=True); print(\'noise\'); '
    result = run_probe((sys.executable, "-c", said + code))
    assert result.exit_code == ended and set(result.steps) == {"llama_cpp"}
    findings = diagnosis._libraries(result)
    assert [finding.status for finding in findings] == ["ok", "fail"]
    assert ("SIGSEGV" if ended < 0 else "broken") in findings[1].text


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_TIMEOUT_S", 0.5)
    assert run_probe((sys.executable, "-c", "import time; time.sleep(60)")).exit_code is None


def test_worst() -> None:
    assert worst([]) == "ok"
    assert worst([Finding("a", "warn", ""), Finding("b", "ok", "")]) == "warn"
    assert worst([Finding("a", "fail", ""), Finding("b", "warn", "")]) == "fail"


def test_the_real_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # with pytest -s there is a real terminal
    shown = CliRunner().invoke(main, ["doctor", "--kv-dir", str(tmp_path), "--json"])
    out = json.loads(shown.stdout)
    found = {finding["name"]: finding for finding in out["findings"]}
    assert shown.exit_code == 0 and out["status"] in ("ok", "warn"), out
    assert "128 channels" in found["llama.cpp attention"]["text"], "it was really tried"
    assert (
        "KVT0" in found["Devices"]["text"]
        and found["libkvtier"]["status"] == "ok"
        and "ggml" in found["llama-cpp-python"]["text"]
    )
    text = CliRunner().invoke(main, ["doctor", "--kv-dir", str(tmp_path)])
    assert text.exit_code == 0
    table = text.stdout.split("\nWhat to do:")[0]
    assert all(len(line) <= 80 or "/" in line for line in table.splitlines())


@pytest.mark.parametrize(("env", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals_that_want_them(
    env: dict[str, str], has_colour: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"TERM": "xterm-256color", **env}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        ui.echo_styled(("ok", "green"), "  fine")
        ui.error(UsageError("wrong"))
        with StatusLine() as status:
            status("on the way")
    shown = b"".join(pieces(ours)).decode()
    os.close(ours)
    assert "fine" in shown
    assert "wrong" in shown
    assert ("\x1b[3" in shown, "\x1b[1" in shown) == (has_colour, has_colour)
    assert ("on the way" in shown) == (env.get("TERM") != "dumb")
    assert ("\x1b" in shown) == (env.get("TERM") != "dumb")


def test_a_missing_and_a_foreign_library(tmp_path: Path) -> None:
    env = {"KVTIER_LIBRARY": str(tmp_path / "missing.so")}
    shown = CliRunner().invoke(main, ["doctor"], env=env)
    assert (
        shown.exit_code == 11
        and "missing.so" in shown.stdout.replace("\n" + " " * 28, " ")
        and "What to do:" in shown.stdout
    )
    foreign = tmp_path / "libkvtier.so"
    foreign.write_bytes(b"\x7fELF this is no library")
    shown = CliRunner().invoke(main, ["doctor", "--json"], env={"KVTIER_LIBRARY": str(foreign)})
    found = {finding["name"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 11 and found["libkvtier"]["status"] == "fail" and found["libkvtier"]["hint"]
    assert found["llama-cpp-python"]["status"] == "ok", "what works is still shown"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_library_that_crashes_takes_nobody_with_it(tmp_path: Path) -> None:
    source, library = tmp_path / "crash.c", tmp_path / "libkvtier.so"
    source.write_text("#include <signal.h>\nvoid * ggml_backend_init(void) { raise(SIGSEGV); return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    shown = CliRunner().invoke(main, ["doctor", "--json"], env={"KVTIER_LIBRARY": str(library)})
    found = {finding["name"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 11 and "crashed (SIGSEGV)" in found["libkvtier"]["text"]


T4 = Nvidia(("Tesla T4",), (12, 4))


def test_a_gpu_that_llama_cpp_was_not_built_for() -> None:
    (found,) = diagnosis._gpu(T4, probe(gpus={"names": []}))
    assert found.status == "warn" and "Tesla T4" in found.text and "CPU alone" in found.text
    wheel, compiled = (line for line in found.hint.splitlines() if "pip install" in line)
    assert "--only-binary llama-cpp-python" in wheel and wheel.endswith("/llama-cpp-python/whl/cu124")
    assert compiled.startswith('CMAKE_ARGS="-DGGML_CUDA=on" ') and compiled.endswith("llama-cpp-python==0.3.36")


def test_a_gpu_that_llama_cpp_can_use_and_none() -> None:
    (found,) = diagnosis._gpu(T4, probe(gpus={"names": ["CUDA0"]}))
    assert found.status == "ok" and "CUDA0" in found.text and not found.hint
    assert diagnosis._gpu(None, probe(gpus={"names": []})) == []
    assert diagnosis._gpu(T4, ProbeResult({}, -11, "")) == [], "nothing is known of a llama.cpp that does not load"


@pytest.mark.parametrize(
    ("driver", "index"),
    [
        ((12, 1), "cu121"),
        ((12, 9), "cu125"),
        ((13, 1), "cu130"),
        ((14, 0), "cu132"),
        ((11, 4), "CUDA-VERSION"),
        (None, "CUDA-VERSION"),
    ],
)
def test_wheels_are_none_that_the_driver_is_too_old_for(driver: tuple[int, int] | None, index: str) -> None:
    assert cuda.wheel_for(driver) == f"{cuda.WHEELS}{index}"
    assert ("nvidia-smi" in cuda.build_for_gpu(Nvidia((), driver), "0.3.36")) is (index == "CUDA-VERSION")


@pytest.mark.parametrize(
    ("library", "parts"),
    [
        ("libcudart.so.12", ("CUDA 12", "nvidia-cuda-runtime-cu12 nvidia-cublas-cu12", "LD_LIBRARY_PATH")),
        ("libcublas.so.11", ("CUDA 11", "nvidia-cuda-runtime-cu11")),
        ("libcudart.so.13", ("CUDA 13", "'nvidia-cuda-runtime==13.*' 'nvidia-cublas==13.*'")),
        ("libcuda.so.1", ("no NVIDIA driver", "-DGGML_CUDA=off")),
        ("libgomp.so.1", ("apt-get install libgomp1",)),
        ("libopenblas.so.0", ("libopenblas.so.0", "--no-binary llama-cpp-python")),
    ],
)
def test_a_library_that_llama_cpp_misses_is_named_with_what_brings_it(library: str, parts: tuple[str, ...]) -> None:
    """llama_cpp says it so when its libllama cannot be loaded."""
    said = f"Failed to load shared library '/x/libllama.so': {library}: cannot open shared object file: No such file"
    code = f"raise RuntimeError({said!r})"
    (found,) = diagnosis._libraries(run_probe((sys.executable, "-c", code)))
    assert found.status == "fail" and library in found.text
    assert [part for part in parts if part not in found.hint] == []


def test_where_the_libraries_of_nvidia_s_packages_are(tmp_path: Path) -> None:
    """The command of the hint is run as a shell does it."""
    assignment = cuda.missing_library("libcudart.so.12: cannot open shared object file").splitlines()[2]
    folder = tmp_path / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "import sysconfig; '
        f'sysconfig.get_path = lambda name: {str(tmp_path)!r}; $2"\n'
    )
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": "/before"}
    shell = ["sh", "-ec", f'{assignment}\necho "$LD_LIBRARY_PATH"']
    assert subprocess.run(shell, env=env, capture_output=True, text=True, check=True).stdout == f"{folder}:/before\n"


def witness(folder: Path, name: str, script: str) -> None:
    """A program of this name, first on the path of whoever takes `folder` for it."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nvidia_smi_tells_of_gpu_and_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    listing = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
    witness(tmp_path, "nvidia-smi", f'case "$1" in --query-gpu=name) echo "Tesla T4";; *) echo "{listing}";; esac')
    assert nvidia(tmp_path) == T4
    assert str(T4) == "Tesla T4 (driver for CUDA 12.4)"


def test_proc_tells_where_nvidia_smi_is_missing_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "_ASK_LIBCUDA", "print('')")
    assert nvidia(tmp_path) is None
    information = tmp_path / "driver" / "nvidia" / "gpus" / "0000:00:04.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t Tesla T4\nIRQ:   \t\t 33\n")
    assert nvidia(tmp_path) == Nvidia(("Tesla T4",), None)
    witness(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert nvidia(tmp_path) == Nvidia(("Tesla T4",), None)


def test_the_driver_s_library_tells_where_nobody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for said, found in (("print(13000)", Nvidia((), (13, 0))), ("raise OSError", None), ("print()", None)):
        monkeypatch.setattr(gpu, "_ASK_LIBCUDA", said)
        assert nvidia(tmp_path) == found
    assert "an NVIDIA GPU" in str(Nvidia((), (13, 0)))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("n_gpus", "found"), [(1, Nvidia((), (12, 4))), (0, None)])
def test_a_driver_counts_only_with_a_gpu(
    n_gpus: int, found: Nvidia | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library in the place of the driver's, and its functions."""
    source = tmp_path / "cuda.c"
    source.write_text(
        "int cuInit(unsigned flags) { return (int) flags; }\n"
        f"int cuDeviceGetCount(int * count) {{ *count = {n_gpus}; return 0; }}\n"
        "int cuDriverGetVersion(int * version) { *version = 12040; return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert nvidia(tmp_path) == found
