"""Reads the headers of GGUF files: of one file, or of all files of a model; never the tensors' data.

The only exception that leaves this module is `GgufError` (and `OSError` never: it is turned into one).
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import GgufError
from .ggufbytes import AGAIN, Reader, parse
from .header import GgufHeader


def read_header(path: str | Path) -> GgufHeader:
    """Read the header of one file.

    Raises GgufError for anything that is not a complete, well-formed GGUF file of version 2 or 3, little-endian.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise GgufError(path, 0, "is a directory, not a GGUF file", _list_ggufs(path))
        if path.exists() and not path.is_file():
            raise GgufError(
                path, 0, "is not a regular file", "Name a .gguf file on disk: llama.cpp maps it into memory."
            )
        with path.open("rb") as file:
            file.seek(0, 2)
            n_bytes = file.tell()
            file.seek(0)
            return parse(Reader(path, file, n_bytes))
    except FileNotFoundError:
        raise GgufError(path, 0, "no such file", "Check the path; `kvtier models` lists the known names.") from None
    except (OSError, ValueError) as err:
        reason = (err.strerror if isinstance(err, OSError) else None) or str(err)
        raise GgufError(path, 0, f"cannot be read: {reason}", "Check the path and its permissions.") from err


def read_model(path: str | Path) -> tuple[GgufHeader, ...]:
    """Read the headers of all files of a model: one, or every part of a split model, in order.

    `path` is the only file or the first part. Raises GgufError, also for a missing part.
    """
    first = read_header(path)
    n_parts = first.get_int("split.count", 1) or 1
    if n_parts <= 1:
        check_figures((first,))
        return (first,)
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", first.path.name)
    if match is None or int(match[3]) != n_parts or n_parts > 99_999:
        raise GgufError(
            first.path,
            0,
            f"is one part of {n_parts}, but its name is not of the form NAME-00001-of-{n_parts:05d}.gguf",
            "Give all parts the names they were published with.",
        )
    if int(match[2]) != 1:
        raise GgufError(
            first.path,
            0,
            f"is part {int(match[2])} of {n_parts}",
            f"Name the first part: {match[1]}-00001-of-{match[3]}.gguf",
        )
    rest = (first.path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(2, n_parts + 1))
    headers = (first, *(read_header(part) for part in rest))
    check_figures(headers)
    return headers


def check_figures(headers: tuple[GgufHeader, ...]) -> None:
    """Figures that llama.cpp takes on trust and ends the process over: layers, context length, epsilons of norms."""
    first = headers[0]
    key = first.arch_key("block_count")
    n_layers = first.get_int(key)
    names = (info.name.split(".") for header in headers for info in header.tensors)
    blocks = [int(name[1]) for name in names if len(name) > 2 and name[0] == "blk" and name[1].isdecimal()]
    if n_layers is not None and (n_layers < 1 or (blocks and n_layers > max(blocks) + 1)):
        holds = f"; the file has tensors of {max(blocks) + 1} layers" if blocks else ""
        raise GgufError(
            first.path, first.data_off_bytes, f"key '{key}' is {n_layers:,}, which is not possible{holds}", AGAIN
        )
    for key, value in first.metadata.items():
        if key.endswith("_epsilon") and isinstance(value, float) and not 0.0 <= value < 1e30:
            raise GgufError(first.path, first.data_off_bytes, f"key '{key}' is {value}, which is not possible", AGAIN)
    key = first.arch_key("context_length")
    n_ctx = first.get_int(key)
    if n_ctx is not None and not 0 < n_ctx < 1 << 31:
        raise GgufError(first.path, first.data_off_bytes, f"key '{key}' is {n_ctx:,}, which is not possible", AGAIN)


def _list_ggufs(folder: Path) -> str:
    names = sorted(p.name for p in folder.glob("*.gguf"))[:5]
    return f"Name a file in it: {', '.join(names)}" if names else "It holds no .gguf file."
