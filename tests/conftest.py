"""Fixtures that every test shares: the real models, fetched once by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.models import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: sliding-window layers."""
    return resolve("gemma3-270m")
