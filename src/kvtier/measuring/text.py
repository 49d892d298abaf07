"""Real text that every machine has: sources of Python's standard library."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import tarfile
import typing
from pathlib import Path
from types import ModuleType

from .errors import MeasuringError

_MODULES: tuple[ModuleType, ...] = (argparse, typing, inspect, tarfile, dataclasses, ast)


def library_text() -> str:
    """Several modules of the standard library, one after another: code, comments and long docstrings."""
    parts = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in _MODULES if module.__file__]
    if not parts:
        raise MeasuringError(
            "the sources of Python's standard library are not installed", "Give a text of your own with -f FILE."
        )
    return "\n".join(parts)
