"""The one tree of errors that kvtier raises. Every one carries what to do next and an exit code for the CLI.

Exit codes: 1 something failed at run time, 2 wrong usage (arguments, names), 3 a model file cannot be used.
"""

from __future__ import annotations

from pathlib import Path


class KvtierError(Exception):
    """Base of all errors of this package.

    `message` says what happened, `hint` (may be empty) what to do about it.
    """

    exit_code: int = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(KvtierError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2


class ModelNotFoundError(UsageError):
    """Neither a file nor a known model name."""


class ModelFetchError(KvtierError):
    """A model could not be downloaded, or what came is not what was expected."""


class GgufError(KvtierError):
    """A GGUF file that cannot be used: names the file, the byte offset, the reason and the way out."""

    exit_code = 3

    def __init__(self, path: Path, off_bytes: int, reason: str, hint: str = "") -> None:
        super().__init__(f"{path}: at byte {off_bytes:,}: {reason}", hint)
        self.path = path
        self.off_bytes = off_bytes
        self.reason = reason
