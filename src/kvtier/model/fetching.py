"""What all ways of fetching a file share: how far one is, and the sum that shows what came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

BLOCK: Final = 1 << 20  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is. `n_bytes_total` is None if unknown; `stage` is "wait", "fetch" or "check"."""

    name: str
    stage: Literal["wait", "fetch", "check"]
    n_bytes_done: int
    n_bytes_total: int | None


ProgressFn = Callable[[FetchProgress], None]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
