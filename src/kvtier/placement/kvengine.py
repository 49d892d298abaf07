"""A model's KV cache as policies and plans see it: figures of its pages, budgets, and moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..figures import UNLIMITED, Figures
from ..formats import BY_NAME
from ..native.kv import KVCache, LayerMass
from ..native.pagekeys import PageKeys
from ..policies.base import (
    GONE,
    HOST,
    Budgets,
    Floats,
    Indices,
    Observation,
    PageStats,
)
from ..policies.looks import LayerLook, Shape, Tracker
from ..settings import MASS_DECAY

TEXT_TOKENS: Final = 512  # of the newest text that policies are told of
RATE_STEPS: Final = 33


class KVEngine:
    """A model's KV cache as an engine. `advance` is told of every decoded token; `to_text` turns tokens into text."""

    def __init__(self, kv: KVCache, to_text: Callable[[Sequence[int]], str] = lambda _tokens: "") -> None:
        self._kv: Final = kv
        self._keys: Final = PageKeys(kv)
        self._to_text: Final = to_text
        self._newest: deque[int] = deque(maxlen=TEXT_TOKENS)
        self._times: deque[float] = deque(maxlen=RATE_STEPS)  # when the last single tokens were decoded
        self._n_seen = 0
        self._weights = 0.0  # what one step's mass sums to over all layers
        self._tracker: Tracker | None = None
        self._n_pages: dict[int, int] = {}  # by array

    def advance(self, tokens: Sequence[int]) -> None:
        self._n_seen += len(tokens)
        self._newest.extend(tokens)
        if len(tokens) == 1:
            self._times.append(time.perf_counter())
        else:
            self._times.clear()

    def observation(self) -> Observation:
        times = tuple(self._times)
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        lost = self._lost()
        return Observation(self._to_text(tuple(self._newest)), rate, lost, None if lost is None else 1.0 - lost)

    def _lost(self) -> float | None:
        """Share of the mass that pages had when they were dropped for good, as if they had it still; None where none is
        dropped.

        What attention would give them now cannot be measured any more. Mass fades with age, so this is rather too much.
        """
        if self._kv.settings.fidelity != "lossy" or self._weights <= 0:
            return None
        return min(1.0, self._kv.lost_mass() / self._weights)

    def stats(self) -> PageStats:
        """Raises NativeError if the caches change meanwhile."""
        layers = [self._kv.layer(i) for i in range(self._kv.n_layers)]
        shape = self._shape(layers)
        if self._tracker is None or self._tracker.shape != shape:
            self._tracker = Tracker(shape)
        pages = [self._kv.pages(i).tier for i in range(len(layers))]
        sizes = page_sizes(self._kv.figures, layers, pages)
        cells = max((layer.figures.cells_per_stream for layer in layers), default=0)
        self._keys.begin_look()
        keys = [self._keys.look(layer.figures, tier) for layer, tier in zip(layers, pages, strict=True)]
        looks = [
            LayerLook(
                array=layer.figures.array,
                layer=layer.figures.layer,
                pages_per_stream=layer.figures.n_pages // max(1, layer.figures.n_streams),
                tier=tier,
                bytes=np.full(len(tier), size, np.int64),
                mean=layer.page_mean.copy(),
                max=layer.page_max.copy(),
                key_norm=key_norm,
                value_norm=value_norm,
                key_novelty=key_novelty,
                sharp=np.sqrt(np.einsum("pt,pt->p", layer.token_mean, layer.token_mean)),
                weight=self._weight(layer),
                is_window=layer.figures.cells_per_stream < cells,
            )
            for layer, tier, size, (key_norm, value_norm, key_novelty) in zip(layers, pages, sizes, keys, strict=True)
        ]
        self._n_pages = {look.array: len(look.tier) for look in looks}
        self._weights = sum(look.weight for look in looks)
        return self._tracker.stats(looks, self._n_seen, self._n_tokens(looks))

    def _shape(self, layers: Sequence[LayerMass]) -> Shape:
        protect_first, protect_last = self._kv.settings.protected_pages
        return Shape(
            n_layers=1 + max((layer.figures.layer for layer in layers), default=0),
            page_tokens=layers[0].figures.page_tokens if layers else 1,
            protect_first=protect_first,
            protect_last=protect_last,
        )

    def _weight(self, layer: LayerMass) -> float:
        """What one step's mass sums to: the query heads, as far as the decayed mean of the steps so far tells."""
        decay = self._kv.settings.mass_decay
        part = 1 - (MASS_DECAY if decay is None else decay) ** max(1, layer.figures.n_mass_steps)
        return float(layer.page_mean.sum()) / part or 1.0

    def _n_tokens(self, looks: Sequence[LayerLook]) -> int:
        """Tokens of the longest stream: those seen, as far as the pages that are begun agree (context may be taken
        back)."""
        begun = 0
        for look in looks:
            there = np.flatnonzero(look.tier != GONE) % look.pages_per_stream
            begun = max(begun, int(there.max()) + 1 if len(there) else 0)
        tokens = self._tracker.shape.page_tokens if self._tracker else 1
        return min(max(self._n_seen, (begun - 1) * tokens + 1), begun * tokens)

    def budgets(self) -> Budgets:
        """Where what leaves the host has no place to go, no page can leave: then the host has no limit for a plan."""
        settings, tiers = self._kv.settings, self._kv.figures.tiers
        host, disk = tiers["host"].budget_bytes, tiers["disk"].budget_bytes
        if settings.disk is None:
            return Budgets(UNLIMITED if host is None or settings.fidelity != "lossy" else host, 0)
        return Budgets(UNLIMITED if host is None else host, UNLIMITED if disk is None else disk)

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        return self._kv.move(array, pages, to_tier)

    def compact(self) -> None:
        self._kv.compact()

    def set_keep(self, array: int, pages: Indices, keep: Floats) -> None:
        """Pages without content, which may be begun before the next plan, are kept like the best."""
        scores = np.full(self._n_pages[array], keep.max(initial=0.0), np.float32)
        scores[pages] = keep
        self._kv.set_keep(array, scores)


def page_sizes(
    figures: Figures, layers: Sequence[LayerMass], tiers: Sequence[np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> list[int]:
    """Bytes of a page of each layer in RAM: the tier's bytes, shared out by what a cell of the layer holds."""
    weights = [f.page_tokens * f.n_head_kv * (f.d_k + f.d_v) for f in (layer.figures for layer in layers)]
    held = sum(weight * int(np.count_nonzero(tier == HOST)) for weight, tier in zip(weights, tiers, strict=True))
    used = figures.tiers["host"].used_bytes
    bytes_per_item = used / held if held and used else BY_NAME["f16"].bits / 8
    return [max(1, round(weight * bytes_per_item)) for weight in weights]
