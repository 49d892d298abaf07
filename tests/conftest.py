"""What every test shares: nothing of the environment of whoever runs them, time for slow machines, and the real models,
fetched once by name.

Tests that took over 2 seconds are listed in tests/long.txt with their seconds and get the marker `long`; the files with
the longest come first, so that processes side by side end together. `KVTIER_WRITE_LONG=1 make test-python` writes the
list anew.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtier.model.names import resolve

TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
# Every option of the command line is a variable too, and KVTIER_CONFIG is read by the library. These say where things
# are and how tests are run.
KEPT = (
    "KVTIER_LIBRARY",
    "KVTIER_CACHE_DIR",
    "KVTIER_ISA",
    "KVTIER_TEST_PROGRAMS",
    "KVTIER_WRITE_DOCS",
    "KVTIER_WRITE_LONG",
)
LONG = Path(__file__).with_name("long.txt")
LONG_S = 2.0

for name in list(os.environ):  # at once, so that fixtures of the session and child processes see none of it either
    if name in (*TERMINAL, "GGML_BACKEND_PATH") or (name.startswith("KVTIER_") and name not in KEPT):
        del os.environ[name]

# Before llama.cpp is loaded: with several test processes, threads that spin at barriers keep the others from working.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")

# of each test, set-up and tear-down included; in the process that reports
seconds: defaultdict[str, float] = defaultdict(float)


def _listed() -> dict[str, float]:
    lines = (line.split(maxsplit=1) for line in LONG.read_text(encoding="utf-8").splitlines() if line[:1] != "#")
    return {test: float(took) for took, test in lines}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = _listed()
    of_file: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        if item.get_closest_marker("long"):  # a file that marks itself
            of_file[item.path] = math.inf
        elif item.nodeid in listed:
            item.add_marker("long")
            of_file[item.path] += listed[item.nodeid]
    items.sort(key=lambda item: -of_file[item.path])  # stable: the order within a file stays


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("KVTIER_WRITE_LONG") and "PYTEST_XDIST_WORKER" not in os.environ:
        long = [
            f"{took:.1f} {test}\n" for test, took in sorted(seconds.items(), key=lambda item: -item[1]) if took > LONG_S
        ]
        LONG.write_text("# seconds, test: written by KVTIER_WRITE_LONG=1 make test-python\n" + "".join(long), "utf-8")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: sliding-window layers."""
    return resolve("gemma3-270m")
