"""Fill a long context without computing it: repeat the cells of a short one's saved state.

The time of one decode step depends on how many cells attention reads and in which format, not on the numbers in them,
so a context of 32,768 tokens for a speed measurement may hold a few hundred real tokens over and over. Quality is
never measured this way.

The layout read here is the one that `llama_state_seq_get_data` of the pinned llama.cpp writes: a head of 8 bytes
(magic, sequence), then for every cache (one, or two with sliding windows): the number of streams, and per stream the
number of cells, position and sequence of each cell, whether V is transposed, the number of layers, and per layer the
type, the row size and the rows, keys first. Anything else raises StateLayoutError, and the caller computes the
context instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import StateLayoutError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer's keys or values: ggml type and rows, uint8 [n_cells, row_bytes]."""

    kind: int
    rows: Bytes


@dataclass(frozen=True, slots=True)
class Cache:
    """The cells of one stream of one cache: positions int32 [n_cells], keys and values per layer."""

    positions: NDArray[np.int32]
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A parsed sequence state."""

    head: bytes
    caches: tuple[Cache, ...]


class _Reader:
    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, n_bytes: int) -> Bytes:
        if n_bytes < 0 or self.at + n_bytes > self.data.size:
            raise StateLayoutError(
                f"the saved state ends after {self.data.size} bytes, {n_bytes} more wanted at {self.at}"
            )
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)).tobytes())[0]
        return value

    def rows(self, n_cells: int) -> Rows:
        kind = self.number("i")
        row_bytes = self.number("Q")
        if row_bytes > 1 << 24:
            raise StateLayoutError(f"a row of {row_bytes} bytes: the layout of the saved state is not the known one")
        return Rows(kind, self.take(n_cells * row_bytes).reshape(n_cells, row_bytes))


def _parse_cache(reader: _Reader, with_values: bool) -> Cache:
    if (n_stream := reader.number("I")) != 1:
        raise StateLayoutError(f"{n_stream} streams in a sequence state, 1 expected")
    n_cells = reader.number("I")
    cells = reader.take(n_cells * 12).view("<i4").reshape(n_cells, 3)
    if n_cells == 0 or not (cells[:, 1] == 1).all():
        raise StateLayoutError("cells with anything but one sequence each cannot be repeated")
    if reader.number("I") != 0:
        raise StateLayoutError("V is transposed: save the state with flash attention on")
    n_layer = reader.number("I")
    if n_layer > 4096:
        raise StateLayoutError(f"{n_layer} layers: the layout of the saved state is not the known one")
    keys = tuple(reader.rows(n_cells) for _ in range(n_layer))
    values = tuple(reader.rows(n_cells) for _ in range(n_layer if with_values else 0))
    return Cache(cells[:, 0].astype(np.int32), keys, values)


def parse(data: Bytes) -> SequenceState:
    """Parse a sequence state, uint8 [n_bytes]. Raises StateLayoutError where it is not the known layout."""
    for with_values in (True, False):  # caches of models with V inside K have no values of their own
        reader = _Reader(data)
        head = reader.take(8).tobytes()
        caches: list[Cache] = []
        try:
            while reader.at < data.size:
                caches.append(_parse_cache(reader, with_values))
        except StateLayoutError:
            if with_values:
                continue
            raise
        if caches:
            return SequenceState(head, tuple(caches))
    raise StateLayoutError("the saved state holds no cells")


def _cache_bytes(cache: Cache) -> list[bytes | Bytes]:
    n = cache.positions.size
    cells = np.zeros((n, 3), dtype="<i4")
    cells[:, 0] = cache.positions
    cells[:, 1] = 1
    parts: list[bytes | Bytes] = [struct.pack("<II", 1, n), cells.tobytes(), struct.pack("<II", 0, len(cache.keys))]
    for rows in (*cache.keys, *cache.values):
        parts += [struct.pack("<iQ", rows.kind, rows.rows.shape[1]), rows.rows.reshape(-1)]
    return parts


def serialise(state: SequenceState) -> Bytes:
    """The inverse of `parse`, uint8 [n_bytes]."""
    parts: list[bytes | Bytes] = [state.head]
    for cache in state.caches:
        parts += _cache_bytes(cache)
    return np.concatenate([np.frombuffer(p, np.uint8) if isinstance(p, bytes) else p for p in parts])


def _repeat(rows: Rows, n: int) -> Rows:
    times = -(-n // rows.rows.shape[0])
    return Rows(rows.kind, np.tile(rows.rows, (times, 1))[:n])


def lengthen(state: SequenceState, n_tokens: int, n_window: int) -> SequenceState:
    """The state of a sequence of `n_tokens`, with the cells of `state` repeated as often as needed.

    The first cache gets all positions; others (sliding windows) the last `n_window` of them, which is what
    llama.cpp saves of them; `n_window` 0 means that there is no window.
    """
    caches = []
    for i, cache in enumerate(state.caches):
        n = min(n_tokens, n_window) if i > 0 and n_window > 0 else n_tokens
        positions = np.arange(n_tokens - n, n_tokens, dtype=np.int32)
        keys = tuple(_repeat(rows, n) for rows in cache.keys)
        caches.append(Cache(positions, keys, tuple(_repeat(rows, n) for rows in cache.values)))
    return SequenceState(state.head, tuple(caches))
