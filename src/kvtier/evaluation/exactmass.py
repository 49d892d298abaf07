"""The attention mass of an exact step, page by page: kept by the reference, and asked where a row has its pages.

The file is float16 [n_tokens, n_pages of all layers]; a page has the same number in every run, because llama.cpp gives
the same cells to the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from ..figures import TIERS
from ..measuring.engine import Engine, Pages

# Only the last step counts, so that the mass kept per page is that step's.
EVERY_STEP: Final = "mass-decay=0\n"
_NONE, _DISK, _REMOTE = (TIERS.index(name) for name in ("none", "disk", "remote"))


class MassWriter:
    """Writes the mass of each step of the reference. `close` leaves the file whole or removes it."""

    def __init__(self, path: Path, n_tokens: int) -> None:
        self._path, self._n_tokens, self._n_done = path, n_tokens, 0
        self._table: np.memmap[tuple[int, int], np.dtype[np.float16]] | None = None

    def after_step(self, engine: Engine) -> None:
        pages = engine.pages()
        if pages is None or pages.mass.size == 0:
            return
        if self._table is None:
            self._table = np.memmap(self._path, np.float16, "w+", shape=(self._n_tokens, pages.mass.size))
        self._table[self._n_done] = pages.mass
        self._n_done += 1

    def close(self) -> None:
        if self._table is not None:
            self._table.flush()
        if self._n_done < self._n_tokens:
            self._path.unlink(missing_ok=True)


class MassReader:
    """Adds up, step by step, how much of the exact step's attention lies on pages that a row no longer has in RAM."""

    def __init__(self, path: Path, n_tokens: int) -> None:
        self._path, self._n_tokens, self._step = path, n_tokens, 0
        self._table: np.memmap[tuple[int, int], np.dtype[np.float16]] | None = None
        self._before: Pages | None = None
        self.evicted_sum = self.gone_sum = 0.0  # shares of mass, mean over layers, summed over steps
        self.n_steps = 0

    def before_step(self, engine: Engine) -> None:
        """Look where the pages are, before the step brings any back."""
        self._before = engine.pages() if self._path.exists() else None

    def after_step(self, engine: Engine) -> None:
        """Count the step that `before_step` was called for."""
        step, self._step = self._step, self._step + 1
        before, after = self._before, engine.pages()
        if before is None or after is None or before.mass.size == 0:
            return
        if self._table is None:
            n_pages = self._path.stat().st_size // (2 * self._n_tokens)
            self._table = np.memmap(self._path, np.float16, "r", shape=(self._n_tokens, n_pages))
        if self._table.shape[1] != before.mass.size:  # pages of another size cannot be compared
            return
        mass = self._table[step].astype(np.float64)
        # a page that had no content before the step and has some after it was begun in the step
        gone = (before.tier == _NONE) & (after.tier == _NONE)
        outside = gone | (before.tier == _DISK) | (before.tier == _REMOTE)
        self.evicted_sum += layer_share(before.layer, mass, outside)
        self.gone_sum += layer_share(before.layer, mass, gone)
        self.n_steps += 1


def layer_share(layer: np.ndarray, mass: np.ndarray, chosen: np.ndarray) -> float:
    """The share of each layer's mass that lies on the chosen pages, mean over layers; all arrays [n_pages]."""
    total = np.bincount(layer, mass)
    part = np.bincount(layer, mass * chosen)
    used = total > 0
    return float((part[used] / total[used]).mean()) if used.any() else 0.0
