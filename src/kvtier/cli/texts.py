"""Texts that people name."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import UsageError
from .options import not_utf8


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or sources of Python's standard library where there is none.

    Raises UsageError for one that is empty, too.
    """
    if path is None:
        from ..measuring.text import library_text

        return library_text()
    text = read_file(path, "the text", "Check its path.")
    if not text.strip():
        raise UsageError(f"the text {path} is empty", "Give a file with some text in it.")
    return text


def read_file(path: Path, what: str, hint: str) -> str:
    """All of a UTF-8 file; - is standard input. Raises UsageError."""
    is_input = str(path) == "-"
    name = "standard input" if is_input else str(path)
    try:
        raw = sys.stdin.buffer.read() if is_input else path.read_bytes()
    except OSError as err:
        raise UsageError(f"{what} {name} cannot be read: {err.strerror}", hint) from err
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise not_utf8(name, raw[err.start], err.start) from err
