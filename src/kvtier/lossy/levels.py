"""How much is kept of each page: whole, in fewer bits, or not at all.

What counts is what the budget holds in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..figures import LayerFigures
from ..formats import BY_NAME, page_bytes

SUB: Final = 32
TOP_SHARE: Final = 0.15  # KL at 20 % of the bytes is a fifth lower than with 0, and not lower still with 0.4
TRAILER_BYTES: Final = 64  # what a frame of the store has behind a page


@dataclass(frozen=True, slots=True)
class Level:
    """Formats of a page's keys and values."""

    fmt_k: str
    fmt_v: str

    def page_bytes(self, layer: LayerFigures) -> int:
        """What a page of the layer takes in RAM in these formats."""
        n_bytes = page_bytes(layer, self.fmt_k, self.fmt_v, layer.page_tokens)
        if n_bytes is None:
            raise ValueError(f"heads of {layer.d_k} and {layer.d_v} channels cannot be {self.fmt_k} and {self.fmt_v}")
        return n_bytes + TRAILER_BYTES


def growing(layers: Iterable[LayerFigures]) -> list[LayerFigures]:
    """Layers whose caches grow with the text; the others see a sliding window."""
    known = list(layers)
    longest = max((layer.cells_per_stream for layer in known), default=0)
    return [layer for layer in known if layer.cells_per_stream == longest]


def ladder(fmt_k: str, fmt_v: str, layer: LayerFigures) -> tuple[Level, ...]:
    """The levels below a page's own formats, largest first, the own one included; only own if its heads cannot be
    quantized."""
    own = Level(fmt_k, fmt_v)
    if layer.d_k % SUB or layer.d_v % SUB or layer.d_v == 0:
        return (own,)
    lower = (Level("q8_0", "q8_0"), Level("q8_0", "q4_0"), Level("q4_0", "q4_0"))
    bits_k, bits_v = BY_NAME[fmt_k].bits, BY_NAME[fmt_v].bits
    fewer = (level for level in lower if BY_NAME[level.fmt_k].bits <= bits_k and BY_NAME[level.fmt_v].bits <= bits_v)
    return (own, *(level for level in fewer if level.page_bytes(layer) < own.page_bytes(layer)))


def assign(keep: npt.NDArray[np.float32], sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """A level for each of n pages, so that they fit into `room` bytes: int64 [n], index into the levels, n_levels for
    gone.

    Args:
        keep: float32 [n], how much each page is wanted.
        sizes: int64 [n_levels], bytes of a page at each level, falling.
        room: bytes for all of them.

    Between two neighbouring levels the pages that are wanted most get the larger one; no page is gone while all fit at
    the smallest level. When some are gone, `TOP_SHARE` of those that stay get the level above the smallest.
    """
    n, n_levels = len(keep), len(sizes)
    level = np.full(n, n_levels, np.int64)
    order = np.argsort(-keep, kind="stable")
    if n == 0:
        return level
    if n * int(sizes[-1]) > room:
        low, top = n_levels - 1, max(0, n_levels - 2)
        n_kept = max(0, int(room / ((1 - TOP_SHARE) * sizes[low] + TOP_SHARE * sizes[top])))
        level[order[:n_kept]] = low
        level[order[: int(TOP_SHARE * n_kept)]] = top
        return level
    low = next(i for i in range(n_levels) if n * int(sizes[i]) <= room)  # the largest level that all fit at
    level[:] = low
    if low > 0:
        n_up = int((room - n * int(sizes[low])) // int(sizes[low - 1] - sizes[low]))
        level[order[:n_up]] = low - 1
    return level
