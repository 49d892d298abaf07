"""Files that a command leaves: written beside their place until they are whole, refused with what would help."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from .errors import OutputError

_WAYS_OUT = {
    errno.ENOSPC: "Free space there, or name another file.",
    errno.EDQUOT: "Free space there, or name another file.",
    errno.ENOENT: "Make its folder first, or name another file.",
}


def unwritable(what: str, err: OSError) -> OutputError:
    """The error for `what` ("the trace x.trace") that could not be written."""
    return OutputError(f"{what} cannot be written: {err.strerror}", _WAYS_OUT.get(err.errno or 0, "Name another file."))


def aside(path: Path) -> Path:
    """Where a file is written until it is whole: beside it, under a name that says so.

    What is no plain file is written in place.
    """
    path = path.resolve()  # a link keeps pointing at what it points at
    return path.with_name(path.name + ".part") if path.is_file() or not path.exists() else path


def settle(written: Path, path: Path) -> None:
    """Put what was written `aside` in its place. Raises OSError."""
    if written != path.resolve():
        written.replace(path.resolve())


def discard(written: Path, path: Path) -> None:
    """Remove what was written `aside`."""
    if written != path.resolve():
        with suppress(OSError):
            written.unlink()


def require_writable(path: Path, what: str) -> None:
    """Raises OutputError if `path` cannot be written; a file that is there stays as it is, and none is left where there
    was none."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as err:
        raise unwritable(what, err) from None
