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
from kvtier.doctor import diagnosis
from kvtier.doctor.diagnosis import Finding, ProbeResult, run_probe, worst
from kvtier.errors import UsageError
from kvtier.machine import hardware
from kvtier.measuring.progress import StatusLine

from . import machines
from .processes import pieces

SOUND: dict[str, Mapping[str, Any]] = {
    "llama_cpp": {"version": "0.3.36", "ggml": "0.25.3", "path": "/x"},
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
