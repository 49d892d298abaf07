"""A machine whose AMX instructions kill the process: refused with the command that helps, before llama.cpp runs into
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvtier.native import runtime

# The two facts of such a machine are replaced; everything after them is the real program.
RUN = """
import sys
from kvtier.machine import hardware
from kvtier.native import runtime
hardware.amx_state = lambda flags=None: "faults"
built = sys.argv.pop(1) == "built"
runtime.built_with_amx = lambda: built
from kvtier.cli import main
main(prog_name="kvtier")
"""


def _run(path: Path, built: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, built, "run", str(path), "-p", "x", "-n", "1", "-c", "256"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120, check=False)


def test_the_trap_is_refused(smollm2_path: Path) -> None:
    done = _run(smollm2_path, "built")
    assert done.returncode == 11 and done.stdout == "" and "Traceback" not in done.stderr
    assert "AMX" in done.stderr and "-DGGML_NATIVE=OFF" in done.stderr


def test_a_build_without_it_runs(smollm2_path: Path) -> None:
    done = _run(smollm2_path, "plain")
    assert done.returncode == 0, done.stderr


def test_what_this_build_has_is_known() -> None:
    assert isinstance(runtime.built_with_amx(), bool)
    runtime.load()  # it works here, or none of these tests would
