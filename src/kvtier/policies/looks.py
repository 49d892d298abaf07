"""From what an engine shows of its layers to PageStats, with what only repeated looks can tell: idle time and uses.

The live engine and the simulator both go through here, so that a policy, and a scorer trained on traces, sees the same
figures in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .base import ARRAYS, GONE, Floats, Indices, PageStats


@dataclass(frozen=True, slots=True)
class LayerLook:
    """One layer at one moment: arrays of [n_pages], all pages of the array whether they have content or not.

    Attributes:
        array: id of the array; layer: its layer.
        pages_per_stream: page = stream * pages_per_stream + position.
        tier: uint8, index into TIERS; GONE is a page without content.
        bytes: int64 on its tier.
        mean, max: float32, decayed mean and maximum of the page's mass, in the engine's own unit.
        weight: what one step's mass of the layer sums to in that unit.
        sharp: float32, root of the sum of squares of the decayed means of the page's tokens, in the unit of `mean`.
        key_norm, value_norm, key_novelty: float32, or empty where the engine gives none; so is sharp.
        is_window: the layer sees a sliding window only, in a cache used as a ring: its pages are all protected.
    """

    array: int
    layer: int
    pages_per_stream: int
    tier: npt.NDArray[np.uint8]
    bytes: Indices
    mean: Floats
    max: Floats
    key_norm: Floats
    value_norm: Floats
    key_novelty: Floats
    sharp: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    weight: float = 1.0
    is_window: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What holds for all layers: depth of the model, page size, and how many pages of each stream may not leave."""

    n_layers: int
    page_tokens: int
    protect_first: int = 1
    protect_last: int = 2


@dataclass(slots=True)
class _Memory:
    """What earlier looks at an array saw, [n_pages] each."""

    n_looks: Floats
    n_uses: Floats
    mass: Floats  # sum over the looks
    last_used: npt.NDArray[np.float64]
    had_content: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Tracker:
    """Makes PageStats from looks. One per engine; not for two threads at once."""

    shape: Shape
    _memory: dict[int, _Memory] = field(default_factory=dict)
    _n_tokens: int = 0
    _n_taken_back: int = 0

    def stats(self, looks: Sequence[LayerLook], clock: int, n_tokens: int) -> PageStats:
        """The pages with content of all layers at step `clock`; `n_tokens` are in the longest stream."""
        if n_tokens < self._n_tokens:
            self._n_taken_back += 1
            self._memory.clear()
        self._n_tokens = n_tokens
        parts = [self._layer(look, clock, n_tokens) for look in looks]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _nothing()
        return PageStats(
            **columns,
            clock=clock,
            n_tokens=n_tokens,
            page_tokens=self.shape.page_tokens,
            n_taken_back=self._n_taken_back,
        )

    def _layer(self, look: LayerLook, clock: int, n_tokens: int) -> dict[str, npt.NDArray[np.generic]]:
        there = np.flatnonzero(look.tier != GONE)
        position = (there % look.pages_per_stream).astype(np.int32)
        newest = self._newest(there, position, look.pages_per_stream)
        total = max(
            float(look.mean[there].sum()), 1e-12
        )  # a decayed mean of few steps does not sum to the full weight yet
        mean = look.mean[there] / np.float32(total)
        idle, uses, long = self._look(look, there, mean * (newest + 1) > 1, mean, clock)
        tokens = self.shape.page_tokens
        behind = (newest - position).astype(np.float32)
        # how far the newest page is filled is known for the longest stream only
        age = np.maximum(behind * tokens - (tokens - 1 - (max(1, n_tokens) - 1) % tokens), 0).astype(np.float32)
        protected = (position < self.shape.protect_first) | (behind < self.shape.protect_last) | look.is_window
        n = len(there)
        return {
            "array": np.full(n, look.array, np.uint32),
            "page": there.astype(np.uint32),
            "layer": np.full(n, look.layer, np.int32),
            "layer_depth": np.full(n, look.layer / max(1, self.shape.n_layers - 1), np.float32),
            "position": position,
            "tier": look.tier[there],
            "bytes": look.bytes[there],
            "age": age,
            "idle": np.minimum(idle, age),
            "mass_mean": mean,
            "mass_max": look.max[there] / np.float32(look.weight),
            "mass_long": long,
            "mass_sharp": _or_zeros(look.sharp, there) / np.float32(total),
            "uses": uses,
            "key_norm": _relative(_or_zeros(look.key_norm, there)),
            "value_norm": _relative(_or_zeros(look.value_norm, there)),
            "key_novelty": _known_or_mean(_or_zeros(look.key_novelty, there)),
            "protected": protected,
        }

    @staticmethod
    def _newest(there: Indices, position: npt.NDArray[np.int32], per_stream: int) -> npt.NDArray[np.int32]:
        """Of every page, the position of the newest page of its stream."""
        if not len(there):
            return position
        stream = there // per_stream
        last = np.zeros(int(stream[-1]) + 1, np.int32)
        np.maximum.at(last, stream, position)
        newest: npt.NDArray[np.int32] = last[stream]
        return newest

    def _look(
        self, look: LayerLook, there: Indices, used: npt.NDArray[np.bool_], mean: Floats, clock: int
    ) -> tuple[Floats, Floats, Floats]:
        """Steps since the last look that found each page used, the share of looks that did, and the mean of the mass
        they saw."""
        n_pages = len(look.tier)
        memory = self._memory.get(look.array)
        if memory is None or len(memory.n_looks) != n_pages:
            zeros = np.zeros(n_pages, np.float32)
            memory = _Memory(
                zeros, zeros.copy(), zeros.copy(), np.full(n_pages, float(clock)), np.zeros(n_pages, np.bool_)
            )
            self._memory[look.array] = memory
        content = look.tier != GONE
        fresh = content & ~memory.had_content  # a page begun since, or begun anew
        memory.n_looks[fresh] = memory.n_uses[fresh] = memory.mass[fresh] = 0
        memory.last_used[fresh] = clock
        memory.had_content = content
        memory.n_looks[there] += 1
        memory.mass[there] += mean
        memory.n_uses[there[used]] += 1
        memory.last_used[there[used]] = clock
        # last_used of a page that was there at the first look and never used is that look: its age limits idle from
        # above, and nothing is known of the time before
        n_looks = memory.n_looks[there]
        return (
            (clock - memory.last_used[there]).astype(np.float32),
            memory.n_uses[there] / n_looks,
            memory.mass[there] / n_looks,
        )


def _or_zeros(values: Floats, there: Indices) -> Floats:
    return values[there] if len(values) else np.zeros(len(there), np.float32)


def _relative(values: Floats) -> Floats:
    """Values over their mean, less 1, at most 4. A value of 0 is not known, and counts as the mean."""
    values = _known_or_mean(values)
    mean = float(values.mean()) if len(values) else 0.0
    if mean <= 0:
        return np.zeros(len(values), np.float32)
    relative: Floats = np.clip(values / np.float32(mean) - np.float32(1), -1, 4)
    return relative


def _known_or_mean(values: Floats) -> Floats:
    known = values != 0
    n_known = int(np.count_nonzero(known))
    if n_known in (0, len(values)):
        return values
    return np.where(known, values, np.float32(values[known].mean()))


def _nothing() -> dict[str, npt.NDArray[np.generic]]:
    kinds: dict[str, type[np.generic]] = {
        "array": np.uint32,
        "page": np.uint32,
        "layer": np.int32,
        "position": np.int32,
        "tier": np.uint8,
        "bytes": np.int64,
        "protected": np.bool_,
    }
    return {name: np.zeros(0, kinds.get(name, np.float32)) for name in ARRAYS}
