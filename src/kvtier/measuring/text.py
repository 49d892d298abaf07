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
        raise MeasuringError("the sources of Python's standard library are not installed", "give a text of your own with -f FILE")
    return "\n".join(parts)


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or the standard library's sources where there is none. Raises MeasuringError."""
    if path is None:
        return library_text()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeasuringError(f"cannot read the text {path}: {error}", "Give a file with UTF-8 text.") from None
    if not text.strip():
        raise MeasuringError(f"the text {path} is empty")
    return text
