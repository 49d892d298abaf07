"""The one tree of errors that kvtier raises. Every one carries what to do next and an exit code for the CLI.

Exit codes of the CLI (each class carries its own as `exit_code`):

==== =====================================================================================
1    something failed at run time that has no code of its own (a download, for example)
2    wrong usage: arguments, settings, names
3    a model file cannot be used
4    the prompt, or prompt and answer together, do not fit the context
5    the tier budgets cannot hold the cache
6    the directory of the disk tier cannot be used
7    the disk tier is full
8    a read or write of the disk tier failed
9    a page of the disk tier does not match its checksum
10   out of memory
11   the native library is missing, or does not fit this llama.cpp
12   llama.cpp could not load or compute, for a reason that is in its own log
13   not supported
14   the output cannot be written
129  the terminal was closed (SIGHUP)
130  interrupted (SIGINT)
143  terminated (SIGTERM)
==== =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final


class KvtierError(Exception):
    """Base of all errors of this package.

    `message` says what happened, `hint` (may be empty) what to do about it.
    """

    exit_code: int = 1

    def __init_subclass__(cls, *, exit_code: int | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(KvtierError, exit_code=2):
    """The caller asked for something that cannot be done as asked."""


class ModelNotFoundError(UsageError):
    """Neither a file nor a known model name."""


class ModelFetchError(KvtierError):
    """A model could not be downloaded, or what came is not what was expected."""


class GgufError(KvtierError, exit_code=3):
    """A GGUF file that cannot be used: names the file, the byte offset, the reason and the way out."""

    def __init__(self, path: Path, off_bytes: int, reason: str, hint: str = "") -> None:
        super().__init__(f"{path}: at byte {off_bytes:,}: {reason}", hint)
        self.path = path
        self.off_bytes = off_bytes
        self.reason = reason


class ChatTemplateError(KvtierError, exit_code=3):
    """The chat template in a model's file is not one that can be used."""


class OutputError(KvtierError, exit_code=14):
    """Standard output cannot be written. `is_quiet` when its reader has gone, who needs no message."""

    def __init__(self, message: str, hint: str = "", is_quiet: bool = False) -> None:
        super().__init__(message, hint)
        self.is_quiet = is_quiet


class SettingsError(UsageError, ValueError):
    """A setting has a value that cannot be used: names the setting, the value and what is allowed."""


class ArgumentWarning(UserWarning):
    """An argument of `kvtier.Llama` has no effect there; says what is done instead."""


class ContextLengthError(KvtierError, ValueError, exit_code=4):
    """A prompt does not fit the context. `n_tokens` is what was asked for, `n_ctx` what there is."""

    def __init__(self, n_tokens: int, n_ctx: int, hint: str = "") -> None:
        super().__init__(
            f"the prompt has {n_tokens:,} tokens, but the context holds {n_ctx:,} (and needs room for an answer)",
            hint or f"Shorten the prompt, or take a context of more than {n_tokens:,} tokens.",
        )
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class LlamaError(KvtierError, RuntimeError, exit_code=12):
    """llama.cpp could not load a model, create a context or compute a batch. `log` holds the last lines it logged."""

    def __init__(self, message: str, hint: str = "", log: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.log = log

    def __str__(self) -> str:
        lines = "".join(f"\n  llama.cpp: {line}" for line in self.log)
        return super().__str__() + lines


class SameBitsError(KvtierError):
    """The same bits however an answer is computed were asked for, and this llama.cpp or model cannot give them."""

    exit_code = 13


class PolicyError(KvtierError):
    """A placement policy failed: it could not be made, raised, took too long, or answered what cannot be carried
    out."""


class TraceError(UsageError):
    """A trace file that cannot be used: no trace, of another version, damaged, or cut short."""


class ScorerError(UsageError):
    """A scorer file that cannot be used: no scorer, of another version or shape, or damaged."""


class LibraryError(KvtierError, exit_code=11):
    """The native library is missing, cannot be loaded, or refuses the llama.cpp that is installed."""


class NativeError(KvtierError, RuntimeError):
    """The native library answered with an error code.

    `code` is that code (see kvtier-errors.h); `usual_hint` what to do about it, where the native message does not say.
    """

    code: int = 0
    usual_hint: str = ""

    def __init_subclass__(cls, *, code: int = 0, **others: Any) -> None:
        super().__init_subclass__(**others)
        if code:
            cls.code = code
            NATIVE_ERRORS[code] = cls


NATIVE_ERRORS: Final[dict[int, type[NativeError]]] = {}  # by code: the classes below enter themselves


class ClosedError(NativeError):
    """A model, or its cache, tokenizer, generator, was used after it had been closed."""


class AgainError(NativeError, code=-1):
    """A page is not resident yet; only seen by callers of the asynchronous interface."""


class InvalidArgumentError(NativeError, code=-2, exit_code=2):
    """The native library refused an argument."""


class OutOfMemoryError(NativeError, code=-3, exit_code=10):
    """The system gave no memory for a page or a table."""

    usual_hint = "Give the host tier a smaller budget (--kv-host), or close other programs."


class BudgetError(NativeError, code=-4, exit_code=5):
    """The budgets of the tiers together cannot hold another page."""

    usual_hint = "Raise the host budget (--kv-host)."


class DiskFullError(NativeError, code=-5, exit_code=7):
    """The disk tier has no room: its budget is used up, or the file system is full."""

    usual_hint = "Free space in the directory of the disk tier, raise --kv-disk, or choose another --kv-dir."


class DiskIOError(NativeError, code=-6, exit_code=8):
    """A read or write of the disk tier failed; the message names the page."""

    usual_hint = "Check the disk that holds --kv-dir (its log, its free space), or choose another --kv-dir."


class ChecksumError(NativeError, code=-7, exit_code=9):
    """The bytes of a page on disk are not those that were written; the message names the page."""

    usual_hint = (
        "The page file was changed or the disk is faulty: run again, with another --kv-dir if it happens again."
    )


class DirectoryError(NativeError, code=-8, exit_code=6):
    """The directory of the disk tier is missing, is no directory, or cannot be written."""

    usual_hint = "Name a directory that exists and can be written, with --kv-dir."


class UnsupportedError(NativeError, code=-9, exit_code=13):
    """The native library cannot do what was asked."""


class ConfigError(NativeError, SettingsError, code=-10, exit_code=2):
    """The native library refused a setting."""


class VersionError(NativeError, LibraryError, code=-11, exit_code=11):
    """The native library and the llama.cpp in this process do not fit together."""


class CancelledError(NativeError, code=-12, exit_code=130):
    """The computation was stopped on request."""


class BusyError(NativeError, code=-13):
    """A page cannot be moved or rewritten while attention has it: the next try may succeed."""


_NO_DISK_HINT: Final = "Raise the host budget (--kv-host), or add a disk tier (--kv-disk and --kv-dir)."


def from_code(code: int, message: str) -> NativeError:
    """The error for a negative code of the native library. The only place that maps codes to classes."""
    cls = NATIVE_ERRORS.get(code)
    if cls is None:
        error = NativeError(message)
        error.code = code
        return error
    return cls(message, _NO_DISK_HINT if cls is BudgetError and "no disk tier" in message else cls.usual_hint)
