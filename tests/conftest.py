"""What every test shares: nothing of the environment of whoever runs them, time for slow machines, and the real models,
fetched once by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtier.model.names import resolve

TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
# Every option of the command line is a variable too, and KVTIER_CONFIG is read by the library. These say where things
# are and how tests are run.
KEPT = ("KVTIER_LIBRARY", "KVTIER_CACHE_DIR", "KVTIER_ISA", "KVTIER_TEST_PROGRAMS", "KVTIER_WRITE_DOCS")

for name in list(os.environ):  # at once, so that fixtures of the session and child processes see none of it either
    if name in (*TERMINAL, "GGML_BACKEND_PATH") or (name.startswith("KVTIER_") and name not in KEPT):
        del os.environ[name]

settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: sliding-window layers."""
    return resolve("gemma3-270m")
