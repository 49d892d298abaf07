"""The online state: a fixed number of cells per KV head that sum up every token that has left for good."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..native.summary import SummaryCells

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(slots=True)
class OnlineState:
    """Cells of one layer.

    A token joins the cell whose centre is nearest to its key; centre and value are running means.

    Attributes:
        n_cells: cells per KV head.
        spread: also keep the variance of the keys around each centre.
        max_spread: variances count at most this many times the mean of all, since few tokens tell little.
    """

    n_head_kv: int
    d_k: int
    d_v: int
    n_cells: int
    spread: bool = False
    n_tokens: int = 0
    _key: Halves = field(init=False)
    _value: Halves = field(init=False)
    _square: Halves | None = field(init=False)
    _count: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._key = np.zeros((self.n_head_kv, self.n_cells, self.d_k), np.float16)
        self._value = np.zeros((self.n_head_kv, self.n_cells, self.d_v), np.float16)
        self._square = np.zeros_like(self._key) if self.spread else None
        self._count = np.zeros((self.n_head_kv, self.n_cells), np.float32)

    @staticmethod
    def bytes_per_cell(d_k: int, d_v: int, spread: bool) -> int:
        """What a cell takes: here and, once more, in the native library."""
        return 2 * (2 * (d_k + d_v) + (2 * d_k if spread else 0) + 4)

    def add(self, keys: Floats, values: Floats) -> None:
        """Tokens that leave: keys [n, n_head_kv, d_k], values [n, n_head_kv, d_v]."""
        self.n_tokens += len(keys)
        for h in range(self.n_head_kv):
            self._add_to_head(h, keys[:, h], values[:, h])

    def _add_to_head(self, h: int, keys: Floats, values: Floats) -> None:
        used = int(np.count_nonzero(self._count[h]))
        n_new = min(self.n_cells - used, max(1, len(keys) // 8))
        centres = self._key[h].astype(np.float32)
        for _ in range(n_new):  # a cell begins where a token is farthest from all others
            pick = int(np.square(keys[:, None] - centres[None, :used]).sum(2).min(1).argmax()) if used else 0
            centres[used] = keys[pick]
            used += 1
        nearest = self._nearest(keys, centres[:used])
        joined = np.bincount(nearest, minlength=self.n_cells).astype(np.float32)
        hit = np.flatnonzero(joined)
        before = self._count[h, hit][:, None]
        total = before + joined[hit][:, None]
        one_hot = (nearest[None, :] == hit[:, None]).astype(np.float32)  # [hit, n]
        for state, rows in ((self._key, keys), (self._value, values)):
            state[h, hit] = (before * state[h, hit].astype(np.float32) + one_hot @ rows) / total
        if self._square is not None:
            self._square[h, hit] = (
                before * self._square[h, hit].astype(np.float32) + one_hot @ np.square(keys)
            ) / total
        self._count[h, hit] = total[:, 0]

    @staticmethod
    def _nearest(keys: Floats, centres: Floats) -> npt.NDArray[np.int64]:
        distance = np.square(centres).sum(1)[None, :] - 2 * keys @ centres.T
        nearest: npt.NDArray[np.int64] = distance.argmin(1)
        return nearest

    def cells(self) -> SummaryCells | None:
        """The cells as attention takes them; None while there is nothing in them."""
        if self.n_tokens == 0:
            return None
        with np.errstate(divide="ignore"):
            log_count = np.log(self._count)
        variance = None
        if self._square is not None:
            variance = np.maximum(self._square.astype(np.float32) - np.square(self._key.astype(np.float32)), 0)
        return SummaryCells(self._key.astype(np.float32), self._value.astype(np.float32), log_count, variance)
