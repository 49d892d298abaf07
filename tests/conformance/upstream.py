"""Upstream's test programs, built at the pin, and what they say: one record per case."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.native import binding

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "conformance"
TIMEOUT_S = 3000
_RECORD = re.compile(r'"backend_name",.*|"KVT0(, CPU)?",.*')  # both names: the reference cannot compute it either


def build() -> Path:
    """Builds the programs, and nothing of llama.cpp beside them, where they are out of date; returns their folder."""
    source = ["-S", str(ROOT / "tests" / "conformance"), "-B", str(BUILD)]
    run(["cmake", *source, f"-DKVTIER_SITE_PACKAGES={sysconfig.get_path('purelib')}"])
    run(["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)])
    return BUILD


def run(command: list[str]) -> str:
    """Runs a command that must succeed; its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    assert done.returncode == 0, (
        f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def environment() -> dict[str, str]:
    """The environment with our library as the backend, and no setting of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "GGML_"))}
    return {**kept, "GGML_BACKEND_PATH": str(binding.library_path())}


@dataclass(frozen=True)
class OpCase:
    """One case of test-backend-ops: its parameters, and whether our device took it and computed it right."""

    op: str
    params: str
    is_supported: bool
    error: str
    values: dict[str, str] = field(compare=False)


def op_cases(programs: Path, op: str) -> list[OpCase]:
    """Runs all cases of one operation on KVT0. The exit status is not asserted: the records say what failed."""
    command = [
        str(programs / "test-backend-ops"),
        "test",
        "-b",
        "KVT0",
        "-o",
        op,
        "--output",
        "csv",
        "-j",
        str(os.cpu_count() or 1),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    assert done.returncode in (0, 1), f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-6000:]}"
    # a failure is printed in front of its record, on the same line
    records = [found.group() for line in done.stdout.splitlines() if (found := _RECORD.search(line))]
    rows = csv.DictReader(records)
    cases = [
        OpCase(
            op=row["op_name"],
            params=row["op_params"],
            is_supported=row["supported"] == "1",
            error="" if row["error_message"] == "not supported" else row["error_message"],
            values=dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", row["op_params"])),
        )
        for row in rows
        if row["op_name"] == op
    ]
    assert (done.returncode == 0) == (not any(case.error for case in cases)), done.stderr[-6000:]
    return cases


@dataclass(frozen=True)
class ArchRow:
    """One line of test-llama-archs."""

    arch: str
    config: str
    logits: str
    roundtrip: str


def arch_rows(programs: Path) -> list[ArchRow]:
    """Runs all architectures on KVT0 with a fixed seed."""
    command = [str(programs / "test-llama-archs"), "-b", "KVT0", "-s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    assert done.returncode in (0, 1), (
        f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert "\nSummary: " in plain, f"the output ends early:\n{plain[-3000:]}"
    rows = []
    for line in plain.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[3] in ("Dense", "MoE"):
            rows.append(ArchRow(cells[1], cells[3], cells[4].split()[0], cells[5]))
    assert (done.returncode == 0) == (not any("FAIL" in (row.logits, row.roundtrip) for row in rows)), plain[-3000:]
    return rows


if __name__ == "__main__":
    sys.exit("run it as: python -m pytest tests/conformance")
