"""One line on stderr that says what is being measured."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType


class StatusLine:
    """A line that is written over, silent where stderr is no terminal that can do that.

    A context manager that wipes it at the end.
    """

    def __init__(self) -> None:
        self._on = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")

    def __call__(self, text: str) -> None:
        if self._on:
            with suppress(OSError):  # a terminal that has gone misses nothing
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self("")
